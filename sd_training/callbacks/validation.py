"""The loss on held-out pictures: the same (picture, noise, noise level) triples each time, so that two measurements, of
one run or of two, differ by the weights alone.

Rows go to `validation.csv`, the mean to every logger. All ranks take part, and the result does not depend on how many
there are but for rounding.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, distributed

from sd_training.callbacks.ema import Ema, export_weights
from sd_training.callbacks.every_step import OptimizerStepCallback
from sd_training.callbacks.metric_rows import MetricRows
from sd_training.callbacks.stopwatch import Stopwatch
from sd_training.checkpoint.writer import UNFENCED, Fence
from sd_training.data.held_out import HeldOutData
from sd_training.models.compilation import without_compiling
from sd_training.models.encoders import autocast
from sd_training.rank_log import get_logger
from sd_training.training.base_module import TrainedModule
from sd_training.types import PixelBatch

log = get_logger(__name__)

COLUMNS = ("optimizer_step", "weights", "quantile", "timestep", "loss", "samples")
TRAINED, AVERAGE = "trained", "average"
ALL = "all"
"""In the column of the quantile: the mean over all of them."""


@dataclass(frozen=True)
class Measured:
    """What one set of weights answers."""

    losses: list[float]
    """[K] mean over the samples at each quantile."""
    timesteps: list[float]
    """[K] mean of what the denoiser is told; NaN where there is no denoiser."""
    num_samples: int

    @property
    def loss(self) -> float:
        """Mean over everything."""
        return sum(self.losses) / len(self.losses)


class Validation(OptimizerStepCallback):
    """Measures the weights that are trained and, where there is one, their average.

    Args:
        data: what is measured on.
        every: optimizer steps between measurements.
        quantiles: [K] of the timestep density.
        csv_path: the run's `validation.csv`.
        precision: autocast type, as in training.
        ema: the average, if there is one.
        stopwatch: stands still meanwhile.
        fence: of this start of the run.
    """

    def __init__(
        self,
        data: HeldOutData,
        every: int,
        quantiles: list[float],
        csv_path: Path,
        precision: str,
        ema: Ema | None,
        stopwatch: Stopwatch,
        fence: Fence = UNFENCED,
    ) -> None:
        self.data, self.every, self.quantiles = data, every, quantiles
        self.rows = MetricRows(csv_path, COLUMNS, fence)
        self.precision, self.ema, self.stopwatch = precision, ema, stopwatch
        self._latest: tuple[int, float] | None = None

    def loss_after(self, step: int) -> float | None:
        """Of the weights that are exported (the average where there is one), if it was measured after this step and is
        finite; the same on every rank."""
        if self._latest is None or self._latest[0] != step or not math.isfinite(self._latest[1]):
            return None
        return self._latest[1]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Drop rows after the checkpoint that a run resumes from; a new run is measured before its first step."""
        super().on_train_start(trainer, pl_module)
        if trainer.is_global_zero:
            self.rows.keep_until(trainer.global_step)
        if trainer.global_step == 0:
            assert isinstance(pl_module, TrainedModule)
            self._measure_all(trainer, pl_module, 0)

    def on_optimizer_step(self, trainer: pl.Trainer, module: TrainedModule, step: int) -> None:
        """Measure when due; a run that was asked to stop has no time for it."""
        if not trainer.should_stop and self.is_due(trainer, step, self.every):
            self._measure_all(trainer, module, step)

    def _measure_all(self, trainer: pl.Trainer, module: TrainedModule, step: int) -> None:
        with self.stopwatch.paused("validate"):
            measured = {TRAINED: self._measure(trainer, module, None)}
            if self.ema is not None:
                measured[AVERAGE] = self._measure(trainer, module, self.ema)
        self._latest = (step, measured[TRAINED if self.ema is None else AVERAGE].loss)
        if trainer.is_global_zero:
            self._tell(trainer, step, measured)

    @torch.no_grad()
    def _measure(self, trainer: pl.Trainer, module: TrainedModule, ema: Ema | None) -> Measured:
        """Collective."""
        device = trainer.strategy.root_device
        sums = torch.zeros(len(self.quantiles), 3, dtype=torch.float64)
        with export_weights(module, ema), autocast(device, self.precision), without_compiling():
            for batch, is_counted in self._share(trainer.strategy):
                losses, timesteps = module.held_out_losses(batch.to(device), self.quantiles)
                if is_counted:
                    sums += _summed(losses, timesteps)
        if trainer.world_size > 1:
            sums = sums.to(device)
            distributed.all_reduce(sums)
        total, times, count = sums.cpu().unbind(1)
        return Measured((total / count).tolist(), (times / count).tolist(), round(float(count[0])))

    def _share(self, strategy: Any) -> Iterator[tuple[PixelBatch, bool]]:
        """This rank's batches, and whether each counts: where a forward pass is collective, all ranks make equally many
        passes, some for nothing."""
        count, ranks = len(self.data), strategy.data_ranks
        own = list(range(strategy.data_rank, count, ranks))
        more = -(-count // ranks) - len(own) if strategy.has_collective_forward else 0
        counted = [True] * len(own) + [False] * more
        yield from zip(self.data.batches(own + [0] * more), counted, strict=True)

    def _tell(self, trainer: pl.Trainer, step: int, measured: dict[str, Measured]) -> None:
        for weights, one in measured.items():
            levels = zip(map(str, self.quantiles), one.timesteps, one.losses, strict=True)
            known = [level for level in levels if math.isfinite(level[1])]
            for quantile, timestep, loss in [(ALL, math.nan, one.loss), *known]:
                time = f"{timestep:.9g}" if math.isfinite(timestep) else ""
                row = {"weights": weights, "quantile": quantile, "timestep": time, "loss": f"{loss:.9g}"}
                self.rows.add(row | {"optimizer_step": str(step), "samples": str(one.num_samples)})
        values = {f"validation_loss_{weights}": one.loss for weights, one in measured.items()}
        for logger in trainer.loggers:
            logger.log_metrics(values, step)
        text = ", ".join(f"{one.loss:.6g} ({weights} weights)" for weights, one in measured.items())
        log.info(f"validation loss after {step:,} optimizer steps: {text}")


def _summed(losses: Tensor, timesteps: Tensor | None) -> Tensor:
    """[K, 3] sums over the samples: losses, timesteps, ones."""
    losses = losses.double().cpu()
    times = torch.full_like(losses, math.nan) if timesteps is None else timesteps.double().cpu()
    return torch.stack([losses.sum(1), times.sum(1), torch.ones_like(losses).sum(1)], dim=1)
