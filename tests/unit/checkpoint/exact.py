"""Exact equality of nested state: types, bits, tensor types and layouts."""

import math
from typing import Any

import torch
from torch import Tensor


def assert_same(found: Any, expected: Any, path: str = "") -> None:
    """Fails with the path of the first difference; an OrderedDict may have become a dict."""
    if isinstance(expected, Tensor):
        _assert_same_tensor(found, expected, path)
    elif isinstance(expected, dict):
        assert type(found) in (dict, type(expected)) and list(found) == list(expected), path
        assert [type(k) for k in found] == [type(k) for k in expected], path
        for key, item in expected.items():
            assert_same(found[key], item, f"{path}/{key}")
    elif isinstance(expected, list | tuple):
        assert type(found) is type(expected) and len(found) == len(expected), path
        for i, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, f"{path}/{i}")
    elif isinstance(expected, float):
        assert type(found) is float and _same_float(found, expected), f"{path}: {found} is not {expected}"
    else:
        assert type(found) is type(expected) and found == expected, f"{path}: {found} is not {expected}"


def _same_float(found: float, expected: float) -> bool:
    both_nan = math.isnan(found) and math.isnan(expected)
    return both_nan or (found == expected and math.copysign(1, found) == math.copysign(1, expected))


def _assert_same_tensor(found: Any, expected: Tensor, path: str) -> None:
    assert isinstance(found, Tensor), path
    assert (found.dtype, found.shape, found.stride()) == (expected.dtype, expected.shape, expected.stride()), path
    bits = expected.detach().contiguous().reshape(-1).view(torch.uint8)
    assert torch.equal(found.contiguous().reshape(-1).view(torch.uint8), bits), path
