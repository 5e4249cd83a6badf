import os
import signal
import subprocess
import sys
from pathlib import Path

import torch

from sd_training.config.plan import BatchPlan
from sd_training.signals import FOR_THE_TRAINING_PROCESS
from tests.unit.data.making import training_data


def test_a_loader_process_obeys_the_training_process_only(shards_dir: Path) -> None:
    before = set(torch.multiprocessing.active_children())
    plan = BatchPlan(micro_batch=8, accumulation=1, processes=1, num_examples=80)
    iterator = iter(training_data(shards_dir, plan, workers=1).loader(0, lambda: 0))
    next(iterator)
    (worker,) = set(torch.multiprocessing.active_children()) - before
    for number in FOR_THE_TRAINING_PROCESS:  # as SLURM does, to all processes
        subprocess.run(["kill", f"-{int(number)}", str(worker.pid)], check=True)
    for _ in range(9):
        next(iterator)
    assert worker.is_alive() and worker.pid is not None
    os.kill(worker.pid, signal.SIGTERM)
    worker.join(100)
    assert worker.exitcode == 0


def test_a_folder_for_temporary_files_that_is_too_long_for_a_socket(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    code = """
from sd_training.cli import run_cli
from sd_training.data.loader import worker_context
run_cli(worker_context)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "TMPDIR": str(folder)}, capture_output=True, text=True
    )
    assert done.returncode == 2 and done.stderr.startswith(f"error: TMPDIR: no socket can be made in {folder}"), (
        done.stderr
    )
