"""Averaged metrics every N optimizer steps: `metrics.csv` and `metrics.jsonl` always, and every logger of the trainer.
The only moment when the host waits for the device.

Speed: seconds, images and FLOPs of a window's steps, without the time of validation, drawing and saving, and where all
of its time went, by section (`Ledger` in `training.py`).

Progress: images seen, images/s, time left and loss, as a bar on a terminal, lines now and then anywhere else.
"""

import csv
import io
import json
import math
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from tqdm import tqdm

from sd_training.callbacks.base import OptimizerStepCallback, RunState
from sd_training.callbacks.ema import Ema, decay_at
from sd_training.checkpoint.folder import NO_LOCK, RunLock, replace_text
from sd_training.config.plan import counted
from sd_training.data.encoded import EncoderTimes
from sd_training.errors import TakenOverError
from sd_training.log import FOR_FILE, get_logger, write_lines_by
from sd_training.optim import gradient_norm
from sd_training.parallel.strategies import strategy_of
from sd_training.training import SECTIONS, Section, TrainedModule

log = get_logger(__name__)

COLUMNS = (
    *("optimizer_step", "images_seen", "loss", "l1", "kl", "learning_rate", "grad_norm", "images_per_s"),
    *("ema_decay", "device_memory_gib", "step_s", "images_per_s_per_device", "tflops_per_s", "mfu"),
    *(f"{section}_s" for section in SECTIONS),
    "encoders_s",
)
_NOT_TRAINING: tuple[Section, ...] = ("validation", "drawing", "saving")
"""Sections that do not count in the speed of training."""

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
            replace_text(self.path, self._header() + self._text(self._whole_rows(step)))
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
        rows = self._parsed([line for line in lines if line.endswith("\n") and "\0" not in line])
        return [row for row in rows if row.get(self.columns[0], "").isdigit() and int(row[self.columns[0]]) <= step]

    def _header(self) -> str:
        return self._text([dict(zip(self.columns, self.columns, strict=True))])

    def _parsed(self, lines: Sequence[str]) -> list[dict[str, str]]:
        return [row for row in csv.DictReader(lines) if None not in row and None not in row.values()]

    def _text(self, rows: Sequence[Mapping[str, str]]) -> str:
        text = io.StringIO()
        csv.DictWriter(text, self.columns, extrasaction="ignore").writerows(rows)
        return text.getvalue()


class JsonRows(MetricRows):
    """The same as lines of JSON: an object per row, of all its values. Numbers as in the CSV file; one that is not
    finite, which JSON has not, is null."""

    def _header(self) -> str:
        return ""

    def _parsed(self, lines: Sequence[str]) -> list[dict[str, str]]:
        rows = []
        for line in lines:
            with suppress(ValueError, TypeError, AttributeError):  # no JSON, no object, no numbers
                row = json.loads(line, parse_float=str, parse_int=str)
                row = {name: "nan" if value is None else value for name, value in row.items()}
                self._text([row])
                rows.append(row)
        return rows

    def _text(self, rows: Sequence[Mapping[str, str]]) -> str:
        text = ""
        for row in rows:
            words = [f"{json.dumps(name)}: {v if math.isfinite(float(v)) else 'null'}" for name, v in row.items()]
            text += f"{{{', '.join(words)}}}\n"
        return text


class GradientNorms(OptimizerStepCallback):
    """The norm of the gradient before clipping of each layer group: the part and the next two names, such as
    `denoiser.down_blocks.0`. Computed at logged steps only, and read with the other metrics; a row that is written
    because the run stops has none.

    Args:
        every: optimizer steps between rows.
    """

    section = "logging"

    def __init__(self, every: int) -> None:
        self.every, self.norms = every, dict[str, Tensor]()

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
        """Collective with sharded weights. The gradient is averaged over ranks, and not yet clipped."""
        self.norms = {}
        if not self.is_due(trainer, trainer.global_step + 1, self.every):
            return
        groups: dict[str, list[nn.Parameter]] = defaultdict(list)
        for name, parameter in pl_module.named_trained():
            if parameter.grad is not None:
                groups[".".join(name.split(".")[:-1][:3])].append(parameter)
        self.norms = {f"grad_norm/{group}": gradient_norm(parameters) for group, parameters in groups.items()}

    def on_optimizer_step(self, trainer: pl.Trainer, module: TrainedModule, step: int) -> None:
        """`Metrics` reads them."""


