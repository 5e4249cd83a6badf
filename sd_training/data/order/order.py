"""The order of the samples, and the generators of all random numbers: pure functions of seed and position.

Every bucket is an endless stream: epoch after epoch, in each epoch window after window, in each window its samples
shuffled. Batch t of a bucket is the samples [t·G, (t + 1)·G) of its stream, so nothing is dropped, neither between
windows nor between epochs; a bucket of small pictures may take a multiple of G. A batch belongs to the window in which
its last sample lies, and the buckets of a window's batches are shuffled, so they mix over time. How many batches lie
before a window is a sum of floors; therefore any optimizer step is found by arithmetic, and ranks, workers and
accumulation only decide who reads which sample (design contract 2).

A window is a fixed number of blocks (shards, row groups) in the shuffled order of its epoch. Its blocks are distributed
over C shard streams (`dataset.params.lanes`); stream l fills the slots [l·G/C, (l + 1)·G/C) of each batch from its own
blocks as long as they last, so that a rank reads from few shards at a time. A stream that has run out is filled from
the others.

With several data sets, step k takes the one in whose share of [0, 1) the number k·φ mod 1 falls (φ the golden ratio).
Such a sequence stays as close to the weights after any number of steps as a sequence can, up to a factor (Kuipers &
Niederreiter, Uniform Distribution of Sequences, 1974, ch. 2.3).
"""

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from typing import NamedTuple

import numpy as np
from numpy.random.bit_generator import ISeedSequence
from numpy.typing import DTypeLike, NDArray

from sd_training.config.data_schema import DatasetConfig, MixEntry
from sd_training.config.plan import BatchPlan, counted
from sd_training.errors import ConfigError

MAX_STREAMS = 64
WINDOW_SAMPLES = 1 << 18
"""Samples that are shuffled with each other when no window is asked for."""
_WINDOWS_KEPT = 4
"""Per bucket."""
_EPOCHS_KEPT = 3
_GOLDEN = (5**0.5 - 1) / 2
_POSITION_BITS = 48

Samples = NDArray[np.int64]


class StepSamples(NamedTuple):
    """What one optimizer step trains on."""

    bucket: int
    samples: Samples
    """[G × factor] samples in the order of the slots: of `SampleOrder` places among the selected ones, of `RunOrder`
    indices into the data set's index."""
    dataset: int = 0


class MixtureSchedule:
    """Looks up the data set of a step, and how many steps have drawn from it before.

    Args:
        shares: the data sets, whose `weight`, `start_step` and `end_step` count.
        seed: of the run.
        num_steps: length of the run.

    Raises:
        ConfigError: some step has no data set.
    """

    def __init__(self, shares: Sequence[DatasetConfig | MixEntry], seed: int, num_steps: int) -> None:
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
        for steps_of_one in self._steps_of:
            self.own_step[steps_of_one] = np.arange(len(steps_of_one))

    def at(self, step: int) -> tuple[int, int]:
        """The data set of `step`, and the number of earlier steps that drew from it."""
        if self.dataset_of is None:
            return 0, step
        return int(self.dataset_of[step]), int(self.own_step[step])

    def steps_before(self, step: int, dataset: int) -> int:
        """How many steps before `step` drew from a data set."""
        return step if self.dataset_of is None else int(np.searchsorted(self._steps_of[dataset], step))


def _choose(shares: Sequence[DatasetConfig | MixEntry], step: int, places: np.ndarray) -> np.ndarray:
    active = [i for i, s in enumerate(shares) if s.start_step <= step and (s.end_step is None or step < s.end_step)]
    if not active:
        raise ConfigError(
            f"dataset.mix: no data set is drawn from at step {step:,}; give one of them no start_step and no end_step"
        )
    limits = np.cumsum([shares[i].weight for i in active])
    chosen = np.searchsorted(limits / limits[-1], places, side="right")
    return np.array(active)[np.minimum(chosen, len(active) - 1)]


class RunOrder:
    """The samples of every optimizer step of a run.

    Args:
        selected: of each data set, [n] its selected samples as indices into its index.
        orders: of the same data sets, over places in `selected`.
        mixture: which data set each step draws from.
    """

    def __init__(self, selected: Sequence[Samples], orders: Sequence["SampleOrder"], mixture: MixtureSchedule) -> None:
        self._selected, self.orders, self.mixture = list(selected), list(orders), mixture
        self.positions_per_step = max(int(order.batch_sizes.max()) for order in orders)
        """Position of a sample in the run = step × this + slot: a step of small pictures may take more samples than
        others, and no two samples may share a position."""

    def at(self, step: int) -> StepSamples:
        """The samples of an optimizer step."""
        dataset, own_step = self.mixture.at(step)
        bucket, places, _ = self.orders[dataset].at(own_step)
        return StepSamples(bucket, self._selected[dataset][places], dataset)

    def samples_before(self, step: int) -> int:
        """How many samples the steps before `step` took."""
        pairs = enumerate(self.orders)
        return sum(order.samples_before(self.mixture.steps_before(step, number)) for number, order in pairs)


