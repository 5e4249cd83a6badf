#!/usr/bin/env bash
# Does the trainer work on this machine's first GPU, and how fast is it there? Random weights, made-up data, no network.
# Three parts, of nine minutes each at most; a line of JSON per experiment (docs/benchmarks.md).
#
#   tests/gpu_check.sh part=1 out=part1.jsonl
#   tests/gpu_check.sh part=2 seconds=300 only="trainer,trainer: fp16"
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec "${PYTHON:-python}" -m tests.gpu_check "$@"
