"""The order of the samples: a pure function of index, buckets, seed and global batch (design contract 2).

Every bucket is an endless stream: epoch after epoch, in each epoch window after window, in each window its samples
shuffled. Batch t of a bucket is the samples [t·G, (t + 1)·G) of its stream, so nothing is dropped, neither between
windows nor between epochs; a bucket of small pictures may take a multiple of G. A batch belongs to the window in which
its last sample lies, and the buckets of a window's batches are shuffled, so they mix over time. How many batches lie
before a window is a sum of floors; therefore any optimizer step is found by arithmetic, and ranks, workers and
accumulation only decide who reads which sample.

A window is a fixed number of blocks (shards, row groups) in the shuffled order of its epoch. Its blocks are dealt to
lanes, and lane l of C fills the slots [l·G/C, (l + 1)·G/C) of each batch from its own blocks as long as they last, so
that a rank reads from few shards at a time. A lane that has run out is fed from the others.
"""

from collections import OrderedDict
from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sd_training.config.batch_plan import BatchPlan, counted
from sd_training.data.draws import generator

MAX_LANES = 64
WINDOW_SAMPLES = 1 << 18
"""Samples that are shuffled with each other when no window is asked for."""
_WINDOWS_KEPT = 4
_EPOCHS_KEPT = 3

Samples = NDArray[np.int64]


class StepSamples(NamedTuple):
    """What one optimizer step trains on."""

    bucket: int
    samples: Samples
    """[G × factor] indices into the survivors, in the order of the slots."""


@dataclass(frozen=True)
class OrderSettings:
    """Everything besides the samples that decides the order."""

    seed: int
    global_batch: int
    """G: samples per optimizer step."""
    lanes: int | None = None
    """C; None takes the largest divisor of G up to 64 that is a power of two."""
    window: int | None = None
    """Blocks per window; None takes as many as hold 262,144 samples, and at least one per lane."""
    with_replacement: bool = False
    """Draw the samples of a lane with replacement instead of shuffling them; a batch may then repeat samples."""
    factors: tuple[int, ...] = ()
    """Of each bucket: how many times G samples a step of it takes; empty is once for all of them."""

    @property
    def num_lanes(self) -> int:
        """C as it is used."""
        return self.lanes or gcd(self.global_batch, MAX_LANES)


class _Epoch(NamedTuple):
    blocks: NDArray[np.int64]
    """Blocks in the order of the epoch."""
    before: NDArray[np.int64]
    """[windows + 1, buckets] samples of the epoch before each window."""


