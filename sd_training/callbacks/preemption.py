"""Stops a run that was asked to: all ranks after the same optimizer step, saved, with an exit status that says so."""

import os
from pathlib import Path

import pytorch_lightning as pl
import torch
from torch import Tensor, distributed

from sd_training.callbacks.every_step import OptimizerStepCallback
from sd_training.rank_log import get_logger
from sd_training.stop_signals import STOPPED, StopSignals
from sd_training.training.base_module import TrainedModule

log = get_logger(__name__)

STEP_FILE_VARIABLE = "SD_TRAINING_STEP_FILE"
"""Environment variable of a file that gets the number of the saved step, for a launcher that checks for progress."""


class Preemption(OptimizerStepCallback):
    """Sets `trainer.should_stop`; whatever is due at the end of a run is then due at this step, saves included.

    The first of the callbacks, so that the others of the same step see it. A signal to one rank stops all: after each
    optimizer step the ranks begin a reduction of their notes over gloo, and look at its result one step later, when it
    has long arrived. No device takes part, and one process alone communicates nothing.

    Args:
        signals: notes of this process.
    """

    def __init__(self, signals: StopSignals) -> None:
        self.signals = signals
        self.status = 0
        """0, or the exit status that all ranks agreed on."""
        self._group: distributed.ProcessGroup | None = None
        self._notes: Tensor | None = None
        self._reduction: distributed.Work | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Collective: makes the group."""
        super().on_train_start(trainer, pl_module)
        if trainer.world_size > 1:
            self._group = distributed.new_group(backend="gloo")
        self.signals.listen()

    def on_optimizer_step(self, trainer: pl.Trainer, module: TrainedModule, step: int) -> None:
        """Agree; the last step needs no stopping."""
        status = self._agreed()
        if step == trainer.max_steps:
            return
        if status:
            self.status = status
            trainer.should_stop = True
            log.info(f"a signal asks this run to stop: saving after optimizer step {step:,}")
        elif self._group is not None:
            self._begin_reduction()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Everything is saved: tell a launcher how far the run got."""
        path = os.environ.get(STEP_FILE_VARIABLE)
        if self.status == STOPPED and trainer.is_global_zero and path:
            Path(path).write_text(f"{trainer.global_step}\n", encoding="utf-8")

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Signals mean what they meant before."""
        self.signals.restore()

    def _begin_reduction(self) -> None:
        self._notes = torch.tensor([self.signals.status])
        self._reduction = distributed.all_reduce(
            self._notes, op=distributed.ReduceOp.MAX, group=self._group, async_op=True
        )

    def _agreed(self) -> int:
        """The strongest note of all ranks at the step before; of this process now where it is alone."""
        if self._group is None:
            return self.signals.status
        if self._reduction is None or self._notes is None:
            return 0
        self._reduction.wait()
        self._reduction = None
        return int(self._notes)
