"""Stops a run, or makes it save, on request: all ranks do so after the same optimizer step.

Requests come from signals (`signals.py`) and from approaching limits: `experiment.max_hours`, SLURM's time limit.
"""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, distributed

from sd_training.callbacks.base import OptimizerStepCallback, RunState
from sd_training.config.schema import Config
from sd_training.errors import EXIT_INTERRUPTED, EXIT_STOPPED
from sd_training.log import FOR_FILE, get_logger
from sd_training.signals import StopSignals
from sd_training.training import TrainedModule
from sd_training.watchdog import write_status

log = get_logger(__name__)

SLURM_END_VARIABLE = "SLURM_JOB_END_TIME"
"""Environment variable of the job's end [s since 1970], set by SLURM where the job has a time limit."""
UNMEASURED_SAVE_S = 10.0
"""Assumed duration of a save before the first one."""


def deadline_s(max_hours: float | None, started_s: float, environment: Mapping[str, str]) -> float:
    """When this start must have ended [s of `time.monotonic`]; infinite without a limit.

    Args:
        max_hours: allowed running time of this start; null: none.
        started_s: when the program began [s of `time.monotonic`].
        environment: of this process.
    """
    own_s = math.inf if max_hours is None else started_s + 3600 * max_hours
    end = environment.get(SLURM_END_VARIABLE, "")
    return min(own_s, time.monotonic() + int(end) - time.time()) if end.isdigit() else own_s


@dataclass(eq=False)
class Preemption(OptimizerStepCallback):
    """Sets `trainer.should_stop`; whatever is due at the end of a run is then due at this step, saves included.

    It is the first callback, so the others see the flag in the same step (a validation that is interrupted sets it
    later, for the callbacks after it). A signal to one rank stops all: after each optimizer step the ranks start a
    reduction of their requests over gloo, and read its result one step later, when it has long arrived. No device
    takes part, and one process alone communicates nothing. Clocks are read on rank 0.
    """

    signals: StopSignals
    """Those that this process received."""
    config: Config
    state: RunState
    """Gets the request for a save, and has the duration of one."""
    end_s: float
    """When this process must have ended [s of `time.monotonic`]."""
    reserved_s: float
    """What it may need after its last save until it has ended."""
    status: int = field(default=0, init=False)
    """0, or the exit status that all ranks agreed on."""
    _is_listening: bool = field(default=False, init=False)
    _num_saves_seen: int = field(default=0, init=False)
    _last_end_s: float | None = field(default=None, init=False)
    _longest_step_s: float = field(default=0.0, init=False)
    _group: distributed.ProcessGroup | None = field(default=None, init=False)
    _reduction: tuple[int, Tensor, distributed.Work] | None = field(default=None, init=False)
    """Optimizer step after which it was started, its requests, and the operation."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Collective: makes the group."""
        super().on_train_start(trainer, pl_module)
        self._is_listening, self._reduction = False, None
        if trainer.world_size > 1:
            timeout = timedelta(seconds=self.config.watch.collective_timeout_s)
            self._group = distributed.new_group(backend="gloo", timeout=timeout)

    def on_train_batch_start(self, *_: Any) -> None:
        """Until the first step there is nothing to save, and what precedes it may take long."""
        if not self._is_listening:
            self._is_listening = True
            self.signals.listen()

    def on_optimizer_step(self, trainer: pl.Trainer, module: TrainedModule, step: int) -> None:
        """Agree; the last step needs no stopping."""
        now_s = time.monotonic()  # the longest step includes previews and saves in it; the first one compiles
        if self._last_end_s is not None:
            self._longest_step_s = max(self._longest_step_s, now_s - self._last_end_s)
        self._last_end_s = now_s
        status, is_save_due = self._agreed_requests(trainer)
        self.state.save_requested = is_save_due
        if step == trainer.max_steps:
            return
        if status:
            self.stop(trainer, status)
        elif self._group is not None:
            requests = torch.tensor(self._own_requests(trainer))
            work = distributed.all_reduce(requests, op=distributed.ReduceOp.MAX, group=self._group, async_op=True)
            assert work is not None
            self._reduction = step, requests, work

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Everything is saved. A launcher may kill the process in what follows, such as the shutdown of loggers."""
        if trainer.is_global_zero:
            write_status(self.status)

    def teardown(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        """Restores the former signal handlers."""
        self.signals.restore()

    def stop(self, trainer: pl.Trainer, status: int) -> None:
        """Stops after this optimizer step, on all ranks and with the same status."""
        self.status = status
        trainer.should_stop = True
        # The handler of Ctrl-C has printed this on the terminal of its process.
        is_printed = self.signals.status == EXIT_INTERRUPTED
        log.info(
            f"a signal or the time limit asks this run to stop: saving after optimizer step {trainer.global_step:,}",
            extra=FOR_FILE if is_printed else None,
        )

    def requested_status(self, trainer: pl.Trainer) -> int:
        """0, or the exit status of a stop: requested by a signal, or because the remaining saves would not fit before
        the time limit."""
        save_s = self.state.longest_save_s or UNMEASURED_SAVE_S
        num_saves = 3 if self.config.checkpoint.asynchronous else 2  # that must still fit: one may be in progress
        needed_s = num_saves * save_s + 2 * self._longest_step_s + self.reserved_s
        is_time_up = trainer.is_global_zero and self.end_s - time.monotonic() < needed_s
        return self.signals.status or (EXIT_STOPPED if is_time_up else 0)

    def exclude_from_step(self, duration_s: float) -> None:
        """Of the time between two steps: what is interrupted when the time is nearly up."""
        if self._last_end_s is not None:
            self._last_end_s += duration_s

    def _own_requests(self, trainer: pl.Trainer) -> tuple[int, bool]:
        """The exit status that this rank requests now, and whether it requests a save; a signal requests one save."""
        asked = self.signals.num_saves_asked
        is_save_due, self._num_saves_seen = asked > self._num_saves_seen, asked
        minutes = self.config.checkpoint.save_every_minutes
        if trainer.is_global_zero and minutes is not None:
            is_save_due |= time.monotonic() - self.state.last_save_end_s >= 60 * minutes
        return self.requested_status(trainer), is_save_due

    def _agreed_requests(self, trainer: pl.Trainer) -> tuple[int, bool]:
        """The largest requests of all ranks at the step before; of this process now where it is alone."""
        if self._group is None:
            return self._own_requests(trainer)
        if self._reduction is None:
            return 0, False
        (started_after, requests, work), self._reduction = self._reduction, None
        work.wait()
        status, is_save_due = requests.tolist()
        # A save since then, of which every rank knows, has fulfilled the request for one.
        return status, bool(is_save_due) and self.state.last_save_step < started_after