def slots(micro_index: int, rank: int, plan: BatchPlan, factor: int = 1) -> range:
    """Which of a step's samples belong to one micro-batch.

    A rank reads neighbouring slots, those of its shard streams, whatever its accumulation is.

    Args:
        micro_index: which micro-batch of the step, in 0..accumulation-1.
        rank: of this process among `plan.processes`.
        factor: how many times the usual samples the step takes.
    """
    count = plan.micro_batch * factor
    first = (rank * plan.accumulation + micro_index) * count
    return range(first, first + count)


@dataclass(frozen=True)
class OrderSettings:
    """Everything besides the samples that decides the order of one data set."""

    seed: int
    global_batch: int
    """G: samples per optimizer step."""
    shard_streams: int | None = None
    """C; None takes the largest divisor of G up to 64 that is a power of two."""
    window: int | None = None
    """Blocks per window; None takes as many as hold 262,144 samples, and at least one per shard stream."""
    with_replacement: bool = False
    """Draw the samples of a stream with replacement instead of shuffling them; a batch may then repeat samples."""
    factors: tuple[int, ...] = ()
    """Of each bucket: how many times G samples a step of it takes; empty is once for all of them."""

    @property
    def num_streams(self) -> int:
        """C as it is used."""
        return self.shard_streams or gcd(self.global_batch, MAX_STREAMS)


class _Epoch(NamedTuple):
    blocks: NDArray[np.int64]
    """Blocks in the order of the epoch."""
    before: NDArray[np.int64]
    """[windows + 1, buckets] samples of the epoch before each window."""


