"""Runs the trainer on a disk that is full for one process: `python -m tests.integration.failing_saves RANK FIRST LAST`
followed by options; from optimizer step FIRST to LAST that process can write no file beyond 2,000 bytes."""

import resource
import sys

import pytorch_lightning as pl

from sd_training.callbacks.base import OptimizerStepCallback
from sd_training.cli import run_cli
from sd_training.training import TrainedModule
from tests.integration.training import prepare


class FullDisk(OptimizerStepCallback):
    """A limit on the size of files, within an interval of optimizer steps."""

    def __init__(self, first: int, last: int, limit_bytes: int = 2000) -> None:
        self.first, self.last, self.limit_bytes = first, last, limit_bytes

    def on_optimizer_step(self, trainer: pl.Trainer, module: TrainedModule, step: int) -> None:
        is_full = self.first <= step <= self.last
        limit = self.limit_bytes if is_full else resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))


def main() -> None:
    rank, first, last, *argv = sys.argv[1:]
    run = prepare(argv)
    if run.trainer.strategy.global_rank == int(rank):
        run.trainer.callbacks.insert(0, FullDisk(int(first), int(last)))  # type: ignore[attr-defined]
    run.trainer.fit(run.module, datamodule=run.data)


if __name__ == "__main__":
    run_cli(main)
