"""Stops a run that was asked to, and has it save when asked: all ranks after the same optimizer step.

A run is asked by a signal (`signals.py`), or by a limit that comes near: `experiment.max_hours`, SLURM's time limit.
"""

import os
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from torch import Tensor, distributed

from sd_training.callbacks.base import OptimizerStepCallback, RunState
from sd_training.checkpoint.atomic_io import replace_text
from sd_training.errors import EXIT_INTERRUPTED, EXIT_STOPPED
from sd_training.log import FOR_FILE, get_logger
from sd_training.signals import StopSignals
from sd_training.training.base_module import TrainedModule
from sd_training.watchdog.first_failure import write_status

log = get_logger(__name__)

SLURM_END_VARIABLE = "SLURM_JOB_END_TIME"
"""Environment variable of the job's end [s since 1970], set by SLURM where the job has a time limit."""
STEP_FILE_VARIABLE = "SD_TRAINING_STEP_FILE"
"""Environment variable of a file that gets the newest sealed step, for a launcher that checks for progress."""
UNMEASURED_SAVE_S = 10.0
"""Assumed duration of a save before the first one."""


class Deadlines:
    """The nearest of the limits.

    Args:
        max_hours: allowed running time of this start; null: none.
        started_s: when the program began [s of `time.monotonic`].
        environment: of this process.
        shutdown_s: what the process may need after its last save until it has ended.
    """

    def __init__(
        self, max_hours: float | None, started_s: float, environment: Mapping[str, str], shutdown_s: float = 0.0
    ) -> None:
        self.shutdown_s = shutdown_s
        self._ends_s = [] if max_hours is None else [started_s + 3600 * max_hours]
        end = environment.get(SLURM_END_VARIABLE, "")
        if end.isdigit():
            self._ends_s.append(time.monotonic() + int(end) - time.time())

    def is_near(self, save_s: float, step_s: float, num_in_flight: int = 0) -> bool:
        """Whether what must still be done no longer fits twice, the shutdown once.

        Args:
            save_s: the longest save so far; 0: unmeasured.
            step_s: the longest time between two optimizer steps so far.
            num_in_flight: saves that must be waited for before the last one.
        """
        needed_s = (2 + num_in_flight) * (save_s or UNMEASURED_SAVE_S) + 2 * step_s + self.shutdown_s
        return bool(self._ends_s) and min(self._ends_s) - time.monotonic() < needed_s


class StopRequest(NamedTuple):
    """What one rank asks for; of all ranks the largest of each counts."""

    status: int = 0
    """0, or the exit status that a signal asks for."""
    is_time_up: bool = False
    """A time limit is near."""
    is_save_due: bool = False
    """To save and continue."""