class SampleOrder:
    """The samples of every step of one data set, as places 0..n-1 among its selected samples.

    Args:
        settings: seed, batch and locality.
        block_of: [n] the block of each selected sample, ascending.
        bucket_of: [n] the bucket of each selected sample.

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
        self.batch_sizes = settings.global_batch * factors.astype(np.int64)
        if not settings.with_replacement and (self.sizes < self.batch_sizes).any():
            scarce = int(np.argmin(self.sizes - self.batch_sizes))
            raise ValueError(
                f"a bucket has {counted(int(self.sizes[scarce]), 'sample')}, fewer than the "
                f"{self.batch_sizes[scarce]} of a step"
            )
        per_block = max(1, len(block_of) // len(self._counts))
        self.window = settings.window or max(settings.num_streams, -(-WINDOW_SAMPLES // per_block))
        self._epoch = lru_cache(_EPOCHS_KEPT)(self._make_epoch)
        self._batches = lru_cache(1)(self._shuffled_batches)
        self._window_samples = lru_cache(_WINDOWS_KEPT * len(self.buckets))(self._shuffled_samples)

    def at(self, step: int) -> StepSamples:
        """The samples of a step."""
        epoch, window = self._locate(step)
        bucket, batch = self._batches(epoch, window)[step - self._batches_before(epoch, window)]
        size = int(self.batch_sizes[bucket])
        first, parts = batch * size, list[Samples]()
        while (wanted := size - sum(map(len, parts))) > 0:
            parts.append(self._stream(bucket, first + size - wanted, wanted))
        return StepSamples(int(self.buckets[bucket]), np.concatenate(parts))

    def samples_before(self, step: int) -> int:
        """How many samples the steps before `step` took."""
        if (self.batch_sizes == self.settings.global_batch).all():
            return step * self.settings.global_batch
        epoch, window = self._locate(step)
        done = (epoch * self.sizes + self._epoch(epoch).before[window]) // self.batch_sizes
        begun = self._batches(epoch, window)[: step - int(done.sum()), 0]
        return int(done @ self.batch_sizes + self.batch_sizes[begun].sum())

    def _locate(self, step: int) -> tuple[int, int]:
        """Epoch and window of a step, by bisection over sums of floors."""
        low, high = 0, (step + len(self.buckets)) * int(self.batch_sizes.max()) // int(self.sizes.sum()) + 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._batches_before(middle, 0) <= step else (low, middle)
        full = (low * self.sizes + self._epoch(low).before) // self.batch_sizes
        return low, int(np.searchsorted(full.sum(axis=1), step, side="right")) - 1

    def _batches_before(self, epoch: int, window: int) -> int:
        before = self._epoch(epoch).before[window] if window else 0
        return int(((epoch * self.sizes + before) // self.batch_sizes).sum())

    def _stream(self, bucket: int, start: int, count: int) -> Samples:
        """Up to `count` samples of the bucket's stream from `start` on: those in the window of `start`."""
        epoch, offset = divmod(start, int(self.sizes[bucket]))
        before = self._epoch(epoch).before[:, bucket]
        window = int(np.searchsorted(before, offset, side="right")) - 1
        offset -= int(before[window])
        return self._window_samples(epoch, window, bucket)[offset : offset + count]

    def _make_epoch(self, epoch: int) -> _Epoch:
        blocks = generator(self.settings.seed, "order of blocks", epoch).permutation(len(self._counts))
        ends = np.append(np.arange(self.window, len(blocks), self.window), len(blocks))
        sums = np.cumsum(self._counts[blocks], axis=0)[ends - 1]
        return _Epoch(blocks, np.concatenate([np.zeros_like(sums[:1]), sums]))

    def _shuffled_batches(self, epoch: int, window: int) -> NDArray[np.int64]:
        """[k, 2] bucket and number of every batch that ends in the window: buckets mixed, numbers ascending."""
        before = self._epoch(epoch).before
        done = (epoch * self.sizes + before[window : window + 2]) // self.batch_sizes
        buckets = np.repeat(np.arange(len(self.sizes)), done[1] - done[0])
        buckets = generator(self.settings.seed, f"order of batches {window}", epoch).permutation(buckets)
        numbers = np.empty_like(buckets)
        for bucket, (first, end) in enumerate(done.T):
            numbers[buckets == bucket] = np.arange(first, end)
        return np.stack([buckets, numbers], axis=1)

    def _shuffled_samples(self, epoch: int, window: int, bucket: int) -> Samples:
        """The bucket's samples of a window in the order of its stream."""
        streams, size = self.settings.num_streams, int(self.batch_sizes[bucket])
        blocks = self._epoch(epoch).blocks[window * self.window : (window + 1) * self.window]
        chance = generator(self.settings.seed, f"order of samples {window} {bucket}", epoch)
        own = [self._shuffled(blocks[stream::streams], bucket, chance) for stream in range(min(streams, len(blocks)))]
        total = sum(map(len, own))
        start = epoch * int(self.sizes[bucket]) + int(self._epoch(epoch).before[window, bucket])
        stream_of = (np.arange(start, start + total) % size) * streams // size
        filled, left = np.full(total, -1, dtype=np.int64), []
        for stream, samples in enumerate(own):
            places = np.flatnonzero(stream_of == stream)[: len(samples)]
            filled[places] = samples[: len(places)]
            left.append(samples[len(places) :])
        filled[filled < 0] = chance.permutation(np.concatenate([*left, np.empty(0, dtype=np.int64)]))
        return filled

    def _shuffled(self, blocks: NDArray[np.int64], bucket: int, chance: np.random.Generator) -> Samples:
        """The bucket's samples in these blocks."""
        ranges = [np.arange(self._starts[block], self._starts[block + 1]) for block in blocks]
        samples = np.concatenate(ranges) if ranges else np.empty(0, dtype=np.int64)
        samples = samples[self.bucket_of[samples] == self.buckets[bucket]]
        if self.settings.with_replacement:
            return samples[chance.integers(max(1, len(samples)), size=len(samples))]
        return chance.permutation(samples)


class _Key(ISeedSequence):
    """Passes its 128-bit key to Philox unchanged. `Philox(key=…)` would first gather entropy it does not use: 10 µs."""

    __slots__ = ("words",)

    def __init__(self, high: int, low: int) -> None:
        self.words = np.array((high, low), dtype=np.uint64)

    def generate_state(self, n_words: int, dtype: DTypeLike = np.uint32) -> NDArray[np.uint64]:
        return self.words


@lru_cache(maxsize=1024)
def _key_of(seed: int, purpose: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}:{purpose}".encode(), digest_size=8).digest(), "big")


def generator(seed: int, purpose: str, position: int, attempt: int = 0) -> np.random.Generator:
    """A generator of its own for each (seed, purpose, position, attempt); equal arguments give equal bits (design
    contract 3).

    Args:
        seed: of the run.
        purpose: what is drawn, for example `crop`.
        position: of the sample in the global order of the run, or an epoch number; below 2^48.
        attempt: below 2^16, for draws that are repeated.
    """
    low = position | attempt << _POSITION_BITS
    return np.random.Generator(np.random.Philox(_Key(_key_of(seed, purpose), low)))  # type: ignore[arg-type]
