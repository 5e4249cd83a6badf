"""The order of the samples, and the generators of all random numbers: pure functions of seed and position.

Every bucket is an endless stream: epoch after epoch, in each epoch window after window, in each window its samples
shuffled. Batch t of a bucket is the samples [t·G, (t + 1)·G) of its stream, so nothing is dropped, neither between
windows nor between epochs. A batch belongs to the window in which its last sample lies, and the buckets of a window's
batches are shuffled, so they mix over time. How many batches lie before a window is a sum of floors; therefore any
optimizer step is found by arithmetic, and ranks, workers and accumulation only decide who reads which sample (design
contract 2).

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
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from typing import NamedTuple

import numpy as np
from numpy.random.bit_generator import ISeedSequence
from numpy.typing import DTypeLike, NDArray

from sd_training.config.data_schema import DatasetConfig, DatasetParams, MixEntry
from sd_training.config.plan import counted
from sd_training.data.order.buckets import Buckets
from sd_training.errors import ConfigError

MAX_STREAMS = 64
WINDOW_SAMPLES = 1 << 18
"""Samples that are shuffled with each other when no window is given."""
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
    """[G] samples in the order of the slots: of `SampleOrder` places among the selected ones, of `RunOrder` indices in
    the data set's index."""
    datasets: Samples
    """[G] the data set of each."""


@dataclass(eq=False)
class RunOrder:
    """The samples of every optimizer step of a run.

    Raises:
        ConfigError: some step has no data set.
    """

    shares: Sequence[DatasetConfig | MixEntry]
    """The data sets, whose `weight`, `start_step` and `end_step` decide which steps draw from them."""
    seed: int
    """Of the run."""
    num_steps: int
    """Length of the run."""
    orders: Sequence["SampleOrder"]
    """Of the data sets, over places in `selected`."""
    selected: Sequence[Samples]
    """Of each data set, [n] its selected samples as indices into its index."""
    is_paired: bool = False
    """With two data sets of orders over half a batch: every second slot is the second one's."""

    def __post_init__(self) -> None:
        shares, num_steps = self.shares, self.num_steps
        self.dataset_of: NDArray[np.unsignedinteger] | None = None
        if len(shares) == 1 and shares[0].start_step == 0 and shares[0].end_step is None:
            return  # a long run has many steps, and most have one data set
        self.dataset_of = np.zeros(num_steps, dtype=np.uint8 if len(shares) <= 256 else np.uint32)
        places = (np.arange(num_steps) * _GOLDEN + generator(self.seed, "mixture", 0).random()) % 1.0
        bounds = {0, num_steps, *(s.start_step for s in shares), *(s.end_step or num_steps for s in shares)}
        for first, end in itertools.pairwise(sorted(bound for bound in bounds if bound <= num_steps)):
            active = [i for i, s in enumerate(shares) if s.start_step <= first < (s.end_step or num_steps)]
            if not active:
                raise ConfigError(
                    f"dataset.mix: no data set is drawn from at step {first:,}; give one of them no start_step and no "
                    "end_step"
                )
            limits = np.cumsum([shares[i].weight for i in active])
            chosen = np.searchsorted(limits / limits[-1], places[first:end], side="right")
            self.dataset_of[first:end] = np.array(active)[np.minimum(chosen, len(active) - 1)]
        self._steps_of = [np.flatnonzero(self.dataset_of == dataset) for dataset in range(len(shares))]

    def at(self, step: int) -> StepSamples:
        """The samples of an optimizer step."""
        if self.is_paired:
            halves = [own[order.at(step).samples] for own, order in zip(self.selected, self.orders, strict=True)]
            samples = np.stack(halves, axis=1)
            return StepSamples(self.orders[0].at(step).bucket, samples.ravel(), np.tile([0, 1], len(samples)))
        dataset = 0 if self.dataset_of is None else int(self.dataset_of[step])
        bucket, places, _ = self.orders[dataset].at(self.steps_before(step, dataset))
        return StepSamples(bucket, self.selected[dataset][places], np.full(len(places), dataset))

    def visits(self, dataset: int, sample: int) -> list[tuple[int, int]]:
        """Step and slot of every visit of a sample of a data set's index, ascending: the inverse of `at`. None where it
        is not selected."""
        place = int(np.searchsorted(self.selected[dataset], sample))
        if self.selected[dataset][place : place + 1].tolist() != [sample]:
            return []
        if self.is_paired:
            return [(step, 2 * slot + dataset) for step, slot in self.orders[dataset].visits(place, self.num_steps)]
        own = self.orders[dataset].visits(place, self.steps_before(self.num_steps, dataset))
        if self.dataset_of is None:
            return own
        return [(int(self._steps_of[dataset][step]), slot) for step, slot in own]

    def steps_before(self, step: int, dataset: int) -> int:
        """How many steps before `step` draw from a data set."""
        return step if self.dataset_of is None else int(np.searchsorted(self._steps_of[dataset], step))


