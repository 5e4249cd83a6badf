"""Finds loss spikes: a level that jumped, not one unlucky batch.

The loss of a step of a diffusion model is noisy, with heavy tails, and falls over the run; its logarithm is about
symmetric around a slow trend. So the median of the last `RECENT` log losses is compared with the median of the
`HISTORY` before them, in units of their median absolute deviation. Fewer than half of `RECENT` outliers never count.
"""

import math
from collections import deque
from statistics import median
from typing import Any, NamedTuple

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
