import numpy as np
import pytest

from sd_training.config.batch_plan import BatchPlan
from sd_training.data.order import EpochOrder, permutation, slots


def test_a_permutation_has_each_sample_once_and_depends_on_seed_and_epoch() -> None:
    first = permutation(1, 0, 1000)
    assert sorted(first.tolist()) == list(range(1000))
    assert np.array_equal(first, permutation(1, 0, 1000))
    assert not np.array_equal(first, permutation(1, 1, 1000))
    assert not np.array_equal(first, permutation(2, 0, 1000))


def test_the_order_of_this_version_is_kept() -> None:
    """A change here breaks the resuming of every run that exists."""
    assert permutation(0, 0, 8).tolist() == [0, 7, 2, 1, 6, 4, 3, 5]


def test_epochs_follow_each_other_without_a_gap() -> None:
    order = EpochOrder(3, 7)
    seen = [order.sample_at(position) for position in range(21)]
    assert [sorted(seen[i : i + 7]) for i in (0, 7, 14)] == [list(range(7))] * 3
    assert seen[7:14] == permutation(3, 1, 7).tolist()


def test_any_position_is_found_by_arithmetic() -> None:
    order = EpochOrder(3, 7)
    far = order.sample_at(7 * 10**9 + 2)
    assert far == permutation(3, 10**9, 7)[2]
    assert order.sample_at(0) == EpochOrder(3, 7).sample_at(0)


@pytest.mark.parametrize(("world", "accumulation"), [(1, 1), (1, 4), (2, 2), (4, 1), (4, 2)])
def test_slots_cut_a_global_batch(world: int, accumulation: int) -> None:
    plan = BatchPlan(
        micro_batch=16 // world // accumulation, accumulation=accumulation, processes=world, num_examples=64
    )
    pieces = [slots(2, micro, rank, world, plan) for micro in range(accumulation) for rank in range(world)]
    assert [position for piece in pieces for position in piece] == list(range(32, 48))
