"""Nested training state as JSON plus named tensors, and back: exactly, and without pickle.

A value that JSON has no word for becomes an object with one tag that starts with `$`:
`{"$tensor": name}`, `{"$tuple": [...]}`, `{"$float": "nan"}`, `{"$dict": [[key, value], ...]}`. A dict with keys that
are not text, or that look like a tag, is written as `$dict`, so no value can be mistaken for a tag.
"""

import math
from collections import OrderedDict
from typing import Any, TypeAlias

import torch
from torch import Tensor

JsonValue: TypeAlias = Any
"""None, bool, int, finite float, str, list or str-keyed dict of these."""

_PLAIN = (type(None), bool, int, str)
_RESERVED = "__metadata__"  # safetensors keeps its header's free text under this name


def split(state: Any) -> tuple[JsonValue, dict[str, Tensor]]:
    """Lifts the tensors out of `state`.

    Args:
        state: dict, OrderedDict, list, tuple, None, bool, int, float, str and tensors, nested freely.

    Returns:
        What `json.dumps(..., allow_nan=False)` takes, and the tensors by name. A tensor's name is its path joined by
        `/`; the tensors are the very ones of `state`, not copies.

    Raises:
        TypeError: a value of another type, with its path.
    """
    tensors: dict[str, Tensor] = {}
    return _encode(state, (), tensors), tensors


def join(value: JsonValue, tensors: dict[str, Tensor]) -> Any:
    """The inverse of `split`; an OrderedDict comes back as a dict in the same order.

    Raises:
        ValueError: `value` was not made by `split`, or a tensor that it names is missing.
    """
    if isinstance(value, list):
        return [join(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next((key for key in value if key.startswith("$")), None)
    if tag is None:
        return {key: join(item, tensors) for key, item in value.items()}
    return _untag(tag, value, tensors)


def _encode(value: Any, path: tuple[str, ...], tensors: dict[str, Tensor]) -> JsonValue:
    if type(value) in _PLAIN:  # exact types: a subclass would come back as its base
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, Tensor):
        return _lift(value, path, tensors)
    if type(value) is list:
        return [_encode(item, (*path, str(i)), tensors) for i, item in enumerate(value)]
    if type(value) is tuple:
        return {"$tuple": [_encode(item, (*path, str(i)), tensors) for i, item in enumerate(value)]}
    if type(value) in (dict, OrderedDict):
        return _encode_dict(value, path, tensors)
    raise TypeError(f"{_where(path)} is a {type(value).__module__}.{type(value).__qualname__}; {_ALLOWED}")


_ALLOWED = "a checkpoint holds tensors, numbers, text, None, and dicts, lists and tuples of these"


def _encode_dict(value: dict[Any, Any], path: tuple[str, ...], tensors: dict[str, Tensor]) -> JsonValue:
    encoded = [(key, _encode(item, (*path, str(key)), tensors)) for key, item in value.items()]
    if all(type(key) is str and not key.startswith("$") for key in value):
        return dict(encoded)
    return {"$dict": [[_encode_key(key, path), item] for key, item in encoded]}


def _encode_key(key: Any, path: tuple[str, ...]) -> JsonValue:
    if isinstance(key, Tensor):
        raise TypeError(f"{_where(path)} has a tensor as a key; {_ALLOWED}")
    return _encode(key, (*path, "key"), {})


def _lift(tensor: Tensor, path: tuple[str, ...], tensors: dict[str, Tensor]) -> JsonValue:
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided or tensor.is_meta:
        raise TypeError(f"{_where(path)} is a {type(tensor).__name__} ({tensor.layout}, {tensor.device}); {_ALLOWED}")
    name = _free_name("/".join(path), tensors)
    tensors[name] = tensor
    stride = _dense_stride(tensor)
    return {"$tensor": name} if stride is None else {"$tensor": name, "stride": stride}


def _free_name(wanted: str, tensors: dict[str, Tensor]) -> str:
    """`{1: a, "1": b}` has two tensors of one path: the second one gets a number."""
    name = base = wanted.replace(_RESERVED, "metadata").encode("utf-8", "backslashreplace").decode() or "tensor"
    count = 1
    while name in tensors:
        count += 1
        name = f"{base}~{count}"
    return name


def _dense_stride(tensor: Tensor) -> list[int] | None:
    """Stride of a permuted but gapless tensor such as channels-last: fused optimizers want state laid out so."""
    expected = 1
    if tensor.is_contiguous():
        return None
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if stride != expected:
            return None
        expected *= size
    return list(tensor.stride())


def _untag(tag: str, value: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
    content = value[tag]
    if tag == "$tensor" and content in tensors:
        return _laid_out(tensors[content], value.get("stride"))
    if tag == "$float" and content in ("nan", "inf", "-inf"):
        return float(content)
    if tag == "$tuple" and isinstance(content, list):
        return tuple(join(item, tensors) for item in content)
    if tag == "$dict" and isinstance(content, list) and all(isinstance(i, list) and len(i) == 2 for i in content):
        return {join(key, tensors): join(item, tensors) for key, item in content}
    raise ValueError(f"not a checkpoint's state: {tag} with {str(content)[:80]!r}")


def _laid_out(tensor: Tensor, stride: list[int] | None) -> Tensor:
    if stride is None:
        return tensor
    dense = sorted((step, size) for step, size in zip(stride, tensor.shape, strict=True) if size > 1)
    expected = 1
    for step, size in dense:  # a stride that leaves gaps would take any amount of memory
        if step != expected:
            raise ValueError(f"not a checkpoint's state: stride {str(stride)[:80]} of a tensor {tuple(tensor.shape)}")
        expected *= size
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _where(path: tuple[str, ...]) -> str:
    return "/".join(path) or "the state"
