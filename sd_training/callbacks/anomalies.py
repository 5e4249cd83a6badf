"""Detects optimizer steps with wrong numbers, and decides when to go back to an older checkpoint.

The detector sees every step in order, on every rank, and its state is part of the checkpoint: all ranks, and a resumed
run, decide alike.

Spikes: the loss of a step of a diffusion model is noisy, with heavy tails, and falls over the run; its logarithm is
about symmetric around a slow trend. So the median of the last `RECENT` log losses is compared with the median of the
`HISTORY` before them, in units of their median absolute deviation. Fewer than half of `RECENT` outliers never count.
"""

import math
from collections import deque
from statistics import median
from typing import Any, NamedTuple

from sd_training.config.schema import NumericsConfig

RECENT = 5
HISTORY = 200
MIN_HISTORY = 50
"""Steps before the first decision about a spike."""
SKIPPED, SPIKE = "skipped", "spike"
"""Kinds of anomalies; also the kinds of their incidents."""
_SIGMA_OF_MAD = 1.4826
_MIN_SIGMA = 0.02
"""Of the log loss: where the loss hardly varies, 2 % count as one deviation."""


class StepReport(NamedTuple):
    """One optimizer step as all ranks know it."""

    step: int
    """Optimizer steps completed before it."""
    losses: list[list[float]]
    """Rank → micro-batch → loss."""
    was_skipped: bool
    """Whether the optimizer skipped the step because the gradient was not finite."""

    @property
    def loss(self) -> float:
        """Mean over ranks and micro-batches; NaN where one is not finite."""
        if self.non_finite_ranks:
            return math.nan
        return math.fsum(map(math.fsum, self.losses)) / sum(map(len, self.losses))

    @property
    def non_finite_ranks(self) -> list[int]:
        """Ranks with a loss that is not finite."""
        return [rank for rank, losses in enumerate(self.losses) if not all(map(math.isfinite, losses))]


class Anomaly(NamedTuple):
    """What is wrong with a step."""

    kind: str
    first_step: int
    """The first wrong step [optimizer steps completed before it]."""
    score: float = math.nan
    """Of a spike: robust standard deviations above the level before."""
    level: float = math.nan
    """Of a spike: median loss of the steps before."""


class RollbackReason(NamedTuple):
    """Why the run should go back to an older checkpoint."""

    kind: str
    first_step: int
    """The first wrong step [optimizer steps completed before it]."""
    last_step: int


class AnomalyDetector:
    """Takes every step of the run in order.

    Args:
        config: limits and thresholds.

    Attributes:
        rollback_reason: set until `reset`.
    """

    def __init__(self, config: NumericsConfig) -> None:
        self.config = config
        self.rollback_reason: RollbackReason | None = None
        self._in_a_row = self._first_in_a_row = 0
        self._history: deque[float] = deque(maxlen=HISTORY)
        self._recent: deque[tuple[int, float]] = deque()
        self._is_in_spike = False

    def add(self, report: StepReport) -> Anomaly | None:
        """What is wrong with the next step, if anything. A spike is reported once, at the step that completes it."""
        if report.was_skipped or report.non_finite_ranks:
            self._first_in_a_row = self._first_in_a_row if self._in_a_row else report.step
            self._in_a_row += 1
            if self._in_a_row >= self.config.max_skipped_in_a_row:
                self._request_rollback(SKIPPED, self._first_in_a_row, report.step)
            return Anomaly(SKIPPED, report.step)
        self._in_a_row = 0
        spike = self._spike(report.step, report.loss)
        if spike is not None and self.config.on_spike == "rollback":
            self._request_rollback(SPIKE, spike.first_step, report.step)
        return spike

    def _request_rollback(self, kind: str, first_step: int, last_step: int) -> None:
        self.rollback_reason = self.rollback_reason or RollbackReason(kind, first_step, last_step)

    def _spike(self, step: int, loss: float) -> Anomaly | None:
        if loss <= 0:  # has no logarithm
            return None
        self._recent.append((step, math.log(loss)))
        if len(self._recent) > RECENT:
            self._history.append(self._recent.popleft()[1])
        if len(self._history) < MIN_HISTORY or len(self._recent) < RECENT:
            return None
        level = median(self._history)
        sigma = max(_SIGMA_OF_MAD * median(abs(value - level) for value in self._history), _MIN_SIGMA)
        threshold = self.config.spike_threshold
        score = (median(value for _, value in self._recent) - level) / sigma
        was_in_spike, self._is_in_spike = self._is_in_spike, score > threshold
        if was_in_spike or not self._is_in_spike:
            return None
        first = next(step for step, value in self._recent if value > level + threshold * sigma)
        return Anomaly(SPIKE, first, score, math.exp(level))

    def reset(self) -> None:
        """After a rollback: the last steps belong to weights that are gone."""
        self.rollback_reason = None
        self._in_a_row = 0
        self._recent.clear()
        self._is_in_spike = False

    def state(self) -> dict[str, Any]:
        """Plain values for a checkpoint; `load` restores them."""
        return {
            "in_a_row": self._in_a_row,
            "first_in_a_row": self._first_in_a_row,
            "trouble": None if self.rollback_reason is None else list(self.rollback_reason),
            "detector": {
                "history": list(self._history),
                "recent": [[step, value] for step, value in self._recent],
                "is_in_spike": self._is_in_spike,
            },
        }

    def load(self, state: dict[str, Any]) -> None:
        """Continues from a checkpoint."""
        self._in_a_row, self._first_in_a_row = int(state["in_a_row"]), int(state["first_in_a_row"])
        self.rollback_reason = None if state["trouble"] is None else RollbackReason(*state["trouble"])
        spikes = state["detector"]
        self._history = deque(map(float, spikes["history"]), maxlen=HISTORY)
        self._recent = deque((int(step), float(value)) for step, value in spikes["recent"])
        self._is_in_spike = bool(spikes["is_in_spike"])
