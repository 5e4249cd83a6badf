"""What each optimizer step of a run trains on: which data set, which bucket, which samples."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sd_training.data.mixture import Mixture
from sd_training.data.opened import OpenDataset
from sd_training.data.order import SampleOrder


class ChosenSamples(NamedTuple):
    """One optimizer step."""

    dataset: int
    bucket: int
    samples: NDArray[np.int64]
    """[G × factor] samples of the data set's index, in the order of the slots."""


class RunOrder:
    """Looks steps up; a pure function of its arguments."""

    def __init__(self, datasets: Sequence[OpenDataset], orders: Sequence[SampleOrder], mixture: Mixture) -> None:
        self._survivors = [dataset.survivors for dataset in datasets]
        self.orders, self.mixture = list(orders), mixture
        self.positions_per_step = max(int(order.batches.max()) for order in orders)
        """Position of a sample in the run = step × this + slot: a step of small pictures may take more samples than
        others, and no two samples may share a position."""

    def at(self, step: int) -> ChosenSamples:
        """The samples of an optimizer step."""
        dataset, own_step = self.mixture.at(step)
        chosen = self.orders[dataset].at(own_step)
        return ChosenSamples(dataset, chosen.bucket, self._survivors[dataset][chosen.samples])

    def samples_before(self, step: int) -> int:
        """How many samples the steps before `step` took."""
        pairs = enumerate(self.orders)
        return sum(order.samples_before(self.mixture.steps_before(step, number)) for number, order in pairs)
