"""Tensors by part and name, bit for bit, whoever wrote them."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sd_training.checkpoint.tensors import read_state, write_state, write_tensors
from sd_training.errors import CheckpointError
from tests.unit.checkpoint.exact import assert_same


def round_trip(folder: Path, tensors: dict[str, Tensor], state: dict[str, Any] | None = None) -> dict[str, Tensor]:
    write_tensors(folder, "weights", tensors, 0, 1)
    write_state(folder, state or {})
    return dict(read_state(folder)[1]["weights"])


def test_shared_tensors_are_stored_once_per_name(tmp_path: Path) -> None:
    base = torch.arange(10.0)
    tensors = {"a": base, "b": base, "head": base[:4], "tail": base[2:], "odd": base[1::2]}
    loaded = round_trip(tmp_path, tensors)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    loaded["a"].zero_()
    assert torch.equal(loaded["b"], base)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.uint8, torch.int64, torch.bool, torch.complex64])
def test_tensor_types(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {"a": torch.tensor([0, 1, 2]).to(dtype), "b": torch.tensor(1).to(dtype), "c": torch.zeros(2, 0).to(dtype)}
    loaded = round_trip(tmp_path, tensors)
    assert_same({name: loaded[name] for name in tensors}, tensors)


def test_nan_and_negative_zero_keep_their_bits(tmp_path: Path) -> None:
    payload = torch.tensor([0x7FC12345, -(2**31), 1], dtype=torch.int32).view(torch.float32)
    assert_same(round_trip(tmp_path, {"a": payload}), {"a": payload})


def test_loaded_tensors_outlive_their_file(tmp_path: Path) -> None:
    loaded = round_trip(tmp_path, {"a": torch.ones(100_000)})["a"]
    os.truncate(tmp_path / "weights.safetensors", 0)  # a tensor on the mapped file would now kill the process
    assert loaded.sum() == 100_000


def test_the_files_of_several_writers_are_one_part(tmp_path: Path) -> None:
    write_tensors(tmp_path, "ema-sigma_rel=0.050", {"a": torch.zeros(1)}, 0, 3)
    write_tensors(tmp_path, "ema-sigma_rel=0.050", {}, 1, 3)  # nothing fell to this one
    write_tensors(tmp_path, "ema-sigma_rel=0.050", {"b": torch.ones(1)}, 2, 3)
    write_tensors(tmp_path, "ema", {"b": torch.full((1,), 2.0)}, 2, 3)
    write_state(tmp_path, {})
    stored = read_state(tmp_path)[1]
    assert {part: {name: float(t) for name, t in tensors.items()} for part, tensors in stored.items()} == {
        "ema-sigma_rel=0.050": {"a": 0.0, "b": 1.0},
        "ema": {"b": 2.0},
    }
    assert len(list(tmp_path.glob("*.safetensors"))) == 3


def test_tensors_inside_the_state_come_back_in_their_place(tmp_path: Path) -> None:
    state = {"loops": {"done": (1, None), "best": float("inf")}, "scale": torch.tensor(3.0)}
    round_trip(tmp_path, {"a": torch.zeros(1)}, state)
    assert_same(read_state(tmp_path)[0], state)


def test_something_unstorable_is_named(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"hyper_parameters/where is a pathlib"):
        write_state(tmp_path, {"hyper_parameters": {"where": tmp_path}})


@pytest.mark.parametrize(
    "change",
    [
        lambda document: document | {"format": 1},
        lambda document: document | {"checkpoint": {"a": {"$tensor": "missing"}}},
        lambda document: {"format": 2},
        lambda document: [],
        lambda document: document | {"tensor_files": ["missing.safetensors"]},
        lambda document: document | {"tensor_files": ["../weights.safetensors"]},
        lambda document: document | {"tensor_files": ["weights.bin"]},
    ],
    ids=["format", "tensor", "keys", "list", "file", "outside", "kind"],
)
def test_another_format_is_refused(tmp_path: Path, change: Callable[[Any], Any]) -> None:
    document = {"format": 2, "tensor_files": [], "checkpoint": {}}
    (tmp_path / "state.json").write_text(json.dumps(change(document)))
    with pytest.raises(CheckpointError, match="another format"):
        read_state(tmp_path)
