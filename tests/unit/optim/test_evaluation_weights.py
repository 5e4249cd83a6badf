"""Weights for previews and exports: the average of schedule-free training, and nothing else changes."""

import pytest
import torch

from sd_training.callbacks.ema import evaluation_weights
from tests.unit.optim.toy import build, toy, train, values


def test_inside_are_other_weights_and_afterwards_the_same_to_the_bit() -> None:
    parameters = toy()
    optimizer = build("schedule_free_adamw", parameters)
    train(optimizer, parameters, 0, 5)
    before = values(parameters)
    with evaluation_weights(optimizer):
        inside = values(parameters)
    assert all(not torch.equal(a, b) for a, b in zip(inside, before, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(values(parameters), before, strict=True))


def test_a_preview_does_not_disturb_training() -> None:
    watched, alone = toy(), toy()
    first, second = build("schedule_free_adamw", watched), build("schedule_free_adamw", alone)
    with evaluation_weights(first):
        pass
    for step in range(4):
        train(first, watched, step, step + 1)
        train(second, alone, step, step + 1)
        with evaluation_weights(first):
            pass
    assert all(torch.equal(a, b) for a, b in zip(values(watched), values(alone), strict=True))


def test_the_weights_come_back_after_an_error_inside() -> None:
    parameters = toy()
    optimizer = build("schedule_free_adamw", parameters)
    train(optimizer, parameters, 0, 3)
    before = values(parameters)
    with pytest.raises(RuntimeError), evaluation_weights(optimizer):
        raise RuntimeError
    assert all(torch.equal(a, b) for a, b in zip(values(parameters), before, strict=True))
    train(optimizer, parameters, 3, 4)


@pytest.mark.parametrize("name", ["adamw", "muon", "lion", "prodigy", "adafactor"])
def test_others_keep_their_weights(name: str) -> None:
    parameters = toy()
    optimizer = build(name, parameters)
    train(optimizer, parameters, 0, 2)
    before = values(parameters)
    with evaluation_weights(optimizer):
        assert all(torch.equal(a, b) for a, b in zip(values(parameters), before, strict=True))
