"""The loss on held-out pictures: the same (picture, noise, noise level) triples each time, so that two measurements, of
one run or of two, differ by the weights alone.

Rows go to `validation.csv`, the mean to every logger. All ranks take part, and the result does not depend on how many
there are but for rounding.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, distributed

from sd_training.callbacks.ema import Ema, export_weights
from sd_training.callbacks.every_step import OptimizerStepCallback
from sd_training.callbacks.metric_rows import MetricRows
from sd_training.callbacks.preemption import Preemption
from sd_training.callbacks.stopwatch import Stopwatch
from sd_training.config.batch_plan import counted
from sd_training.data.held_out import HeldOutData
from sd_training.distributed.peers import Peers
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
        rows: of the run's `validation.csv`.
        precision: autocast type, as in training.
        ema: the average, if there is one.
        stopwatch: stands still meanwhile.
        preemption: a run that is to stop has no time for it.
    """

    def __init__(
        self,
        data: HeldOutData,
        every: int,
        quantiles: list[float],
        rows: MetricRows,
        precision: str,
        ema: Ema | None,
        stopwatch: Stopwatch,
        preemption: Preemption,
    ) -> None:
        self.data, self.every, self.quantiles, self.rows = data, every, quantiles, rows
        self.precision, self.ema, self.stopwatch, self.preemption = precision, ema, stopwatch, preemption
        self._peers: Peers | None = None
        self._latest: tuple[int, float] | None = None

    def loss_after(self, step: int) -> float | None:
        """Of the weights that are exported (the average where there is one), if it was measured after this step and is
        finite; the same on every rank."""
        if self._latest is None or self._latest[0] != step or not math.isfinite(self._latest[1]):
            return None
        return self._latest[1]

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Collective. Drop rows after the checkpoint that a run resumes from. A new run is measured before its first
        step, and one that stopped where it was to be measured is measured now."""
        super().on_train_start(trainer, pl_module)
        self._make_up(trainer, pl_module)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Training does not start when there is nothing left to train; the last measurement may have been broken
        off."""
        if self._peers is None:
            self._make_up(trainer, pl_module)

    def _make_up(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        step = trainer.global_step
        # Saves have a group of their own, which a save in the background may be using.
        self._peers = Peers(trainer.global_rank, trainer.world_size, self.preemption.timeout)
        is_known = self._peers.on_first(lambda: self._is_known(step))
        if not is_known and self.is_due(trainer, step, self.every):
            assert isinstance(module, TrainedModule)
            self._measure_all(trainer, module, step)

    def _is_known(self, step: int) -> bool:
        """What was measured of a run that saved nothing is measured anew."""
        self.rows.keep_until(step or -1)
        return self.rows.has(step)

    def on_optimizer_step(self, trainer: pl.Trainer, module: TrainedModule, step: int) -> None:
        """Measure when due. A run that was asked to stop does so when it goes on; one that is asked meanwhile stops
        after this step."""
        if trainer.should_stop or not self.is_due(trainer, step, self.every):
            return
        status = self._measure_all(trainer, module, step)
        if status and step < trainer.max_steps:
            self.preemption.stop(trainer, status, "a signal or the time limit asks this run to stop")

    def _measure_all(self, trainer: pl.Trainer, module: TrainedModule, step: int) -> int:
        """Returns 0, or the exit status that all ranks agreed on when one was asked to stop; then nothing is known."""
        measured: dict[str, Measured] = {}
        began_s = time.monotonic()
        with self.stopwatch.paused("validate"):
            for name, ema in ((TRAINED, None), *([(AVERAGE, self.ema)] if self.ema else [])):
                one = self._measure(trainer, module, ema)
                if isinstance(one, int):
                    log.info(
                        f"validation loss after {counted(step, 'optimizer step')}: broken off, as the run is to stop"
                    )
                    return one
                measured[name] = one
        self.preemption.leave_out(time.monotonic() - began_s)
        self._latest = (step, measured[TRAINED if self.ema is None else AVERAGE].loss)
        if trainer.is_global_zero:
            self._tell(trainer, step, measured)
        return 0

    @torch.no_grad()
    def _measure(self, trainer: pl.Trainer, module: TrainedModule, ema: Ema | None) -> Measured | int:
        """Collective; an exit status when one rank was asked to stop.

        Raises:
            DataError: the held-out data cannot be read, on some rank; whatever else its reading raises.
        """
        device, strategy = trainer.strategy.root_device, trainer.strategy
        sums = torch.zeros(len(self.quantiles), 3, dtype=torch.float64)
        with export_weights(module, ema), autocast(device, self.precision), without_compiling():
            batches, counted = self._share(strategy)
            for is_counted in counted:
                if status := self._agreed_status(trainer):
                    return status
                batch = self._next(batches)
                if batch is not None:
                    losses, timesteps = module.held_out_losses(batch.to(device), self.quantiles)
                    if is_counted:
                        sums += _summed(losses, timesteps)
        if trainer.world_size > 1:
            sums = sums.to(device)
            distributed.all_reduce(sums)
        # Processes that share samples have measured the same.
        total, times, count = (sums.cpu() / strategy.ranks_per_share).unbind(1)  # type: ignore[attr-defined]
        return Measured((total / count).tolist(), (times / count).tolist(), round(float(count[0])))

    def _share(self, strategy: Any) -> tuple[Iterator[PixelBatch], list[bool]]:
        """This rank's batches, and for each of the rounds, which are equally many on all ranks, whether its batch
        counts. In a round without one a rank waits, or passes some batch for nothing where a forward pass is
        collective."""
        own, missing = strategy.dealt(len(self.data))
        passed = [0] * missing if strategy.has_collective_forward else []
        return self.data.batches(own + passed), [True] * len(own) + [False] * missing

    def _next(self, batches: Iterator[PixelBatch]) -> PixelBatch | None:
        """Collective: all ranks fail when one does, so that they can save."""
        batch, failure = None, None
        try:
            batch = next(batches, None)
        except Exception as error:
            failure = error
        assert self._peers is not None
        self._peers.raise_first(failure)
        return batch

    def _agreed_status(self, trainer: pl.Trainer) -> int:
        """Collective."""
        assert self._peers is not None
        return max(self._peers.tell(self.preemption.status_asked(trainer)))

    def _tell(self, trainer: pl.Trainer, step: int, measured: dict[str, Measured]) -> None:
        rows = []
        for weights, one in measured.items():
            levels = zip(map(str, self.quantiles), one.timesteps, one.losses, strict=True)
            known = [level for level in levels if math.isfinite(level[1])]
            for quantile, timestep, loss in [(ALL, math.nan, one.loss), *known]:
                time = f"{timestep:.9g}" if math.isfinite(timestep) else ""
                row = {"weights": weights, "quantile": quantile, "timestep": time, "loss": f"{loss:.9g}"}
                rows.append(row | {"optimizer_step": str(step), "samples": str(one.num_samples)})
        self.rows.add(*rows)
        values = {f"validation_loss_{weights}": one.loss for weights, one in measured.items()}
        for logger in trainer.loggers:
            logger.log_metrics(values, step)
        text = ", ".join(f"{one.loss:.6g} ({weights} weights)" for weights, one in measured.items())
        log.info(f"validation loss after {counted(step, 'optimizer step')}: {text}")


def _summed(losses: Tensor, timesteps: Tensor | None) -> Tensor:
    """[K, 3] sums over the samples: losses, timesteps, ones."""
    losses = losses.double().cpu()
    times = torch.full_like(losses, math.nan) if timesteps is None else timesteps.double().cpu()
    return torch.stack([losses.sum(1), times.sum(1), torch.ones_like(losses).sum(1)], dim=1)