class _Epoch(NamedTuple):
    blocks: NDArray[np.int64]
    """Blocks in the order of the epoch."""
    before: NDArray[np.int64]
    """[windows + 1, buckets] samples of the epoch before each window."""


class SampleOrder:
    """The samples of every step of one data set, as places 0..n-1 among its selected samples.

    Args:
        params: `lanes` is C, null the largest divisor of G up to 64 that is a power of two; `window` counts blocks,
            null takes as many as hold 262,144 samples, and at least one per shard stream; with `resampled` the samples
            of a stream are drawn with replacement instead of being shuffled, and a batch may repeat samples.
        seed: of the data set.
        global_batch: G, samples per optimizer step.
        block_of: [n] the block of each selected sample, ascending.
        bucket_of: [n] the bucket of each selected sample.

    Raises:
        ValueError: a bucket in use has fewer samples than one global batch, and repeats are not allowed.
    """

    def __init__(
        self, params: DatasetParams, seed: int, global_batch: int, block_of: NDArray[np.int32], bucket_of: Buckets
    ) -> None:
        self.seed, self.global_batch, self.bucket_of = seed, global_batch, bucket_of
        self.with_replacement = params.resampled
        self.buckets, bucket_index = np.unique(bucket_of, return_inverse=True)
        blocks, block_index = np.unique(block_of, return_inverse=True)
        self._starts = np.searchsorted(block_index, np.arange(len(blocks) + 1))
        flat = block_index.astype(np.int64) * len(self.buckets) + bucket_index
        self._counts = np.bincount(flat, minlength=len(blocks) * len(self.buckets)).reshape(len(blocks), -1)
        self.sizes = self._counts.sum(axis=0)
        if not self.with_replacement and (fewest := int(self.sizes.min())) < global_batch:
            raise ValueError(f"a bucket has {counted(fewest, 'sample')}, fewer than the {global_batch} of a step")
        per_block = max(1, len(block_of) // len(self._counts))
        self.num_streams = params.lanes or gcd(global_batch, MAX_STREAMS)
        self.window = params.window or max(self.num_streams, -(-WINDOW_SAMPLES // per_block))
        self._epoch = lru_cache(_EPOCHS_KEPT)(self._make_epoch)
        self._batches = lru_cache(1)(self._shuffled_batches)
        self._window_samples = lru_cache(_WINDOWS_KEPT * len(self.buckets))(self._shuffled_samples)

    def at(self, step: int) -> StepSamples:
        """The samples of a step; its epoch and window are found by bisection over sums of floors."""
        batch_size = self.global_batch
        beyond = (step + len(self.buckets)) * batch_size // len(self.bucket_of) + 2
        epoch = bisect_right(range(beyond), step, key=lambda e: int((e * self.sizes // batch_size).sum())) - 1
        batches_before = ((epoch * self.sizes + self._epoch(epoch).before) // batch_size).sum(axis=1)
        window = int(np.searchsorted(batches_before, step, side="right")) - 1
        bucket, batch = self._batches(epoch, window)[step - batches_before[window]].tolist()
        start, wanted, parts = batch * batch_size, batch_size, list[Samples]()
        while wanted:  # a batch may span windows and epochs
            epoch, offset = divmod(start, int(self.sizes[bucket]))
            before = self._epoch(epoch).before[:, bucket]
            window = int(np.searchsorted(before, offset, side="right")) - 1
            offset -= int(before[window])
            parts.append(self._window_samples(epoch, window, bucket)[offset : offset + wanted])
            start, wanted = start + len(parts[-1]), wanted - len(parts[-1])
        samples = np.concatenate(parts)
        return StepSamples(int(self.buckets[bucket]), samples, np.zeros_like(samples))

    def visits(self, place: int, num_steps: int) -> list[tuple[int, int]]:
        """Step and slot of every visit of a sample before step `num_steps`, ascending; the inverse of `at`.

        Of each epoch only the window is shuffled in which the sample's block comes: the place where it then stands is a
        place in the stream of its bucket, which says the batch.
        """
        batch_size, found = self.global_batch, list[tuple[int, int]]()
        bucket = int(np.searchsorted(self.buckets, self.bucket_of[place]))
        block = int(np.searchsorted(self._starts, place, side="right")) - 1
        epoch = 0
        while int((epoch * self.sizes // batch_size).sum()) < num_steps:  # the batches that end in the epochs before
            blocks, before = self._epoch(epoch)
            window = int(np.flatnonzero(blocks == block)[0]) // self.window
            # With replacement a sample may come several times in an epoch, or not at all.
            offsets = np.flatnonzero(self._window_samples(epoch, window, bucket) == place)
            start = epoch * int(self.sizes[bucket]) + int(before[window, bucket])
            for offset in offsets.tolist():
                batch, slot = divmod(start + offset, batch_size)
                found.append((self._step_of(bucket, batch), slot))
            epoch += 1
        return [(step, slot) for step, slot in found if step < num_steps]

    def _step_of(self, bucket: int, batch: int) -> int:
        """The step that takes a batch of a bucket: the inverse of what `at` begins with."""
        epoch, offset = divmod((batch + 1) * self.global_batch - 1, int(self.sizes[bucket]))
        before = self._epoch(epoch).before
        window = int(np.searchsorted(before[:, bucket], offset, side="right")) - 1
        earlier = int(((epoch * self.sizes + before[window]) // self.global_batch).sum())
        return earlier + int(np.flatnonzero((self._batches(epoch, window) == (bucket, batch)).all(axis=1))[0])

    def _make_epoch(self, epoch: int) -> _Epoch:
        blocks = generator(self.seed, "order of blocks", epoch).permutation(len(self._counts))
        ends = np.append(np.arange(self.window, len(blocks), self.window), len(blocks))
        sums = np.cumsum(self._counts[blocks], axis=0)[ends - 1]
        return _Epoch(blocks, np.concatenate([np.zeros_like(sums[:1]), sums]))

    def _shuffled_batches(self, epoch: int, window: int) -> NDArray[np.int64]:
        """[k, 2] bucket and number of every batch that ends in the window: buckets mixed, numbers ascending."""
        done = (epoch * self.sizes + self._epoch(epoch).before[window : window + 2]) // self.global_batch
        buckets = np.repeat(np.arange(len(self.sizes)), done[1] - done[0])
        buckets = generator(self.seed, f"order of batches {window}", epoch).permutation(buckets)
        numbers = np.empty_like(buckets)
        for bucket, (first, end) in enumerate(done.T):
            numbers[buckets == bucket] = np.arange(first, end)
        return np.stack([buckets, numbers], axis=1)

    def _shuffled_samples(self, epoch: int, window: int, bucket: int) -> Samples:
        """The bucket's samples of a window in the order of its stream."""
        streams, batch_size = self.num_streams, self.global_batch
        blocks = self._epoch(epoch).blocks[window * self.window : (window + 1) * self.window]
        chance = generator(self.seed, f"order of samples {window} {bucket}", epoch)
        own = list[Samples]()
        for stream in range(min(streams, len(blocks))):
            ranges = [np.arange(self._starts[block], self._starts[block + 1]) for block in blocks[stream::streams]]
            samples = np.concatenate(ranges)
            samples = samples[self.bucket_of[samples] == self.buckets[bucket]]
            if self.with_replacement:
                own.append(samples[chance.integers(max(1, len(samples)), size=len(samples))])
            else:
                own.append(chance.permutation(samples))
        start = epoch * int(self.sizes[bucket]) + int(self._epoch(epoch).before[window, bucket])
        stream_of = np.arange(start, start + sum(map(len, own))) % batch_size * streams // batch_size
        filled, left = np.full(len(stream_of), -1, dtype=np.int64), []
        for stream, samples in enumerate(own):
            places = np.flatnonzero(stream_of == stream)[: len(samples)]
            filled[places] = samples[: len(places)]
            left.append(samples[len(places) :])
        filled[filled < 0] = chance.permutation(np.concatenate(left))
        return filled


class _Key(ISeedSequence):
    """Passes its 128-bit key to Philox unchanged. `Philox(key=…)` would first gather entropy it does not use: 5 µs."""

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