@dataclass(eq=False)
class Metrics(OptimizerStepCallback):
    """Reduces the logged scalars over micro-batches and ranks."""

    section = "logging"

    rows: Sequence[MetricRows]
    """Of the run's `metrics.csv` and `metrics.jsonl`."""
    every: int
    """Optimizer steps between rows."""
    global_batch: int
    """Images per optimizer step, over all processes."""
    ema: Ema | None
    """The average, if there is one."""
    state: RunState
    """Gets the newest metrics."""
    gradient_norms: GradientNorms | None = None
    """Has the norms of a logged step, if they are wanted."""
    picture_flops: Callable[[int, int], float | None] | None = None
    """Height and width [latent cells] → FLOPs of a picture in a step, or None where they cannot be counted; null: not
    counted."""
    peak_tflops: float | None = None
    """Of one device at the run's precision; with `picture_flops`."""
    encoder_times: EncoderTimes | None = None
    """Of encoder processes, if there are any."""
    _window_start: int = field(default=0, init=False)
    _window_start_s: float = field(default=0.0, init=False)

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Drop rows that a killed run wrote after the checkpoint it resumes from."""
        super().on_train_start(trainer, pl_module)
        if trainer.is_global_zero:
            for rows in self.rows:
                rows.keep_until(trainer.global_step)
        pl_module.ledger.start(trainer.strategy.root_device)
        self._window_start, self._window_start_s = trainer.global_step, time.perf_counter()

    def on_optimizer_step(self, trainer: pl.Trainer, module: TrainedModule, step: int) -> None:
        """Reduce, write, start a new window."""
        if not self.is_due(trainer, step, self.every):
            return
        # Means over the window's micro-batches and over ranks; the gradient norms are the last step's.
        names = sorted(module.logged_sums)
        sums = torch.stack([module.logged_sums[name] for name in names]) / module.logged_micro_batches
        if trainer.world_size > 1:
            torch.distributed.all_reduce(sums)
            sums /= trainer.world_size
        metrics = dict(zip(names, sums.tolist(), strict=True))
        if isinstance(module.grad_norm, Tensor):
            metrics["grad_norm"] = float(module.grad_norm)
        if self.gradient_norms is not None and (norms := self.gradient_norms.norms):
            metrics |= dict(zip(norms, torch.stack([*norms.values()]).tolist(), strict=True))
        plan = module.optimization
        metrics["learning_rate"] = plan.learning_rate * plan.schedule(step - 1)
        if self.ema is not None:
            metrics["ema_decay"] = decay_at(step, self.ema.config) ** (1 / self.ema.config.update_every)
        device = trainer.strategy.root_device
        if device.type == "cuda":
            metrics["device_memory_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
        metrics |= self._speed(trainer, module, step)
        metrics["images_seen"] = float(step * self.global_batch)
        self.state.metrics = metrics
        module.reset_logged()
        if trainer.is_global_zero:
            # Nine digits distinguish every two fp32 numbers, so that a resumed run can be compared by its rows.
            row = {name: f"{value:.9g}" for name, value in metrics.items()}
            row = {"optimizer_step": str(step), **row, "images_seen": str(step * self.global_batch)}
            for rows in self.rows:
                rows.add(row)
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step)

    def _speed(self, trainer: pl.Trainer, module: TrainedModule, step: int) -> dict[str, float]:
        """Of the window that ends here, where the device has been waited for; all of it is this process's, and a device
        is one process. Sections are those of the ledger [s per optimizer step]."""
        now_s, num_steps = time.perf_counter(), step - self._window_start
        sections = {name: seconds / num_steps for name, seconds in module.ledger.take().items()}
        step_s = (now_s - self._window_start_s) / num_steps - sum(sections[name] for name in _NOT_TRAINING)
        step_s = max(step_s, 1e-9)
        self._window_start, self._window_start_s = step, now_s
        images_per_s, world_size = self.global_batch / step_s, trainer.world_size
        speed = {"step_s": step_s, "images_per_s": images_per_s, "images_per_s_per_device": images_per_s / world_size}
        if self.picture_flops is not None and self.peak_tflops is not None and trainer.is_global_zero:
            counts = [(self.picture_flops(*size), images) for size, images in module.logged_images.items()]
            if all(flops is not None for flops, _ in counts):
                # Ranks of a tensor axis share the work on their images.
                share = strategy_of(trainer).data_ranks / world_size
                total = sum(flops * images for flops, images in counts if flops is not None) * share
                speed["tflops_per_s"] = total / num_steps / step_s / 1e12
                speed["mfu"] = speed["tflops_per_s"] / self.peak_tflops
        if self.encoder_times is not None:
            longest = torch.tensor(sections["data_wait"], device=trainer.strategy.root_device)
            if trainer.world_size > 1:
                torch.distributed.all_reduce(longest, torch.distributed.ReduceOp.MAX)
            speed["encoders_s"] = self.encoder_times.take(num_steps, step_s, float(longest))
        return speed | {f"{name}_s": seconds for name, seconds in sections.items()}


class ProgressBar(OptimizerStepCallback):
    """Over the whole run, counted in images.

    Args:
        state: where the newest metrics come from; the bar itself never waits for the device.
        global_batch: images per optimizer step, over all processes.
        num_steps: optimizer steps of the run.
    """

    section = "logging"

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
        if self._bar is not None:
            self._bar.set_postfix_str(f"step {step}{_newest(self.state.metrics)}", refresh=False)
            self._bar.update(done - self._bar.n)
        if now_s >= self._line[0] + _LINE_EVERY_S or step == self.num_steps:
            # Of the time since the last line: saves and pictures slow down the line they belong to only.
            per_s = (done - self._line[1]) / max(now_s - self._line[0], 1e-9)
            self._line = (now_s, done)
            s_per_image = (now_s - self._started[0]) / max(done - self._started[1], 1)
            left = timedelta(seconds=round(s_per_image * (self.num_steps * self.global_batch - done)))
            progress = f"step {step:,} of {self.num_steps:,}: {counted(done, 'image')}, {per_s:.1f} images/s"
            text = f"{progress}, {left} left{_newest(self.state.metrics)}"
            log.info(text, extra=None if self._bar is None else FOR_FILE)

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


def _newest(metrics: Mapping[str, float]) -> str:
    """Loss, duration of a step, share of it that is waiting for data, and utilisation of the device where its peak is
    known; nothing before the first row."""
    if not metrics:
        return ""
    step_s, waiting_s = metrics["step_s"], metrics["data_wait_s"]
    text = f", loss {metrics['loss']:.4f}, {step_s:.3g} s/step, {waiting_s / step_s:.0%} waiting for data"
    return f"{text}, {metrics['mfu']:.1%} MFU" if "mfu" in metrics else text
