"""The optimizer steps since the host last looked: losses and flags stay on the device until `read`."""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import pytorch_lightning as pl
import torch
from torch import Tensor

from sd_training.callbacks.gathered import gathered
from sd_training.training.seen import SeenMicroBatch


class StepReport(NamedTuple):
    """What all processes know of a step, the same on each."""

    step: int
    """Optimizer steps completed before it."""
    losses: list[list[float]]
    """Rank → micro-batch → loss."""
    was_skipped: bool
    """Whether the optimizer left the weights alone for a gradient that was not finite."""

    @property
    def loss(self) -> float:
        """Mean over ranks and micro-batches."""
        return math.fsum(map(math.fsum, self.losses)) / sum(map(len, self.losses)) if self.is_loss_finite else math.nan

    @property
    def is_loss_finite(self) -> bool:
        """On every rank."""
        return not self.ranks

    @property
    def ranks(self) -> list[int]:
        """Those with a loss that is not finite."""
        return [rank for rank, losses in enumerate(self.losses) if not all(map(math.isfinite, losses))]


class SampleReport(NamedTuple):
    """A sample of a step."""

    rank: int
    micro_batch: int
    position: int
    sample_id: int
    loss: float
    timestep: float | None


@dataclass
class _Step:
    step: int
    micro_batches: list[SeenMicroBatch]
    flag: Tensor | None


@dataclass
class StepWindow:
    """Collects on every process; `read` and `samples` are collective."""

    _micro_batches: list[SeenMicroBatch] = field(default_factory=list)
    _steps: list[_Step] = field(default_factory=list)
    _last_read: dict[int, _Step] = field(default_factory=dict)

    def add_micro_batch(self, seen: SeenMicroBatch | None) -> None:
        """Another forward pass of the step that is under way."""
        if seen is not None:
            self._micro_batches.append(seen)

    def end_step(self, step: int, flag: Tensor | None) -> None:
        """The step is done.

        Args:
            step: optimizer steps completed before it.
            flag: not 0 where it was skipped; None where the engine does not say.
        """
        self._steps.append(_Step(step, self._micro_batches, flag))
        self._micro_batches = []

    def read(self, trainer: pl.Trainer) -> list[StepReport]:
        """Every step since the last call. The host waits for the device, once."""
        steps, self._steps = self._steps, []
        self._last_read = {step.step: step for step in steps}
        if not steps or not steps[0].micro_batches:
            return []
        losses = torch.stack([m.loss.float() for step in steps for m in step.micro_batches])
        flags = [losses.new_zeros(()) if s.flag is None else s.flag.to(losses.device).float() for s in steps]
        rows = torch.cat([torch.stack(flags)[:, None], losses.view(len(steps), -1)], dim=1)
        by_rank = gathered(trainer, rows).tolist()
        return [
            StepReport(step.step, [rows[i][1:] for rows in by_rank], any(rows[i][0] for rows in by_rank))
            for i, step in enumerate(steps)
        ]

    def samples(self, trainer: pl.Trainer, step: int) -> list[SampleReport]:
        """The samples of a step of the last `read`, those first whose loss is not finite, then by loss."""
        rows = []
        for seen in self._last_read[step].micro_batches:
            times = torch.full_like(seen.sample_losses, -1.0) if seen.timesteps is None else seen.timesteps
            columns = (seen.positions, seen.sample_ids, seen.sample_losses, times)
            rows.append(torch.stack([column.cpu().double() for column in columns], dim=1))
        sharing: int = getattr(trainer.strategy, "ranks_per_share", 1)
        everyone = gathered(trainer, torch.stack(rows)).tolist()
        reports = [
            SampleReport(rank, micro, int(position), int(sample), loss, None if time < 0 else time)
            for rank, micro_batches in enumerate(everyone)
            if rank % sharing == 0
            for micro, samples in enumerate(micro_batches)
            for position, sample, loss, time in samples
        ]
        return sorted(reports, key=lambda r: (math.isfinite(r.loss), -r.loss if math.isfinite(r.loss) else 0.0))