class Preemption(OptimizerStepCallback):
    """Sets `trainer.should_stop`; whatever is due at the end of a run is then due at this step, saves included.

    The first of the callbacks, so that the others of the same step see it (a validation that is interrupted comes
    later, and those after it see it). A signal to one rank stops all: after each optimizer step the ranks start a
    reduction of their requests over gloo, and read its result one step later, when it has long arrived. No device
    takes part, and one process alone communicates nothing. Clocks are read on rank 0.

    Args:
        signals: those that this process received.
        deadlines: when it must have ended.
        state: gets the request for a save, and has the duration of one.
        save_every_minutes: longest time between two saves; null: steps alone decide.
        timeout_s: how long the ranks wait for each other.
    """

    def __init__(
        self,
        signals: StopSignals,
        deadlines: Deadlines,
        state: RunState,
        save_every_minutes: float | None,
        timeout_s: float,
    ) -> None:
        self.signals, self.deadlines, self.state = signals, deadlines, state
        self.save_every_minutes, self.timeout = save_every_minutes, timedelta(seconds=timeout_s)
        self.status = 0
        """0, or the exit status that all ranks agreed on."""
        self._is_listening = False
        self._num_saves_seen = 0
        self._step_in_file = -1
        self._has_warned = False
        self._last_end_s: float | None = None
        self._longest_step_s = 0.0
        self._group: distributed.ProcessGroup | None = None
        self._reduction: tuple[int, Tensor, distributed.Work] | None = None
        """Optimizer step after which it was started, its requests, and the operation."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Collective: makes the group."""
        super().on_train_start(trainer, pl_module)
        self._is_listening, self._reduction = False, None
        if trainer.world_size > 1:
            self._group = distributed.new_group(backend="gloo", timeout=self.timeout)

    def on_train_batch_start(self, *_: Any) -> None:
        """Until the first step there is nothing to save, and what precedes it may take long."""
        if not self._is_listening:
            self._is_listening = True
            self.signals.listen()

    def on_optimizer_step(self, trainer: pl.Trainer, module: TrainedModule, step: int) -> None:
        """Agree; the last step needs no stopping."""
        self._measure_step()
        self._write_step_file(trainer)
        agreed = self._agreed_request(trainer)
        self.state.save_requested = agreed.is_save_due
        if step == trainer.max_steps:
            return
        if agreed.status or agreed.is_time_up:
            why = "a signal asks this run to stop" if agreed.status else "the time limit is near"
            self.stop(trainer, agreed.status or EXIT_STOPPED, why)
        elif self._group is not None:
            requests = torch.tensor([int(value) for value in self._local_request(trainer)])
            work = distributed.all_reduce(requests, op=distributed.ReduceOp.MAX, group=self._group, async_op=True)
            assert work is not None
            self._reduction = step, requests, work

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Everything is saved. A launcher may kill what comes now, such as the shutdown of loggers."""
        self._write_step_file(trainer)
        if trainer.is_global_zero:
            write_status(self.status)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """The former handlers of the signals."""
        self.signals.restore()

    def stop(self, trainer: pl.Trainer, status: int, why: str) -> None:
        """After this optimizer step; all ranks do, with the same status."""
        self.status = status
        trainer.should_stop = True
        # The handler of Ctrl-C has printed this on the terminal of its process.
        is_printed = self.signals.status == EXIT_INTERRUPTED
        log.info(f"{why}: saving after optimizer step {trainer.global_step:,}", extra=FOR_FILE if is_printed else None)

    def requested_status(self, trainer: pl.Trainer) -> int:
        """0, or the exit status with which this process was asked to stop, or has to as the time is nearly up."""
        return self.signals.status or (EXIT_STOPPED if trainer.is_global_zero and self._is_time_up() else 0)

    def exclude_from_step(self, duration_s: float) -> None:
        """Of the time between two steps: what is interrupted when the time is nearly up."""
        if self._last_end_s is not None:
            self._last_end_s += duration_s

    def _measure_step(self) -> None:
        """The time since the step before, with whatever was drawn or saved in between; the first compiles."""
        now_s = time.monotonic()
        if self._last_end_s is not None:
            self._longest_step_s = max(self._longest_step_s, now_s - self._last_end_s)
        self._last_end_s = now_s

    def _write_step_file(self, trainer: pl.Trainer) -> None:
        """The newest sealed step, for the launcher; also for the start after one that was killed."""
        path, sealed_step = os.environ.get(STEP_FILE_VARIABLE), self.state.sealed_step
        if not path or not trainer.is_global_zero or sealed_step <= self._step_in_file:
            return
        self._step_in_file = sealed_step
        try:
            replace_text(Path(path), f"{sealed_step}\n")
        except OSError as error:
            if not self._has_warned:
                log.warning(f"{STEP_FILE_VARIABLE}: {path} cannot be written: {error.strerror}; tried at each save")
            self._has_warned = True

    def _is_time_up(self) -> bool:
        num_pending = int(self.state.pending_save_since_s is not None)
        return self.deadlines.is_near(self.state.save_s, self._longest_step_s, num_pending)

    def _local_request(self, trainer: pl.Trainer) -> StopRequest:
        """What this rank asks for now; a signal that asks for a save asks once."""
        asked = self.signals.num_saves_asked
        is_save_due, self._num_saves_seen = asked > self._num_saves_seen, asked
        if not trainer.is_global_zero:
            return StopRequest(self.signals.status, False, is_save_due)
        if self.save_every_minutes is not None:
            is_save_due |= time.monotonic() - self.state.last_save_end_s >= 60 * self.save_every_minutes
        return StopRequest(self.signals.status, self._is_time_up(), is_save_due)

    def _agreed_request(self, trainer: pl.Trainer) -> StopRequest:
        """The requests of all ranks at the step before; of this process now where it is alone."""
        if self._group is None:
            return self._local_request(trainer)
        if self._reduction is None:
            return StopRequest()
        (started_after, requests, work), self._reduction = self._reduction, None
        work.wait()
        status, is_time_up, is_save_due = requests.tolist()
        # A save since then, of which every rank knows, has fulfilled the request for one.
        is_save_due = is_save_due and self.state.last_save_step < started_after
        return StopRequest(status, bool(is_time_up), bool(is_save_due))
