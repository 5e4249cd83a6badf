"""Which ranks differ, from their digests. Real runs are in tests/integration/test_numerics.py."""

import pytest

from sd_training.callbacks.numerics import odd_ranks


@pytest.mark.parametrize(
    ("digests", "distance", "expected"),
    [
        ([7, 7, 7, 7], 1, ([], True)),
        ([7, 7, 8, 7], 1, ([2], True)),
        ([7, 9, 8, 7, 7], 1, ([1, 2], True)),
        ([7, 8], 1, ([0, 1], False)),
        ([7, 7, 8, 8], 1, ([0, 1, 2, 3], False)),
        # Two replicas of two processes: ranks 0 and 2 are copies, and 1 and 3.
        ([7, 8, 7, 8], 2, ([], True)),
        ([7, 8, 7, 9], 2, ([1, 3], False)),
        # Three of two.
        ([7, 8, 7, 8, 6, 8], 2, ([4], True)),
    ],
)
def test_odd_ranks(digests: list[int], distance: int, expected: tuple[list[int], bool]) -> None:
    assert odd_ranks(digests, distance) == expected
