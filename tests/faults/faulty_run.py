"""A run of the trainer in which something goes wrong; started by `fork_server.py`, or as a module.

FAULT says what: `collective` (rank 0 waits for a collective that rank 1 leaves out), `decode` (a loader process of rank
1 sleeps), `worker` (each loader process is killed that there is at these steps), `defect` (rank 1 raises an exception
that names the data). Before step 3 every rank writes its process id to `at_step_3.RANK` in WATCH_DIR.
"""

import os
import runpy
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import distributed

from sd_training.build import run as building
from sd_training.data.datamodule import TrainingData
from tests.faults.sleeping_samples import FAULT_STEP, SleepingSamples

KILLS_AT = (3, 6, 9)


class Fault(pl.Callback):
    """Does it."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.folder = kind, folder
        self._group: Any = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Collective: a group for the collective that is left out."""
        if self.kind == "collective":
            self._group = distributed.new_group(backend="gloo")

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """At its steps."""
        step, rank = trainer.global_step, trainer.global_rank
        if step == FAULT_STEP:
            (self.folder / f"at_step_3.{rank}").write_text(str(os.getpid()))
        if self.kind == "collective" and step == FAULT_STEP and rank == 0:
            distributed.all_reduce(torch.zeros(1), group=self._group)
        if self.kind == "stop" and step >= FAULT_STEP:
            time.sleep(0.05)  # the signal comes while steps are made
        if self.kind == "worker" and step in KILLS_AT:
            for worker in torch.multiprocessing.active_children():
                os.kill(worker.pid or 0, signal.SIGKILL)

    def on_before_optimizer_step(self, trainer: pl.Trainer, *_: Any) -> None:
        """Defect: here, in the middle of a step, nobody asks the others whether to save what is left."""
        if self.kind == "defect" and trainer.global_step == FAULT_STEP and trainer.global_rank == 1:
            data: Any = trainer.datamodule  # type: ignore[attr-defined]
            raise RuntimeError(f"rank 1 alone cannot go on with {data.dataset.params.path}")


def train(words: list[str]) -> None:
    """`python train.py` with these words and the fault."""
    torch.set_num_threads(1)
    kind, build_run, samples = os.environ.get("FAULT", ""), building.build_run, TrainingData.samples

    def build_faulty(*given: Any) -> building.Run:
        run = build_run(*given)
        run.trainer.callbacks.append(Fault(kind, Path(os.environ["WATCH_DIR"])))  # type: ignore[attr-defined]
        return run

    if kind == "decode" and os.environ.get("RANK") == "1":
        TrainingData.samples = lambda self: SleepingSamples(samples(self))  # type: ignore
    building.build_run = build_faulty  # type: ignore[assignment]
    sys.argv = ["train.py", *words]
    runpy.run_module("train", run_name="__main__")


if __name__ == "__main__":
    train(sys.argv[1:])
