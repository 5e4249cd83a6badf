import itertools
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from sd_training.config.data_schema import DatasetParams
from sd_training.data.order.order import SampleOrder, StepSamples

GLOBAL_BATCH = 8


def make_order(
    per_block: int = 10,
    blocks: int = 6,
    buckets: int = 1,
    seed: int = 3,
    global_batch: int = GLOBAL_BATCH,
    **locality: Any,
) -> SampleOrder:
    """Blocks of equal size; sample i is in bucket i % buckets."""
    samples = np.arange(per_block * blocks, dtype=np.int32)
    params = DatasetParams(path=".", **locality)
    return SampleOrder(params, seed, global_batch, samples // per_block, samples % buckets)


def sequence(order: SampleOrder, steps: int) -> list[StepSamples]:
    return [order.at(step) for step in range(steps)]


def visits(batches: list[StepSamples], n: int) -> NDArray[np.int64]:
    """[n] how often each sample was seen."""
    return np.bincount(np.concatenate([batch.samples for batch in batches]), minlength=n)


CASES = [
    {},
    {"buckets": 3},
    {"window": 2, "lanes": 2},
    {"buckets": 2, "window": 4, "lanes": 4},
    {"lanes": 8, "window": 3},
]


@pytest.mark.parametrize("case", CASES)
def test_every_sample_once_per_epoch(case: dict[str, int]) -> None:
    # 60 samples in batches of 8: after 15 steps the two first epochs are over, but for what buckets have begun.
    order = make_order(**case)
    for steps in (15, 30, 45):
        seen = visits(sequence(order, steps), 60)
        assert abs(seen - steps * GLOBAL_BATCH / 60).max() <= 1 + case.get("buckets", 1) * GLOBAL_BATCH / 60
    if case.get("buckets", 1) == 1:
        assert set(visits(sequence(order, 15), 60)) == {2}


@pytest.mark.parametrize("case", CASES)
def test_a_bucket_goes_through_its_samples_before_any_comes_again(case: dict[str, int]) -> None:
    batches = sequence(make_order(**case), 60)
    for bucket in range(case.get("buckets", 1)):
        stream = np.concatenate([batch.samples for batch in batches if batch.bucket == bucket])
        n = 60 // case.get("buckets", 1)
        whole = len(stream) // n
        assert whole >= 3
        assert (np.sort(stream[: whole * n].reshape(whole, n), axis=1) == np.sort(stream[:n])).all()


@pytest.mark.parametrize("case", CASES)
def test_any_step_is_found_without_the_ones_before(case: dict[str, int]) -> None:
    batches = sequence(make_order(**case), 60)
    for step in np.random.default_rng(0).permutation(60).tolist():
        again = make_order(**case).at(step)
        assert again.bucket == batches[step].bucket
        assert np.array_equal(again.samples, batches[step].samples)
    assert len(make_order(**case).at(10**9).samples) == GLOBAL_BATCH


@pytest.mark.parametrize("case", CASES)
def test_a_batch_has_one_bucket(case: dict[str, int]) -> None:
    buckets = case.get("buckets", 1)
    assert all((batch.samples % buckets == batch.bucket).all() for batch in sequence(make_order(**case), 40))


def test_buckets_are_mixed_over_time() -> None:
    chosen = [batch.bucket for batch in sequence(make_order(per_block=100, buckets=3), 60)]
    changes = sum(a != b for a, b in itertools.pairwise(chosen))
    assert changes > 25


def test_the_order_depends_on_seed_and_epoch() -> None:
    first, other = make_order(seed=1).at(0), make_order(seed=2).at(0)
    assert not np.array_equal(first.samples, other.samples)
    order = make_order(global_batch=60, lanes=1)
    assert not np.array_equal(order.at(0).samples, order.at(1).samples)
    assert sorted(order.at(0).samples) == sorted(order.at(1).samples) == list(range(60))


def test_the_order_of_this_version_is_kept() -> None:
    """A change here breaks the resuming of every run that exists."""
    order = make_order(per_block=4, blocks=4, buckets=2, window=2, lanes=2, global_batch=4)
    assert [(b.bucket, b.samples.tolist()) for b in sequence(order, 4)] == [
        (0, [8, 10, 12, 14]),
        (1, [9, 11, 13, 15]),
        (1, [3, 1, 5, 7]),
        (0, [2, 0, 4, 6]),
    ]


def test_a_lane_reads_its_own_blocks() -> None:
    """Two ranks of four lanes: each needs about half of the blocks of a window."""
    order = make_order(per_block=64, blocks=8, window=8, lanes=4)
    halves = [np.concatenate([b.samples[part] for b in sequence(order, 64)]) for part in (slice(0, 4), slice(4, 8))]
    blocks = [set((half // 64).tolist()) for half in halves]
    assert [len(b) for b in blocks] == [4, 4]
    assert not blocks[0] & blocks[1]


def test_a_lane_without_samples_is_fed_by_the_others() -> None:
    """One block and many lanes; and blocks that are nearly empty."""
    assert set(visits(sequence(make_order(per_block=40, blocks=1, lanes=8), 5), 40)) == {1}
    blocks = np.array([0] * 30 + [1] + [2] * 33, dtype=np.int32)
    params = DatasetParams(path=".", lanes=4, window=3)
    order = SampleOrder(params, 0, 8, blocks, np.zeros(64, dtype=np.int32))
    assert set(visits(sequence(order, 8), 64)) == {1}


def test_windows_keep_reads_together() -> None:
    order = make_order(per_block=8, blocks=8, window=2, lanes=1)
    blocks = [set((batch.samples // 8).tolist()) for batch in sequence(order, 8)]
    assert all(
        blocks[i] | blocks[i + 1] == blocks[i] | blocks[i + 1] and len(blocks[i] | blocks[i + 1]) == 2
        for i in (0, 2, 4, 6)
    )


@pytest.mark.parametrize("case", [{}, {"blocks": 3, "per_block": 1, "lanes": 2, "window": 1}, {"buckets": 2}])
def test_a_batch_repeats_samples_where_there_are_fewer(case: dict[str, int]) -> None:
    few = {"blocks": 1, "per_block": 3, **case}
    with pytest.raises(ValueError, match="fewer than the 8 of a step"):
        make_order(**few)
    batches = sequence(make_order(**few, resampled=True), 40)
    assert {len(batch.samples) for batch in batches} == {GLOBAL_BATCH}
    assert visits(batches, 3).min() > 40
    for step in (39, 7, 0):
        again = make_order(**few, resampled=True).at(step)
        assert (again.bucket, again.samples.tolist()) == (batches[step].bucket, batches[step].samples.tolist())


def test_with_replacement() -> None:
    order = make_order(per_block=1000, blocks=4, resampled=True)
    seen = visits(sequence(order, 500), 4000)
    assert seen.max() > 3
    assert abs((seen == 0).mean() - np.exp(-1)) < 0.03  # as many as a Poisson draw of mean 1 leaves out


def test_a_bucket_smaller_than_a_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="fewer than the 8"):
        make_order(per_block=7, blocks=1)


def test_default_lanes_and_window() -> None:
    orders = [make_order(global_batch=batch, resampled=True) for batch in (1, 12, 96, 2048)]
    assert [order.num_streams for order in orders] == [1, 4, 32, 64]
    assert make_order(per_block=10, blocks=6).window >= 6


@pytest.mark.parametrize("case", [*CASES, {"resampled": True, "buckets": 2}, {"per_block": 3, "blocks": 4, "lanes": 4}])
def test_the_visits_of_a_sample_are_the_inverse_of_the_order(case: dict[str, int]) -> None:
    """Of 40 steps: five epochs, with batches that span windows and epochs."""
    order, steps = make_order(**case), 40
    planned: dict[int, list[tuple[int, int]]] = {}
    for step, batch in enumerate(sequence(order, steps)):
        for slot, sample in enumerate(batch.samples.tolist()):
            planned.setdefault(sample, []).append((step, slot))
    for sample in range(len(order.bucket_of)):
        assert order.visits(sample, steps) == planned.get(sample, [])
    assert make_order(**case).visits(5, 400)[: len(planned[5])] == planned[5]
