"""The order of the samples: a pure function of seed, epoch and number of samples (design contract 2).

Position p of the whole run is in epoch p // n and is the (p % n)-th entry of that epoch's permutation. Optimizer step k
holds the positions [k·G, (k + 1)·G) of a global batch of G, so a batch may span two epochs and nothing is dropped.
Ranks, workers and accumulation only decide who reads which of these positions.
"""

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from sd_training.config.batch_plan import BatchPlan
from sd_training.data.draws import generator

_EPOCHS_KEPT = 2


def permutation(seed: int, epoch: int, n: int) -> NDArray[np.int64]:
    """[n] order of the samples in `epoch`."""
    return generator(seed, "order", epoch).permutation(n)


class EpochOrder:
    """Looks positions up; the permutations of the last two epochs are kept.

    Args:
        seed: of the run.
        n: samples per epoch; at least 1.
    """

    def __init__(self, seed: int, n: int) -> None:
        self.seed, self.n = seed, n
        self._epochs: OrderedDict[int, NDArray[np.int64]] = OrderedDict()

    def sample_at(self, position: int) -> int:
        """Which of the n samples is at `position` of the run."""
        epoch, index = divmod(position, self.n)
        return int(self._order_of(epoch)[index])

    def _order_of(self, epoch: int) -> NDArray[np.int64]:
        if epoch not in self._epochs:
            self._epochs[epoch] = permutation(self.seed, epoch, self.n)
            if len(self._epochs) > _EPOCHS_KEPT:
                self._epochs.popitem(last=False)
        return self._epochs[epoch]


def slots(step: int, micro_index: int, rank: int, world: int, plan: BatchPlan) -> range:
    """Positions of one micro-batch.

    Args:
        step: optimizer step.
        micro_index: which micro-batch of the step, in 0..accumulation-1.
        rank: of this process among `world`.
    """
    first = step * plan.global_batch + (micro_index * world + rank) * plan.micro_batch
    return range(first, first + plan.micro_batch)
