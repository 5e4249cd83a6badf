"""Which steps of a run were wrong, and when to go back. The same on every process, and after a resume.

Finds loss spikes: a level that jumped, not one unlucky batch.

The loss of a step of a diffusion model is noisy, with heavy tails, and falls over the run; its logarithm is about
symmetric around a slow trend. So the median of the last `RECENT` log losses is compared with the median of the
`HISTORY` before them, in units of their median absolute deviation. Fewer than half of `RECENT` outliers never count.

The optimizer steps since the host last looked: losses and flags stay on the device until `read`.
"""

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from torch import Tensor

from sd_training.callbacks.base import gather_ranks
from sd_training.config.schema import NumericsConfig
from sd_training.training.base_module import MicroBatchRecord

RECENT = 5
HISTORY = 200
MIN_HISTORY = 50
"""Steps before the first judgement."""
_SIGMA_OF_MAD = 1.4826
_MIN_SIGMA = 0.02
"""Of the log loss: where the loss hardly varies, 2 % count as one deviation."""


class Spike(NamedTuple):
    """A spike when it is found."""

    first_step: int
    """The first of the last steps that lies above the threshold; optimizer steps completed before it."""
    score: float
    """Robust standard deviations above the level of before."""
    level: float
    """Median loss of the steps before."""


class SpikeDetector:
    """Takes the steps in order.

    Args:
        threshold: robust standard deviations.
    """

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold
        self._history: deque[float] = deque(maxlen=HISTORY)
        self._recent: deque[tuple[int, float]] = deque()
        self._is_in_spike = False

    def add(self, step: int, loss: float) -> Spike | None:
        """The spike that this step completes; a spike is told once. A loss that is not positive is not judged.

        Args:
            step: optimizer steps completed before it.
            loss: mean over the step's samples.
        """
        if not (math.isfinite(loss) and loss > 0):
            return None
        self._recent.append((step, math.log(loss)))
        if len(self._recent) > RECENT:
            self._history.append(self._recent.popleft()[1])
        if len(self._history) < MIN_HISTORY or len(self._recent) < RECENT:
            return None
        return self._judge()

    def _judge(self) -> Spike | None:
        level = median(self._history)
        sigma = max(_SIGMA_OF_MAD * median(abs(value - level) for value in self._history), _MIN_SIGMA)
        score = (median(value for _, value in self._recent) - level) / sigma
        was_in_spike, self._is_in_spike = self._is_in_spike, score > self.threshold
        if was_in_spike or not self._is_in_spike:
            return None
        first = next(step for step, value in self._recent if value > level + self.threshold * sigma)
        return Spike(first, score, math.exp(level))

    def forget_recent(self) -> None:
        """After a rollback: the last steps belong to weights that are gone."""
        self._recent.clear()
        self._is_in_spike = False

    def state(self) -> dict[str, Any]:
        """Plain values; `load` is the way back."""
        recent = [[step, value] for step, value in self._recent]
        return {"history": list(self._history), "recent": recent, "is_in_spike": self._is_in_spike}

    def load(self, state: dict[str, Any]) -> None:
        """Goes on as if it had never stopped."""
        self._history = deque(map(float, state["history"]), maxlen=HISTORY)
        self._recent = deque((int(step), float(value)) for step, value in state["recent"])
        self._is_in_spike = bool(state["is_in_spike"])


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
    micro_batches: list[MicroBatchRecord]
    flag: Tensor | None


@dataclass
class StepWindow:
    """Collects on every process; `read` and `samples` are collective."""

    _micro_batches: list[MicroBatchRecord] = field(default_factory=list)
    _steps: list[_Step] = field(default_factory=list)
    _last_read: dict[int, _Step] = field(default_factory=dict)

    def add_micro_batch(self, seen: MicroBatchRecord | None) -> None:
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
        by_rank = gather_ranks(trainer, rows).tolist()
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
        everyone = gather_ranks(trainer, torch.stack(rows)).tolist()
        reports = [
            SampleReport(rank, micro, int(position), int(sample), loss, None if time < 0 else time)
            for rank, micro_batches in enumerate(everyone)
            if rank % sharing == 0
            for micro, samples in enumerate(micro_batches)
            for position, sample, loss, time in samples
        ]
        return sorted(reports, key=lambda r: (math.isfinite(r.loss), -r.loss if math.isfinite(r.loss) else 0.0))


SKIPPED, SPIKE = "skipped", "spike"
"""Kinds of findings; also the kinds of their incidents."""


class RollbackReason(NamedTuple):
    """Why the run should go back to an older checkpoint."""

    kind: str
    first_step: int
    """The first step that was wrong [optimizer steps completed before it]."""
    last_step: int


class Anomaly(NamedTuple):
    """What is wrong with a step."""

    kind: str
    spike: Spike | None = None


class AnomalyDetector:
    """Takes every step of the run in order.

    Args:
        config: limits and thresholds.

    Attributes:
        trouble: set until `forget`.
    """

    def __init__(self, config: NumericsConfig) -> None:
        self.config = config
        self.trouble: RollbackReason | None = None
        self._detector = SpikeDetector(config.spike_threshold)
        self._in_a_row = 0
        self._first_in_a_row = 0

    def add(self, report: StepReport) -> Anomaly | None:
        """What is wrong with the next step, if anything."""
        if report.was_skipped or not report.is_loss_finite:
            self._count_skipped(report.step)
            return Anomaly(SKIPPED)
        self._in_a_row = 0
        spike = self._detector.add(report.step, report.loss)
        if spike is None:
            return None
        if self.config.on_spike == "rollback":
            self.trouble = self.trouble or RollbackReason(SPIKE, spike.first_step, report.step)
        return Anomaly(SPIKE, spike)

    def _count_skipped(self, step: int) -> None:
        if self._in_a_row == 0:
            self._first_in_a_row = step
        self._in_a_row += 1
        if self._in_a_row >= self.config.max_skipped_in_a_row:
            self.trouble = self.trouble or RollbackReason(SKIPPED, self._first_in_a_row, step)

    def forget(self) -> None:
        """After a rollback: the last steps belong to weights that are gone."""
        self.trouble = None
        self._in_a_row = 0
        self._detector.forget_recent()

    def state(self) -> dict[str, Any]:
        """Plain values; `load` is the way back."""
        return {
            "in_a_row": self._in_a_row,
            "first_in_a_row": self._first_in_a_row,
            "trouble": None if self.trouble is None else list(self.trouble),
            "detector": self._detector.state(),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Goes on as if it had never stopped."""
        self._in_a_row, self._first_in_a_row = int(state["in_a_row"]), int(state["first_in_a_row"])
        self.trouble = None if state["trouble"] is None else RollbackReason(*state["trouble"])
        self._detector.load(state["detector"])
