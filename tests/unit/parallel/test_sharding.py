"""Assigning tensors to ranks by size."""

from sd_training.parallel.strategies import assign_by_size
from tests.integration.training import train_in_processes


def test_everybody_gets_about_the_same() -> None:
    sizes = [100, 1, 60, 40, 30, 30, 1, 38]
    owners = assign_by_size(sizes, 3)
    loads = [sum(size for size, owner in zip(sizes, owners, strict=True) if owner == rank) for rank in range(3)]
    assert sum(loads) == 300 and max(loads) <= 110


def test_more_processes_than_tensors() -> None:
    assert sorted(assign_by_size([5, 5], 4)) == [0, 1]
    assert assign_by_size([], 2) == []


def test_replicas_that_differ_differ_after_drawing() -> None:
    """Else a flipped bit would spread to all of them, and their digests would agree."""
    train_in_processes([], 2, "tests.unit.parallel.unequal_replicas")
