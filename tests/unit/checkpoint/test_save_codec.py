"""Nested state survives JSON and lifted tensors exactly, or is refused by path."""

import json
from collections import OrderedDict, defaultdict
from typing import Any

import pytest
import torch

from sd_training.checkpoint.save import join_tensors, split_tensors
from tests.unit.checkpoint.exact import assert_same


def through_json(state: Any) -> Any:
    value, tensors = split_tensors(state)
    return join_tensors(json.loads(json.dumps(value)), tensors)


@pytest.mark.parametrize(
    "state",
    [
        None,
        True,
        0,
        -(2**80),
        0.1 + 0.2,
        -0.0,
        5e-324,
        float("nan"),
        float("inf"),
        float("-inf"),
        "naïve \ud800 \0 text",
        [],
        (),
        {},
        [1, (2, [3, ()], {"a": (None,)})],
        {"z": 1, "a": 2},
    ],
    ids=repr,
)
def test_values_come_back_exactly(state: Any) -> None:
    assert_same(through_json(state), state)


def test_tensors_come_back_at_their_places() -> None:
    state = {
        "weights": OrderedDict(a=torch.randn(2, 3), b=torch.tensor(3)),
        "groups": [{"step": torch.tensor(7.0), "betas": (0.9, torch.tensor([True]))}],
        "empty": torch.zeros(0, 4),
    }
    assert_same(through_json(state), state)


def test_tensor_names_are_paths_and_tensors_are_not_copied() -> None:
    weight = torch.randn(2)
    _, tensors = split_tensors({"state_dict": {"net.weight": weight}})
    assert tensors["state_dict/net.weight"] is weight


def test_colliding_paths_get_names_of_their_own() -> None:
    state = {"a/b": torch.tensor(1), "a": {"b": torch.tensor(2)}}
    assert len(split_tensors(state)[1]) == 2
    assert_same(through_json(state), state)


def test_a_lone_tensor_is_a_state() -> None:
    assert_same(through_json(torch.tensor([1.5])), torch.tensor([1.5]))


def test_tensor_with_gaps_keeps_its_values() -> None:
    tensor = torch.arange(12).reshape(3, 4)[:, ::2]
    value, tensors = split_tensors(tensor)
    assert torch.equal(join_tensors(value, tensors), tensor)


class Number(int):
    """A subclass that would silently come back as its base."""


@pytest.mark.parametrize(
    "bad",
    [
        object(),
        {1, 2},
        b"bytes",
        Number(3),
        torch.float32,
        torch.Size([1]),
        defaultdict(int),
        1j,
        {1: 2},
        {"$tensor": "a"},
        {object(): 1},
        split_tensors,
    ],
    ids=lambda bad: type(bad).__name__,
)
def test_anything_else_is_refused_with_its_path(bad: Any) -> None:
    with pytest.raises(TypeError, match=r"callbacks/Ema/0"):
        split_tensors({"callbacks": {"Ema": [bad]}})


@pytest.mark.parametrize(
    "value",
    [{"$tensor": "absent"}, {"$tensor": []}, {"$tuple": 3}],
    ids=str,
)
def test_foreign_json_is_refused(value: Any) -> None:
    with pytest.raises((LookupError, TypeError)):
        join_tensors({"a": [value]}, {})
