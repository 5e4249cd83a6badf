"""Which data set each optimizer step draws from, when there are several.

Step k takes the data set in whose share of [0, 1) the number k·φ mod 1 falls (φ the golden ratio). Such a sequence
comes as close to the weights after any number of steps as a sequence can, up to a factor (Kuipers & Niederreiter,
Uniform Distribution of Sequences, 1974, ch. 2.3), and is a pure function of the step.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sd_training.data.draws import generator
from sd_training.errors import ConfigError

_GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True)
class Share:
    """When and how often a data set is drawn from."""

    weight: float
    start_step: int = 0
    end_step: int | None = None
    """The first step that does not draw from it; None: the end of the run."""


class Mixture:
    """Looks up the data set of a step, and how many steps have drawn from it before.

    Args:
        shares: of the data sets.
        seed: of the run.
        num_steps: length of the run.

    Raises:
        ConfigError: some step has no data set.
    """

    def __init__(self, shares: Sequence[Share], seed: int, num_steps: int) -> None:
        self.num_steps = num_steps
        self.dataset_of: NDArray[np.unsignedinteger] | None = None
        if len(shares) == 1 and shares[0].start_step == 0 and shares[0].end_step is None:
            return  # a long run has many steps, and most have one data set
        steps = np.arange(num_steps, dtype=np.int64)
        self.dataset_of = np.zeros(num_steps, dtype=np.uint8 if len(shares) <= 256 else np.uint32)
        places = (steps * _GOLDEN + generator(seed, "mixture", 0).random()) % 1.0
        bounds = sorted({0, num_steps, *(s.start_step for s in shares), *(s.end_step or num_steps for s in shares)})
        for first, end in itertools.pairwise(bounds):
            if first < num_steps:
                self.dataset_of[first:end] = _choose(shares, first, places[first:end])
        self.own_step = np.zeros(num_steps, dtype=np.int64)
        self._steps_of = [np.flatnonzero(self.dataset_of == dataset) for dataset in range(len(shares))]
        for mine in self._steps_of:
            self.own_step[mine] = np.arange(len(mine))

    def at(self, step: int) -> tuple[int, int]:
        """The data set of `step`, and the number of earlier steps that drew from it."""
        if self.dataset_of is None:
            return 0, step
        return int(self.dataset_of[step]), int(self.own_step[step])

    def steps_before(self, step: int, dataset: int) -> int:
        """How many steps before `step` drew from a data set."""
        return step if self.dataset_of is None else int(np.searchsorted(self._steps_of[dataset], step))

    def counts(self, num_datasets: int) -> list[int]:
        """Steps of the run that draw from each data set."""
        if self.dataset_of is None:
            return [self.num_steps]
        return [int(count) for count in np.bincount(self.dataset_of, minlength=num_datasets)]


def _choose(shares: Sequence[Share], step: int, places: np.ndarray) -> np.ndarray:
    active = [i for i, s in enumerate(shares) if s.start_step <= step and (s.end_step is None or step < s.end_step)]
    if not active:
        raise ConfigError(
            f"dataset.mix: no data set is drawn from at step {step:,}; give one of them no start_step and no end_step"
        )
    limits = np.cumsum([shares[i].weight for i in active])
    chosen = np.searchsorted(limits / limits[-1], places, side="right")
    return np.array(active)[np.minimum(chosen, len(active) - 1)]
