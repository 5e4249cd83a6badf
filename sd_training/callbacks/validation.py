"""The loss on held-out data: the same (picture, noise, noise level) triples each time, so that two measurements, of one
run or of two, differ by the weights alone.

Rows go to `validation.csv`, the same numbers to every logger, all with a 95 % interval over the samples. All ranks take
part, and the result does not depend on their number except for rounding.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor, distributed
from torchmetrics.image.fid import FrechetInceptionDistance

from sd_training.callbacks.base import OptimizerStepCallback, log_picture
from sd_training.callbacks.ema import Ema, export_weights
from sd_training.callbacks.metrics import MetricRows
from sd_training.callbacks.preemption import Preemption
from sd_training.config.plan import counted
from sd_training.config.schema import Config
from sd_training.data.datamodule import HeldOutData
from sd_training.evaluation.paired import Vector, half_width
from sd_training.export.draw import comparison_grid
from sd_training.log import get_logger
from sd_training.models.family import autocast
from sd_training.parallel.strategies import CpuGroup, strategy_of
from sd_training.training import TrainedModule, scaled_pixels

log = get_logger(__name__)

TRAINED, AVERAGE = "trained", "average"
ALL = "all"
"""In the column of the quantile: the mean over all of them."""
RFD, RFID = "rfd", "rfid"
"""Columns of `Validation.frechet`."""
_TIMESTEP = "timestep"
"""Of `held_out`: what a level is, not a measure."""
_NUM_PAIRS, _PAIRS_PER_ROW = 16, 4


def column_names(held_out: Sequence[str], frechet: Iterable[str]) -> list[str]:
    """Of `validation.csv`.

    Args:
        held_out: of the module.
        frechet: names of the distances of reconstructions.
    """
    measures = [f"{name}{bound}" for name in held_out if name != _TIMESTEP for bound in ("", "_low", "_high")]
    return ["optimizer_step", "weights", "quantile", _TIMESTEP, "samples", *measures, *frechet]


def noise_levels(config: Config) -> list[float]:
    """[K] quantiles of the timestep density: the middles of equally likely parts. An autoencoder has no noise levels: a
    single one, which is not read."""
    count = 1 if config.model.train == "vae" else config.validation.num_levels
    return [(number + 0.5) / count for number in range(count)]


@dataclass(eq=False)
class Validation(OptimizerStepCallback):
    """Measures the weights that are trained and, where there is one, their average."""

    section = "validation"

    data: HeldOutData
    config: Config
    rows: MetricRows
    """Of the run's `validation.csv`."""
    precision: str
    """Autocast type, as in training."""
    ema: Ema | None
    """The average, if there is one."""
    preemption: Preemption
    """Interrupts a validation when a stop is requested. Its `RunState` gets the loss of the exported weights."""
    frechet: Mapping[str, FrechetInceptionDistance] = field(default_factory=dict)
    """Column → distance between pictures and their reconstructions."""
    _pairs: Tensor | None = field(default=None, init=False)
    """The first pictures of this rank and their reconstructions, of the newest measurement."""
    _group: CpuGroup | None = field(default=None, init=False)
    """A separate group: a save in the background may be using the strategy's."""

    def __post_init__(self) -> None:
        self.every, self.quantiles = self.config.validation.every, noise_levels(self.config)

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Collective. Drop rows after the checkpoint that a run resumes from. A new run is validated before its
        first step, and a run that stopped when a validation was due is validated now."""
        super().on_train_start(trainer, pl_module)
        self._measure_missing(trainer, pl_module)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Training does not start when there is nothing left to train, but the last validation may have been
        interrupted."""
        if self._group is None:
            self._measure_missing(trainer, pl_module)

    def _measure_missing(self, trainer: pl.Trainer, module: Any) -> None:
        step = trainer.global_step
        timeout = timedelta(seconds=self.config.watch.collective_timeout_s)
        self._group = CpuGroup(trainer.global_rank, trainer.world_size, timeout)

        def is_measured() -> bool:
            self.rows.keep_until(step or -1)  # a run that saved nothing is validated again
            return self.rows.has(step)

        if not self._group.on_rank0(is_measured) and self.is_due(trainer, step, self.every):
            self._measure_all(trainer, module, step)

    def on_optimizer_step(self, trainer: pl.Trainer, module: TrainedModule, step: int) -> None:
        """Validate when due. After a stop request the validation is done when the run resumes; a request during the
        validation stops the run after this step."""
        if trainer.should_stop or not self.is_due(trainer, step, self.every):
            return
        status = self._measure_all(trainer, module, step)
        if status and step < trainer.max_steps:
            self.preemption.stop(trainer, status)

    def _measure_all(self, trainer: pl.Trainer, module: TrainedModule, step: int) -> int:
        """Returns 0, or the exit status that all ranks agreed on after a stop request; then nothing is recorded."""
        rows: list[dict[str, str]] = []
        losses, measures = dict[str, float](), dict[str, float]()
        began_s, after = time.monotonic(), f"validation loss after {counted(step, 'optimizer step')}"
        with self.preemption.state.watched("validate"):
            for weights, ema in ((TRAINED, None), *([(AVERAGE, self.ema)] if self.ema else [])):
                measured = self._measure(trainer, module, ema)
                if isinstance(measured, int):
                    log.info(f"{after}: interrupted, the run is to stop")
                    return measured
                self._draw_pairs(trainer, step, weights)
                found, count = _statistics(module.held_out, measured)
                times = found.pop(_TIMESTEP, np.empty(0))
                means = {name: float(own[-1]) for name, own in found.items()}
                if count > 1:
                    means |= {name: float(distance.compute()) for name, distance in self.frechet.items()}
                losses[weights] = means["loss"]
                row = {"optimizer_step": str(step), "weights": weights, "samples": str(count)}
                rows.append(row | {"quantile": ALL} | {name: f"{mean:.9g}" for name, mean in means.items()})
                measures |= {f"validation_{name}_{weights}": mean for name, mean in means.items()}
                for level, (quantile, time_) in enumerate(zip(self.quantiles, times, strict=False)):
                    own = {name: f"{values[level]:.9g}" for name, values in found.items()}
                    rows.append(row | {"quantile": str(quantile), _TIMESTEP: f"{time_:.9g}"} | own)
                    measures |= {f"validation_{n}_{weights}/level_{level}": float(v[level]) for n, v in found.items()}
        self.preemption.exclude_from_step(time.monotonic() - began_s)
        self.preemption.state.validation_loss = (step, losses[TRAINED if self.ema is None else AVERAGE])
        if trainer.is_global_zero:
            self.rows.add(*rows)
            for logger in trainer.loggers:
                logger.log_metrics(measures, step)
            log.info(f"{after}: {', '.join(f'{loss:.6g} ({weights} weights)' for weights, loss in losses.items())}")
        return 0

    def _add_to_frechet(self, pairs: Tensor | None) -> None:
        """[B, 3, H, 2W] uint8 pictures with their reconstructions."""
        if pairs is None:
            return
        with autocast(pairs.device, "fp32"):
            for pixels, is_real in zip(pairs.chunk(2, dim=3), (True, False), strict=True):
                for distance in self.frechet.values():
                    distance.update(scaled_pixels(pixels), real=is_real)

    def _draw_pairs(self, trainer: pl.Trainer, step: int, weights: str) -> None:
        """Rank 0: one picture of the first pairs, each with its absolute difference on the right. One that cannot be
        written is lost, and the run continues."""
        if self._pairs is None or not trainer.is_global_zero:
            return
        grid = comparison_grid(self._pairs[:_NUM_PAIRS].cpu(), _PAIRS_PER_ROW)
        name = f"reconstructions_{weights}"
        path = self.rows.path.parent / "samples" / f"step_{step}" / f"{name}.png"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            grid.save(path)
        except OSError as error:
            log.error(f"{path} could not be written: {error}")
        log_picture(trainer, name, grid, step)

    @torch.no_grad()
    def _measure(self, trainer: pl.Trainer, module: TrainedModule, ema: Ema | None) -> Tensor | int:
        """Collective: [2 N + 1, K + 1] sums over the samples of the N values of `held_out`, of their squares, and of
        ones, at K levels and of the mean over them; an exit status after a stop request to any rank.

        Raises:
            DataError: the held-out data cannot be read, on some rank; whatever else its reading raises.
        """
        device, strategy = trainer.strategy.root_device, strategy_of(trainer)
        assert self._group is not None
        # All ranks do the same number of rounds. A rank without a batch in a round waits, or, if the forward pass is
        # collective, computes a loss that is discarded.
        numbers, missing = strategy.split_over_ranks(len(self.data))
        batches = self.data.batches(numbers + [0] * missing if strategy.has_collective_forward else numbers)
        sums = torch.zeros(2 * len(module.held_out) + 1, len(self.quantiles) + 1, dtype=torch.float64)
        for distance in self.frechet.values():
            distance.to(device)
            distance.reset()
        # Compiled modules run as they were written: other batch sizes and shapes make no graphs.
        with export_weights(module, ema), autocast(device, self.precision), torch.compiler.set_stance("force_eager"):
            for round_ in range(len(numbers) + missing):
                if status := max(self._group.all_gather(self.preemption.requested_status(trainer))):
                    return status
                batch, failure = None, None
                try:
                    batch = next(batches, None)
                except Exception as error:
                    failure = error
                self._group.raise_first(failure)  # all ranks fail when one does, so that they can save
                if batch is not None:
                    values, pairs = module.held_out_measures(batch.to(device), self.quantiles)
                    self._pairs = pairs if round_ == 0 else self._pairs
                    if round_ < len(numbers):
                        values = values.cpu().double()
                        # A sample's losses at several levels are not independent: the unit is their mean.
                        values = torch.cat((values, values.mean(1, keepdim=True)), dim=1)
                        sums += torch.cat((values, values.square(), torch.ones_like(values[:1]))).sum(2)
                        self._add_to_frechet(pairs)
        if trainer.world_size > 1:
            sums = sums.to(device)
            distributed.all_reduce(sums)
        return sums.cpu() / strategy.tensor_parallel_size  # ranks that share samples have measured the same


def _statistics(names: Sequence[str], sums: Tensor) -> tuple[dict[str, Vector], int]:
    """Name → [K + 1] means over the samples at K levels and over all; of all but the timestep also `NAME_low` and
    `NAME_high`, a 95 % interval, where there are 2 samples or more. And the number of samples.

    Args:
        names: of the N values.
        sums: as `Validation._measure` gives them.
    """
    count, found = round(float(sums[-1, 0])), dict[str, Vector]()
    means, squares = (sums[:-1] / count).numpy().reshape(2, len(names), -1)
    for name, mean, square in zip(names, means, squares, strict=True):
        found[name] = mean
        if name != _TIMESTEP and count > 1:
            with np.errstate(invalid="ignore"):  # of an infinite loss
                std = np.sqrt(np.maximum(square - mean**2, 0.0) * count / (count - 1))
                found |= {f"{name}_low": mean - half_width(std, count), f"{name}_high": mean + half_width(std, count)}
    return found, count
