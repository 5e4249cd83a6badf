"""Copies that are averaged in threads, while the weights change."""

import threading
from collections.abc import Sequence

import pytest
import torch

from sd_training.callbacks.ema import WeightStaging


@pytest.mark.parametrize("threads", [1, 3, 8])
def test_every_copy_is_averaged_once_as_it_was(threads: int) -> None:
    staging, weights = WeightStaging(threads), {str(i): torch.full((i + 1,), float(i)) for i in range(5)}
    sums = {name: torch.zeros_like(weight) for name, weight in weights.items()}

    def add(names: Sequence[str]) -> None:
        for name in names:
            sums[name] += staging.copies[name]

    for turn in range(1, 4):
        staging.start(weights, add)
        for weight in weights.values():
            weight.add_(1)
        staging.wait()
        expected = [sum(i + earlier for earlier in range(turn)) for i in range(5)]
        assert [float(total[0]) for total in sums.values()] == expected


def test_the_first_copies_are_averaged_while_the_last_ones_are_made() -> None:
    """The last weight is not there to be copied before another one was averaged."""
    averaged = threading.Event()

    class Weights(dict[str, torch.Tensor]):
        def __getitem__(self, name: str) -> torch.Tensor:
            assert name != "last" or averaged.wait(60), "nothing is averaged before everything is copied"
            return super().__getitem__(name)

    staging = WeightStaging(1)
    weights = Weights({str(i): torch.zeros(9 - i) for i in range(8)} | {"last": torch.zeros(1)})
    done: list[str] = []

    def add(names: Sequence[str]) -> None:
        done.extend(names)
        averaged.set()

    staging.start(weights, add)
    staging.wait()
    assert sorted(done) == sorted(weights)


def test_an_error_of_a_thread_comes_up() -> None:
    staging = WeightStaging()

    def broken(names: Sequence[str]) -> None:
        raise ValueError("broken")

    staging.start({"a": torch.zeros(1)}, broken)
    for _ in range(2):  # the average stays a half updated one
        with pytest.raises(ValueError, match="broken"):
            staging.wait()
