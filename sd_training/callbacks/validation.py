"""The loss on held-out data: the same (picture, noise, noise level) triples each time, so that two measurements, of one
run or of two, differ by the weights alone.

Rows go to `validation.csv`, the mean to every logger. All ranks take part, and the result does not depend on their
number except for rounding.
"""

import math
import time
from dataclasses import dataclass, field

import pytorch_lightning as pl
import torch
from torch import Tensor, distributed

from sd_training.callbacks.base import OptimizerStepCallback, RunState, TrainingTimer
from sd_training.callbacks.ema import Ema, export_weights
from sd_training.callbacks.metrics import MetricRows
from sd_training.callbacks.preemption import Preemption
from sd_training.config.plan import counted
from sd_training.data.datamodule import HeldOutData
from sd_training.log import get_logger
from sd_training.models.execution import autocast, without_compiling
from sd_training.parallel.strategies import CpuGroup, strategy_of
from sd_training.training.base_module import TrainedModule

log = get_logger(__name__)

COLUMNS = ("optimizer_step", "weights", "quantile", "timestep", "loss", "samples")
TRAINED, AVERAGE = "trained", "average"
ALL = "all"
"""In the column of the quantile: the mean over all of them."""


@dataclass(frozen=True)
class Measurement:
    """The loss of one set of weights."""

    losses: list[float]
    """[K] mean over the samples at each quantile."""
    timesteps: list[float]
    """[K] mean of the denoiser's timestep input; NaN where there is no denoiser."""
    num_samples: int

    @property
    def loss(self) -> float:
        """Mean over everything."""
        return sum(self.losses) / len(self.losses)


@dataclass(eq=False)
class Validation(OptimizerStepCallback):
    """Measures the weights that are trained and, where there is one, their average."""

    data: HeldOutData
    every: int
    """Optimizer steps between measurements."""
    quantiles: list[float]
    """[K] of the timestep density."""
    rows: MetricRows
    """Of the run's `validation.csv`."""
    precision: str
    """Autocast type, as in training."""
    ema: Ema | None
    """The average, if there is one."""
    timer: TrainingTimer
    """Does not count the time of a measurement."""
    preemption: Preemption
    """Interrupts a measurement of a run that is to stop."""
    state: RunState
    """Gets the loss of the weights that are exported."""
    _group: CpuGroup | None = field(default=None, init=False)
    """Of its own: a save in the background may be using the strategy's."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Collective. Drop rows after the checkpoint that a run resumes from. A new run is measured before its first
        step, and one that stopped where a measurement was due is measured now."""
        super().on_train_start(trainer, pl_module)
        self._measure_missing(trainer, pl_module)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Training does not start when there is nothing left to train; the last measurement may have been
        interrupted."""
        if self._group is None:
            self._measure_missing(trainer, pl_module)

    def _measure_missing(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        step = trainer.global_step
        self._group = CpuGroup(trainer.global_rank, trainer.world_size, self.preemption.timeout)

        def is_measured() -> bool:
            self.rows.keep_until(step or -1)  # a run that saved nothing is measured anew
            return step in self.rows.steps()

        if not self._group.on_rank0(is_measured) and self.is_due(trainer, step, self.every):
            assert isinstance(module, TrainedModule)
            self._measure_all(trainer, module, step)

    def on_optimizer_step(self, trainer: pl.Trainer, module: TrainedModule, step: int) -> None:
        """Measure when due. A run that was asked to stop does so when it continues; one that is asked meanwhile stops
        after this step."""
        if trainer.should_stop or not self.is_due(trainer, step, self.every):
            return
        status = self._measure_all(trainer, module, step)
        if status and step < trainer.max_steps:
            self.preemption.stop(trainer, status)

    def _measure_all(self, trainer: pl.Trainer, module: TrainedModule, step: int) -> int:
        """Returns 0, or the exit status that all ranks agreed on when one was asked to stop; then nothing is
        recorded."""
        measured: dict[str, Measurement] = {}
        began_s = time.monotonic()
        with self.timer.excluded("validate"):
            for name, ema in ((TRAINED, None), *([(AVERAGE, self.ema)] if self.ema else [])):
                one = self._measure(trainer, module, ema)
                if isinstance(one, int):
                    log.info(
                        f"validation loss after {counted(step, 'optimizer step')}: interrupted, the run is to stop"
                    )
                    return one
                measured[name] = one
        self.preemption.exclude_from_step(time.monotonic() - began_s)
        self.state.validation_loss = (step, measured[TRAINED if self.ema is None else AVERAGE].loss)
        if trainer.is_global_zero:
            self._record(trainer, step, measured)
        return 0

    @torch.no_grad()
    def _measure(self, trainer: pl.Trainer, module: TrainedModule, ema: Ema | None) -> Measurement | int:
        """Collective; an exit status when one rank was asked to stop.

        Raises:
            DataError: the held-out data cannot be read, on some rank; whatever else its reading raises.
        """
        device, strategy = trainer.strategy.root_device, strategy_of(trainer)
        assert self._group is not None
        # All ranks do equally many rounds. In one without a batch of its own, a rank waits, or computes the loss of
        # some batch for nothing where a forward pass is collective.
        numbers, missing = strategy.split_over_ranks(len(self.data))
        batches = self.data.batches(numbers + [0] * missing if strategy.has_collective_forward else numbers)
        sums = torch.zeros(len(self.quantiles), 3, dtype=torch.float64)
        with export_weights(module, ema), autocast(device, self.precision), without_compiling():
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
                    losses, timesteps = module.held_out_losses(batch.to(device), self.quantiles)
                    if round_ < len(numbers):
                        sums += _sums(losses, timesteps)
        if trainer.world_size > 1:
            sums = sums.to(device)
            distributed.all_reduce(sums)
        # Ranks that share samples have measured the same.
        total, times, count = (sums.cpu() / strategy.tensor_parallel_size).unbind(1)
        return Measurement((total / count).tolist(), (times / count).tolist(), round(float(count[0])))

    def _record(self, trainer: pl.Trainer, step: int, measured: dict[str, Measurement]) -> None:
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


def _sums(losses: Tensor, timesteps: Tensor | None) -> Tensor:
    """[K, 3] sums over the samples: losses, timesteps, ones."""
    losses = losses.double().cpu()
    times = torch.full_like(losses, math.nan) if timesteps is None else timesteps.double().cpu()
    return torch.stack([losses.sum(1), times.sum(1), torch.ones_like(losses).sum(1)], dim=1)