class SampleOrder:
    """Looks steps up.

    Args:
        settings: seed, batch and locality.
        block_of: [n] the block of each survivor, ascending.
        bucket_of: [n] the bucket of each survivor.

    Raises:
        ValueError: a bucket in use has fewer samples than one global batch, and repeats were not asked for.
    """

    def __init__(self, settings: OrderSettings, block_of: NDArray[np.int32], bucket_of: NDArray[np.int32]) -> None:
        self.settings, self.bucket_of = settings, bucket_of
        self.buckets, bucket_index = np.unique(bucket_of, return_inverse=True)
        blocks, block_index = np.unique(block_of, return_inverse=True)
        self._starts = np.searchsorted(block_index, np.arange(len(blocks) + 1))
        flat = block_index.astype(np.int64) * len(self.buckets) + bucket_index
        self._counts = np.bincount(flat, minlength=len(blocks) * len(self.buckets)).reshape(len(blocks), -1)
        self.sizes = self._counts.sum(axis=0)
        factors = np.array(settings.factors)[self.buckets] if settings.factors else np.ones_like(self.sizes)
        self.batches = settings.global_batch * factors.astype(np.int64)
        if not settings.with_replacement and (self.sizes < self.batches).any():
            scarce = int(np.argmin(self.sizes - self.batches))
            raise ValueError(
                f"a bucket has {counted(int(self.sizes[scarce]), 'sample')}, fewer than the "
                f"{self.batches[scarce]} of a step"
            )
        self.window = settings.window or self._default_window(len(block_of))
        self._epochs: OrderedDict[int, _Epoch] = OrderedDict()
        self._windows: OrderedDict[tuple[int, int, int], Samples] = OrderedDict()
        self._shuffled_batches: tuple[tuple[int, int], NDArray[np.int64]] | None = None

    def _default_window(self, num_samples: int) -> int:
        per_block = max(1, num_samples // len(self._counts))
        return max(self.settings.num_lanes, -(-WINDOW_SAMPLES // per_block))

    def at(self, step: int) -> StepSamples:
        """The samples of an optimizer step."""
        epoch, window = self._locate(step)
        bucket, batch = self._batches(epoch, window)[step - self._batches_before(epoch, window)]
        size = int(self.batches[bucket])
        first, parts = batch * size, list[Samples]()
        while (wanted := size - sum(map(len, parts))) > 0:
            parts.append(self._stream(bucket, first + size - wanted, wanted))
        return StepSamples(int(self.buckets[bucket]), np.concatenate(parts))

    def samples_before(self, step: int) -> int:
        """How many samples the steps before `step` took."""
        if (self.batches == self.settings.global_batch).all():
            return step * self.settings.global_batch
        epoch, window = self._locate(step)
        done = (epoch * self.sizes + self._epoch(epoch).before[window]) // self.batches
        begun = self._batches(epoch, window)[: step - int(done.sum()), 0]
        return int(done @ self.batches + self.batches[begun].sum())

    def _locate(self, step: int) -> tuple[int, int]:
        """Epoch and window of a step, by bisection over sums of floors."""
        low, high = 0, (step + len(self.buckets)) * int(self.batches.max()) // int(self.sizes.sum()) + 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._batches_before(middle, 0) <= step else (low, middle)
        full = (low * self.sizes + self._epoch(low).before) // self.batches
        return low, int(np.searchsorted(full.sum(axis=1), step, side="right")) - 1

    def _batches_before(self, epoch: int, window: int) -> int:
        before = self._epoch(epoch).before[window] if window else 0
        return int(((epoch * self.sizes + before) // self.batches).sum())

    def _batches(self, epoch: int, window: int) -> NDArray[np.int64]:
        """[k, 2] bucket and number of every batch that ends in the window: buckets mixed, numbers ascending."""
        if self._shuffled_batches is None or self._shuffled_batches[0] != (epoch, window):
            self._shuffled_batches = (epoch, window), self._shuffle_batches(epoch, window)
        return self._shuffled_batches[1]

    def _shuffle_batches(self, epoch: int, window: int) -> NDArray[np.int64]:
        before = self._epoch(epoch).before
        done = (epoch * self.sizes + before[window : window + 2]) // self.batches
        buckets = np.repeat(np.arange(len(self.sizes)), done[1] - done[0])
        buckets = generator(self.settings.seed, f"order of batches {window}", epoch).permutation(buckets)
        numbers = np.empty_like(buckets)
        for bucket, (first, end) in enumerate(done.T):
            numbers[buckets == bucket] = np.arange(first, end)
        return np.stack([buckets, numbers], axis=1)

    def _stream(self, bucket: int, start: int, count: int) -> Samples:
        """Up to `count` samples of the bucket's stream from `start` on: those in the window of `start`."""
        epoch, offset = divmod(start, int(self.sizes[bucket]))
        before = self._epoch(epoch).before[:, bucket]
        window = int(np.searchsorted(before, offset, side="right")) - 1
        offset -= int(before[window])
        return self._window_samples(epoch, window, bucket)[offset : offset + count]

    def _epoch(self, epoch: int) -> _Epoch:
        if epoch not in self._epochs:
            blocks = generator(self.settings.seed, "order of blocks", epoch).permutation(len(self._counts))
            ends = np.append(np.arange(self.window, len(blocks), self.window), len(blocks))
            sums = np.cumsum(self._counts[blocks], axis=0)[ends - 1]
            self._epochs[epoch] = _Epoch(blocks, np.concatenate([np.zeros_like(sums[:1]), sums]))
            while len(self._epochs) > _EPOCHS_KEPT:
                self._epochs.popitem(last=False)
        return self._epochs[epoch]

    def _window_samples(self, epoch: int, window: int, bucket: int) -> Samples:
        """The bucket's samples of a window in the order of its stream."""
        key = (epoch, window, bucket)
        if key not in self._windows:
            self._windows[key] = self._deal(epoch, window, bucket)
            while len(self._windows) > _WINDOWS_KEPT * len(self.buckets):
                self._windows.popitem(last=False)
        return self._windows[key]

    def _deal(self, epoch: int, window: int, bucket: int) -> Samples:
        lanes, size = self.settings.num_lanes, int(self.batches[bucket])
        blocks = self._epoch(epoch).blocks[window * self.window : (window + 1) * self.window]
        chance = generator(self.settings.seed, f"order of samples {window} {bucket}", epoch)
        own = [self._shuffled(blocks[lane::lanes], bucket, chance) for lane in range(min(lanes, len(blocks)))]
        total = sum(map(len, own))
        start = epoch * int(self.sizes[bucket]) + int(self._epoch(epoch).before[window, bucket])
        wanted = (np.arange(start, start + total) % size) * lanes // size
        return _fill(wanted, own, chance)

    def _shuffled(self, blocks: NDArray[np.int64], bucket: int, chance: np.random.Generator) -> Samples:
        """The bucket's samples in these blocks."""
        ranges = [np.arange(self._starts[block], self._starts[block + 1]) for block in blocks]
        samples = np.concatenate(ranges) if ranges else np.empty(0, dtype=np.int64)
        samples = samples[self.bucket_of[samples] == self.buckets[bucket]]
        if self.settings.with_replacement:
            return samples[chance.integers(max(1, len(samples)), size=len(samples))]
        return chance.permutation(samples)


def _fill(wanted: NDArray[np.int64], own: list[Samples], chance: np.random.Generator) -> Samples:
    """Gives each place a sample of the lane it wants, and the places of lanes that ran out what is left over."""
    filled = np.full(len(wanted), -1, dtype=np.int64)
    left = []
    for lane, samples in enumerate(own):
        places = np.flatnonzero(wanted == lane)[: len(samples)]
        filled[places] = samples[: len(places)]
        left.append(samples[len(places) :])
    pool = np.concatenate([*left, np.empty(0, dtype=np.int64)])
    filled[filled < 0] = chance.permutation(pool)
    return filled


def slots(micro_index: int, rank: int, plan: BatchPlan, factor: int = 1) -> range:
    """Which of a step's samples belong to one micro-batch.

    A rank reads neighbouring slots, those of its lanes, whatever its accumulation is.

    Args:
        micro_index: which micro-batch of the step, in 0..accumulation-1.
        rank: of this process among `plan.processes`.
        factor: how many times the usual samples the step takes.
    """
    count = plan.micro_batch * factor
    first = (rank * plan.accumulation + micro_index) * count
    return range(first, first + count)
