#!/usr/bin/env bash
# Trains the UNet of Stable Diffusion 2 at 512 px on this machine's first GPU in every way that one GPU can, with random
# weights (nothing is downloaded), and prints images/s, memory and MFU of each: docs/benchmarks.md.
#
#   tests/gpu_check.sh [batch=64] [rows=4] [only=fsdp,deepspeed]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec "${PYTHON:-python}" -m tests.gpu_check "$@"
