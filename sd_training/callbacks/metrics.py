"""Averaged metrics every N optimizer steps: `metrics.csv` always, and every logger of the trainer.

The only moment when the host waits for the device.
"""

import math
from collections.abc import Callable
from pathlib import Path

import pytorch_lightning as pl
import torch
from torch import Tensor

from sd_training.callbacks.ema import Ema
from sd_training.callbacks.every_step import OptimizerStepCallback
from sd_training.callbacks.metric_rows import MetricRows
from sd_training.callbacks.stopwatch import Stopwatch
from sd_training.checkpoint.writer import UNFENCED, Fence
from sd_training.training.base_module import TrainedModule

COLUMNS = (
    "optimizer_step",
    "images_seen",
    "loss",
    "l1",
    "kl",
    "learning_rate",
    "grad_norm",
    "images_per_s",
    "ema_decay",
    "ema_distance",
    "device_memory_gib",
)


class Metrics(OptimizerStepCallback):
    """Reduces the logged scalars over micro-batches and ranks.

    Args:
        csv_path: the run's `metrics.csv`.
        every: optimizer steps between rows.
        images_before: how many images the steps before a step take.
        ema: the average, if there is one.
        stopwatch: shared with the callbacks that save and draw, so that images/s is the speed of training.
        fence: of this start of the run.
    """

    def __init__(
        self,
        csv_path: Path,
        every: int,
        images_before: Callable[[int], int],
        ema: Ema | None,
        stopwatch: Stopwatch,
        fence: Fence = UNFENCED,
    ) -> None:
        self.rows = MetricRows(csv_path, COLUMNS, fence)
        self.every = every
        self.images_before = images_before
        self.ema = ema
        self.stopwatch = stopwatch
        self.latest: dict[str, float] = {}
        self._window_start = 0
        self._loss_sum, self._loss_steps = 0.0, 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Drop rows that a killed run wrote after the checkpoint it resumes from."""
        super().on_train_start(trainer, pl_module)
        self._window_start = trainer.global_step
        self.stopwatch.lap_s()
        if trainer.is_global_zero:
            self.rows.keep_until(trainer.global_step)

    def on_optimizer_step(self, trainer: pl.Trainer, module: TrainedModule, step: int) -> None:
        """Reduce, write, start a new window."""
        if not self.is_due(trainer, step, self.every):
            return
        metrics = self._reduced(trainer, module)
        elapsed_s = self.stopwatch.lap_s()
        images_seen = self.images_before(step)
        images = images_seen - self.images_before(self._window_start)
        self._loss_sum += metrics["loss"] * (step - self._window_start)
        self._loss_steps += step - self._window_start
        self._window_start = step
        if self.ema is not None:
            metrics |= self.ema.measures(trainer, module, step)
        metrics["images_per_s"] = images / elapsed_s
        device = trainer.strategy.root_device
        if device.type == "cuda":
            metrics["device_memory_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
        metrics["images_seen"] = float(images_seen)
        self.latest = metrics
        module.reset_logged()
        if trainer.is_global_zero:
            self._write(step, metrics)
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step)

    def take_mean_loss(self) -> float | None:
        """Mean over the optimizer steps since it was taken last, in whole windows, the same on every rank; None when
        there is none or it is not finite."""
        mean = self._loss_sum / self._loss_steps if self._loss_steps else math.nan
        self._loss_sum, self._loss_steps = 0.0, 0
        return mean if math.isfinite(mean) else None

    def _reduced(self, trainer: pl.Trainer, module: TrainedModule) -> dict[str, float]:
        """Means over the window's micro-batches and over ranks; the gradient norm is the last step's."""
        names = sorted(module.logged_sums)
        sums = torch.stack([module.logged_sums[name] for name in names]) / module.logged_micro_batches
        if trainer.world_size > 1:
            torch.distributed.all_reduce(sums)
            sums /= trainer.world_size
        metrics = dict(zip(names, sums.tolist(), strict=True))
        step = trainer.global_step
        plan = module.optimization
        metrics["learning_rate"] = plan.learning_rate * plan.schedule(max(0, step - 1))
        if isinstance(module.grad_norm, Tensor):
            metrics["grad_norm"] = float(module.grad_norm)
        return metrics

    def _write(self, step: int, metrics: dict[str, float]) -> None:
        # Nine digits tell every two numbers of fp32 apart, so a resumed run can be compared by its rows.
        row = {name: f"{value:.9g}" for name, value in metrics.items()}
        row |= {"optimizer_step": str(step), "images_seen": str(int(metrics["images_seen"]))}
        self.rows.add(row)
