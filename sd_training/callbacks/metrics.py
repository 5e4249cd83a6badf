"""Averaged metrics every N optimizer steps: `metrics.csv` always, and every logger of the trainer.

The only moment when the host waits for the device.
"""

import csv
import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor

from sd_training.callbacks.base import OptimizerStepCallback, RunState, TrainingTimer
from sd_training.callbacks.ema import Ema, decay_at
from sd_training.checkpoint.atomic_io import replace_text
from sd_training.checkpoint.run_lock import NO_LOCK, RunLock
from sd_training.errors import TakenOverError
from sd_training.log import get_logger
from sd_training.training.base_module import TrainedModule

log = get_logger(__name__)

COLUMNS = (
    *("optimizer_step", "images_seen", "loss", "l1", "kl", "learning_rate", "grad_norm", "images_per_s"),
    *("ema_decay", "device_memory_gib"),
)


class MetricRows:
    """A CSV file that rows are added to, and that kills and full disks leave whole. No method raises for a disk error:
    training is worth more than a row.

    Args:
        path: the file.
        columns: names of the columns; the first one counts optimizer steps.
        run_lock: of this start of the run; only the owner adds rows.
    """

    def __init__(self, path: Path, columns: Sequence[str], run_lock: RunLock = NO_LOCK) -> None:
        self.path, self.columns, self.run_lock = path, columns, run_lock
        self._waiting: list[Mapping[str, str]] = []

    def keep_until(self, step: int) -> None:
        """Drops rows after `step` and what a kill cut short; the file is replaced at once or not at all."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            header = dict(zip(self.columns, self.columns, strict=True))
            replace_text(self.path, self._text([header, *self._whole_rows(step)]))
        except OSError as error:
            log.error(f"{self.path} is not tidied: {error.strerror}")

    def has(self, step: int) -> bool:
        """Whether there is a whole row of this optimizer step; no where the file cannot be read."""
        try:
            return any(int(row[self.columns[0]]) == step for row in self._whole_rows(step))
        except OSError:
            return False

    def add(self, *rows: Mapping[str, str]) -> None:
        """Appends rows at once, and those that could not be written before them: all or nothing, as a full disk takes
        the first part of a row."""
        self._waiting += rows
        try:
            self.run_lock.check()
            with self.path.open("ab", buffering=0) as stream:
                size, data = stream.seek(0, os.SEEK_END), self._text(self._waiting).encode()
                try:
                    while data:
                        data = data[stream.write(data) :]
                except OSError:
                    stream.truncate(size)
                    raise
        except TakenOverError:
            return  # the next save ends this process, on all ranks
        except OSError as error:
            if len(self._waiting) == len(rows):
                log.error(f"{self.path} cannot be written ({error.strerror}); its rows wait in memory")
        else:
            self._waiting.clear()

    def _whole_rows(self, step: int) -> list[dict[str, str]]:
        if not self.path.exists():
            return []
        lines = self.path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        whole = [line for line in lines if line.endswith("\n") and "\0" not in line]
        rows = [row for row in csv.DictReader(whole) if None not in row and None not in row.values()]
        return [row for row in rows if row.get(self.columns[0], "").isdigit() and int(row[self.columns[0]]) <= step]

    def _text(self, rows: Sequence[Mapping[str, str]]) -> str:
        text = io.StringIO()
        csv.DictWriter(text, self.columns, extrasaction="ignore").writerows(rows)
        return text.getvalue()


@dataclass(eq=False)
class Metrics(OptimizerStepCallback):
    """Reduces the logged scalars over micro-batches and ranks."""

    rows: MetricRows
    """Of the run's `metrics.csv`."""
    every: int
    """Optimizer steps between rows."""
    global_batch: int
    """Images per optimizer step, over all processes."""
    ema: Ema | None
    """The average, if there is one."""
    timer: TrainingTimer
    """Shared with the callbacks that save and draw, so that images/s is the speed of training."""
    state: RunState
    """Gets the newest metrics."""
    _window_start: int = field(default=0, init=False)

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Drop rows that a killed run wrote after the checkpoint it resumes from."""
        super().on_train_start(trainer, pl_module)
        self._window_start = trainer.global_step
        self.timer.lap_s()
        if trainer.is_global_zero:
            self.rows.keep_until(trainer.global_step)

    def on_optimizer_step(self, trainer: pl.Trainer, module: TrainedModule, step: int) -> None:
        """Reduce, write, start a new window."""
        if not self.is_due(trainer, step, self.every):
            return
        # Means over the window's micro-batches and over ranks; the gradient norm is the last step's.
        names = sorted(module.logged_sums)
        sums = torch.stack([module.logged_sums[name] for name in names]) / module.logged_micro_batches
        if trainer.world_size > 1:
            torch.distributed.all_reduce(sums)
            sums /= trainer.world_size
        metrics = dict(zip(names, sums.tolist(), strict=True))
        if isinstance(module.grad_norm, Tensor):
            metrics["grad_norm"] = float(module.grad_norm)
        elapsed_s, num_steps, plan = self.timer.lap_s(), step - self._window_start, module.optimization
        self._window_start = step
        metrics["learning_rate"] = plan.learning_rate * plan.schedule(step - 1)
        if self.ema is not None:
            metrics["ema_decay"] = decay_at(step, self.ema.config) ** (1 / self.ema.config.update_every)
        metrics["images_per_s"] = num_steps * self.global_batch / elapsed_s
        device = trainer.strategy.root_device
        if device.type == "cuda":
            metrics["device_memory_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
        metrics["images_seen"] = float(step * self.global_batch)
        self.state.metrics = metrics
        module.reset_logged()
        if trainer.is_global_zero:
            # Nine digits distinguish every two fp32 numbers, so that a resumed run can be compared by its rows.
            row = {name: f"{value:.9g}" for name, value in metrics.items()}
            self.rows.add(row | {"optimizer_step": str(step), "images_seen": str(step * self.global_batch)})
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step)
