"""Averaged metrics every N optimizer steps: `metrics.csv` always, and every logger of the trainer. The only moment when
the host waits for the device.

Progress: images seen, images/s, time left and loss, as a bar on a terminal, lines now and then anywhere else.
"""

import csv
import io
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor
from tqdm import tqdm

from sd_training.callbacks.base import OptimizerStepCallback, RunState
from sd_training.callbacks.ema import Ema, decay_at
from sd_training.checkpoint.folder import NO_LOCK, RunLock, replace_text
from sd_training.config.plan import counted
from sd_training.errors import TakenOverError
from sd_training.log import FOR_FILE, get_logger, write_lines_by
from sd_training.training import TrainedModule

log = get_logger(__name__)

COLUMNS = (
    *("optimizer_step", "images_seen", "loss", "l1", "kl", "learning_rate", "grad_norm", "images_per_s"),
    *("ema_decay", "device_memory_gib"),
)

_LINE_EVERY_S = 30.0
"""Between two lines where there is no terminal, and in `train.log`."""


class MetricRows:
    """A CSV file of rows that stays well-formed after kills and on full disks. No method raises for a disk error:
    losing a row is better than losing the run.

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
        """Appends rows, after those that could not be written before: all or nothing, because a full disk may accept
        only the first part of a row."""
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
    state: RunState
    """Gets the newest metrics; does not count the time of saves and pictures, so that images/s is the speed of
    training."""
    _window_start: int = field(default=0, init=False)

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Drop rows that a killed run wrote after the checkpoint it resumes from."""
        super().on_train_start(trainer, pl_module)
        self._window_start = trainer.global_step
        self.state.lap_s()
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
        elapsed_s, num_steps, plan = self.state.lap_s(), step - self._window_start, module.optimization
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


class ProgressBar(OptimizerStepCallback):
    """Over the whole run, counted in images.

    Args:
        state: where the loss comes from; the bar itself never waits for the device.
        global_batch: images per optimizer step, over all processes.
        num_steps: optimizer steps of the run.
    """

    def __init__(self, state: RunState, global_batch: int, num_steps: int) -> None:
        self.state, self.global_batch, self.num_steps = state, global_batch, num_steps
        self._bar: tqdm | None = None
        self._started = self._line = (0.0, 0)
        """Time [s] and images of the start, and of the newest line."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """A resumed run's bar starts where it stopped."""
        super().on_train_start(trainer, pl_module)
        done = trainer.global_step * self.global_batch
        self._started = self._line = (time.monotonic(), done)
        # On a terminal without a size tqdm shows nothing.
        if trainer.is_global_zero and sys.stderr.isatty() and min(os.get_terminal_size(sys.stderr.fileno())):
            total = self.num_steps * self.global_batch
            self._bar = tqdm(total=total, initial=done, unit="img", desc="training", mininterval=1, dynamic_ncols=True)
            write_lines_by(lambda line: tqdm.write(line, file=sys.stderr))

    def on_optimizer_step(self, trainer: pl.Trainer, module: TrainedModule, step: int) -> None:
        """Advance by the images of the step."""
        if not trainer.is_global_zero:
            return
        done, now_s = step * self.global_batch, time.monotonic()
        loss = f", loss {self.state.metrics['loss']:.4f}" if self.state.metrics else ""
        if self._bar is not None:
            self._bar.set_postfix_str(f"step {step}{loss}", refresh=False)
            self._bar.update(done - self._bar.n)
        if now_s >= self._line[0] + _LINE_EVERY_S or step == self.num_steps:
            # Of the time since the last line: saves and pictures slow down the line they belong to only.
            per_s = (done - self._line[1]) / max(now_s - self._line[0], 1e-9)
            self._line = (now_s, done)
            s_per_image = (now_s - self._started[0]) / max(done - self._started[1], 1)
            left = timedelta(seconds=round(s_per_image * (self.num_steps * self.global_batch - done)))
            progress = f"step {step:,} of {self.num_steps:,}: {counted(done, 'image')}, {per_s:.1f} images/s"
            log.info(f"{progress}, {left} left{loss}", extra=None if self._bar is None else FOR_FILE)

    def on_exception(self, *_: object) -> None:
        """The error is printed below the bar."""
        self._close()

    def teardown(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        """Leave the finished bar on the terminal."""
        self._close()

    def _close(self) -> None:
        if self._bar is not None:
            write_lines_by(None)
            self._bar.close()
            self._bar = None
