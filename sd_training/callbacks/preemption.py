"""Stops a run that was asked to, and has it save when asked: all ranks after the same optimizer step."""

import os
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, distributed

from sd_training.callbacks.deadlines import Deadlines
from sd_training.callbacks.every_step import OptimizerStepCallback
from sd_training.callbacks.save_times import SaveTimes
from sd_training.checkpoint.durable import replace_text
from sd_training.exit_status import INTERRUPTED, STOPPED
from sd_training.rank_log import FOR_FILE, get_logger
from sd_training.stop_signals import StopSignals
from sd_training.training.base_module import TrainedModule
from sd_training.watch.status_file import tell_status

log = get_logger(__name__)

STEP_FILE_VARIABLE = "SD_TRAINING_STEP_FILE"
"""Environment variable of a file that gets the newest sealed step, for a launcher that checks for progress."""


@dataclass(frozen=True)
class Wishes:
    """What one rank asks for; of all ranks the largest of each counts."""

    status: int = 0
    """0, or the exit status that a signal asks for."""
    is_time_up: bool = False
    """A time limit is near."""
    is_save_due: bool = False
    """To save and go on."""


class Preemption(OptimizerStepCallback):
    """Sets `trainer.should_stop`; whatever is due at the end of a run is then due at this step, saves included.

    The first of the callbacks, so that the others of the same step see it (a validation that is broken off comes
    later, and those after it see it). A signal to one rank stops all: after each optimizer step the ranks begin a
    reduction of their wishes over gloo, and look at its result one step later, when it has long arrived. No device
    takes part, and one process alone communicates nothing. Clocks are read on rank 0.

    Args:
        signals: notes of this process.
        deadlines: when it must have ended.
        times: tells `Saves` that a save is due, and is told how long one takes.
        save_every_minutes: longest time between two saves; null: steps alone decide.
        timeout_s: how long the ranks wait for each other.
    """

    def __init__(
        self,
        signals: StopSignals,
        deadlines: Deadlines,
        times: SaveTimes,
        save_every_minutes: float | None,
        timeout_s: float,
    ) -> None:
        self.signals = signals
        self.deadlines = deadlines
        self.times = times
        self.save_every_minutes = save_every_minutes
        self.timeout = timedelta(seconds=timeout_s)
        self.status = 0
        """0, or the exit status that all ranks agreed on."""
        self._is_listening = False
        self._num_saves_seen = 0
        self._told_step = -1
        self._can_tell = True
        self._last_end_s: float | None = None
        self._longest_step_s = 0.0
        self._group: distributed.ProcessGroup | None = None
        self._wishes: Tensor | None = None
        self._asked_after = 0
        self._reduction: distributed.Work | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Collective: makes the group."""
        super().on_train_start(trainer, pl_module)
        self._is_listening, self._reduction = False, None
        if trainer.world_size > 1:
            self._group = distributed.new_group(backend="gloo", timeout=self.timeout)

    def on_train_batch_start(self, *_: Any) -> None:
        """Until the first step there is nothing to save, and what is done before it may take long."""
        if not self._is_listening:
            self._is_listening = True
            self.signals.listen()

    def on_optimizer_step(self, trainer: pl.Trainer, module: TrainedModule, step: int) -> None:
        """Agree; the last step needs no stopping."""
        self._measure_step()
        self._tell_launcher(trainer)
        agreed = self._agreed(trainer, step)
        self.times.is_asked = agreed.is_save_due
        if step == trainer.max_steps:
            return
        if agreed.status or agreed.is_time_up:
            why = "a signal asks this run to stop" if agreed.status else "the time limit is near"
            self.stop(trainer, agreed.status or STOPPED, why)
        elif self._group is not None:
            self._begin_reduction(trainer, step)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Everything is saved. What comes now, such as loggers that take leave, may be cut short by a launcher."""
        self._tell_launcher(trainer)
        if trainer.is_global_zero:
            tell_status(self.status)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Signals mean what they meant before."""
        self.signals.restore()

    def _tell_launcher(self, trainer: pl.Trainer) -> None:
        """How far the run has sealed what it saved; also for the start after one that was killed. Not worth a run."""
        path, saved_step = os.environ.get(STEP_FILE_VARIABLE), self.times.sealed_step
        if path and trainer.is_global_zero and saved_step > self._told_step:
            self._told_step = saved_step
            try:
                replace_text(Path(path), f"{saved_step}\n")
            except OSError as error:
                if self._can_tell:
                    log.warning(f"{STEP_FILE_VARIABLE}: {path} cannot be written: {error.strerror}; tried at each save")
                self._can_tell = False

    def stop(self, trainer: pl.Trainer, status: int, why: str) -> None:
        """After this optimizer step; all ranks do, with the same status."""
        self.status = status
        trainer.should_stop = True
        # The handler of Ctrl-C has said so on the terminal of its process.
        is_said = self.signals.status == INTERRUPTED
        log.info(f"{why}: saving after optimizer step {trainer.global_step:,}", extra=FOR_FILE if is_said else None)

    def status_asked(self, trainer: pl.Trainer) -> int:
        """0, or the exit status with which this process was asked to stop, or has to as the time is nearly up."""
        return self.signals.status or (STOPPED if trainer.is_global_zero and self._is_time_up() else 0)

    def _is_time_up(self) -> bool:
        return self.deadlines.is_near(self.times.longest_s, self._longest_step_s, self.times.num_in_flight)

    def leave_out(self, pause_s: float) -> None:
        """Of the time between two steps: what is broken off when the time is nearly up."""
        if self._last_end_s is not None:
            self._last_end_s += pause_s

    def _measure_step(self) -> None:
        """The time since the step before, with whatever was drawn or saved in between; the first compiles."""
        now_s = time.monotonic()
        if self._last_end_s is not None:
            self._longest_step_s = max(self._longest_step_s, now_s - self._last_end_s)
        self._last_end_s = now_s

    def _own(self, trainer: pl.Trainer) -> Wishes:
        """What this rank asks for now; a signal that asks for a save asks once."""
        asked = self.signals.num_saves_asked
        is_save_due, self._num_saves_seen = asked > self._num_saves_seen, asked
        if not trainer.is_global_zero:
            return Wishes(self.signals.status, False, is_save_due)
        if self.save_every_minutes is not None:
            is_save_due |= self.times.since_last_s >= 60 * self.save_every_minutes
        return Wishes(self.signals.status, self._is_time_up(), is_save_due)

    def _begin_reduction(self, trainer: pl.Trainer, step: int) -> None:
        own = self._own(trainer)
        # A save that is asked for is made later in this step, so the clock asks again: see `_agreed`.
        self._asked_after = step
        self._wishes = torch.tensor([own.status, int(own.is_time_up), int(own.is_save_due)])
        self._reduction = distributed.all_reduce(
            self._wishes, op=distributed.ReduceOp.MAX, group=self._group, async_op=True
        )

    def _agreed(self, trainer: pl.Trainer, step: int) -> Wishes:
        """The wishes of all ranks at the step before; of this process now where it is alone."""
        if self._group is None:
            return self._own(trainer)
        if self._reduction is None or self._wishes is None:
            return Wishes()
        self._reduction.wait()
        self._reduction = None
        status, is_time_up, is_save_due = self._wishes.tolist()
        # Every rank knows of a save since the wish was made, which is what was wished for.
        return Wishes(status, bool(is_time_up), bool(is_save_due) and self.times.last_step < self._asked_after)
