"""Nested training state as JSON plus named tensors, and back: exactly, and without pickle.

A value that JSON cannot express becomes an object with one tag that starts with `$`: `{"$tensor": name}`,
`{"$tuple": [...]}`, `{"$float": "nan"}`, `{"$dict": [[key, value], ...]}`. A dict with keys that are not text, or that
look like a tag, is written as `$dict`, so no value can be mistaken for a tag.
"""

import math
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

JsonValue: TypeAlias = Any
"""None, bool, int, finite float, str, list or str-keyed dict of these."""

_RESERVED = "__metadata__"  # safetensors keeps its header's free text under this name


def split_tensors(state: Any) -> tuple[JsonValue, dict[str, Tensor]]:
    """Takes the tensors out of `state`.

    Args:
        state: dict, OrderedDict, list, tuple, None, bool, int, float, str and tensors, nested freely.

    Returns:
        What `json.dumps(..., allow_nan=False)` takes, and the tensors by name: the very ones of `state`, not copies. A
        name is the tensor's path joined by `/`.

    Raises:
        TypeError: a value of another type, with its path.
    """
    tensors: dict[str, Tensor] = {}
    return _encode(state, (), tensors), tensors


def join_tensors(value: JsonValue, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of `split_tensors`; an OrderedDict comes back as a dict in the same order.

    Raises:
        ValueError: `value` was not made by `split_tensors`, or a tensor that it names is missing.
    """
    if isinstance(value, list):
        return [join_tensors(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next((key for key in value if key.startswith("$")), None)
    if tag is None:
        return {key: join_tensors(item, tensors) for key, item in value.items()}
    content = value[tag]
    if tag == "$tensor" and content in tensors:
        return tensors[content]
    if tag == "$float" and content in ("nan", "inf", "-inf"):
        return float(content)
    if tag == "$tuple" and isinstance(content, list):
        return tuple(join_tensors(content, tensors))
    if tag == "$dict" and isinstance(content, list):
        return {join_tensors(key, tensors): join_tensors(item, tensors) for key, item in content}
    raise ValueError(f"not a checkpoint's state: {tag} with {str(content)[:80]!r}")


def _encode(value: Any, path: tuple[str, ...], tensors: dict[str, Tensor] | None) -> JsonValue:
    """`tensors` takes those of `value`; None: it may have none."""
    kind = type(value)  # exact types: a subclass would come back as its base
    if kind in (type(None), bool, int, str) or (kind is float and math.isfinite(value)):
        return value
    if kind is float:
        return {"$float": repr(value)}
    if kind in (list, tuple):
        items = [_encode(item, (*path, str(i)), tensors) for i, item in enumerate(value)]
        return items if kind is list else {"$tuple": items}
    if kind in (dict, OrderedDict):
        items = [[_encode(k, (*path, "key"), None), _encode(v, (*path, str(k)), tensors)] for k, v in value.items()]
        return dict(items) if all(type(k) is str and not k.startswith("$") for k in value) else {"$dict": items}
    is_plain = kind in (Tensor, torch.nn.Parameter) and value.layout is torch.strided and not value.is_meta
    if is_plain and tensors is not None:
        name = base = "/".join(path).replace(_RESERVED, "metadata").encode("utf-8", "backslashreplace").decode()
        while name in tensors or not name:  # `{1: a, "1": b}` has two tensors of one path
            name = f"{base or 'tensor'}~{len(tensors)}"
        tensors[name] = value
        return {"$tensor": name}
    raise TypeError(
        f"{'/'.join(path) or 'the state'} is a {kind.__module__}.{kind.__qualname__}; a checkpoint holds dense "
        "tensors, numbers, text, None, and dicts, lists and tuples of these"
    )
