"""A checkpoint's tensors, whole, by part and name, in as many files as processes wrote them.

step=N/weights.safetensors                  one process; several: weights-00001-of-00004.safetensors …
       optimizer.safetensors, ema.safetensors …
       state.json                           everything that is not a tensor, and which files there are
       MANIFEST.json                        sizes and checksums

Which process wrote a tensor does not matter to who reads it.

Nested training state as JSON plus named tensors, and back: exactly, and without pickle.

A value that JSON has no word for becomes an object with one tag that starts with `$`:
`{"$tensor": name}`, `{"$tuple": [...]}`, `{"$float": "nan"}`, `{"$dict": [[key, value], ...]}`. A dict with keys that
are not text, or that look like a tag, is written as `$dict`, so no value can be mistaken for a tag.
"""

import errno
import json
import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from sd_training.checkpoint.atomic_io import system_error
from sd_training.errors import CheckpointError

JsonValue: TypeAlias = Any
"""None, bool, int, finite float, str, list or str-keyed dict of these."""

_PLAIN = (type(None), bool, int, str)
_RESERVED = "__metadata__"  # safetensors keeps its header's free text under this name


def split_tensors(state: Any) -> tuple[JsonValue, dict[str, Tensor]]:
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


def join_tensors(value: JsonValue, tensors: dict[str, Tensor]) -> Any:
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
        return tuple(join_tensors(item, tensors) for item in content)
    if tag == "$dict" and isinstance(content, list) and all(isinstance(i, list) and len(i) == 2 for i in content):
        return {join_tensors(key, tensors): join_tensors(item, tensors) for key, item in content}
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


_STATE = "state.json"
_FORMAT = 2


class StoredTensors(Mapping[str, Tensor]):
    """Tensors of one part, read one at a time, so that a process never holds more than it needs.

    Args:
        paths: the files of the part.
    """

    def __init__(self, paths: list[Path]) -> None:
        self._files = [safe_open(path, framework="pt", device="cpu") for path in paths]
        self._place = {name: file for file in self._files for name in file.keys()}  # noqa: SIM118 - not a dict

    def __getitem__(self, name: str) -> Tensor:
        """A copy: what safetensors hands out is the mapped file, which rotation will delete under a running run."""
        tensor: Tensor = self._place[name].get_tensor(name).clone()
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._place)

    def __len__(self) -> int:
        return len(self._place)


def write_tensors(folder: Path, part: str, tensors: Mapping[str, Tensor], writer: int, writers: int) -> None:
    """Writes one process's tensors of a part; nothing when it has none.

    Raises:
        OSError: they could not be written.
    """
    if not tensors:
        return
    try:
        save_file(_storable(tensors), folder / _file_name(part, writer, writers))
    except SafetensorError as error:  # the library's I/O errors are no OSErrors
        raise system_error(error) or OSError(errno.EIO, str(error)) from error


def write_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Writes what is not a tensor; to be called when all tensors are written.

    Args:
        state: what `split_tensors` takes; the few tensors in it are stored beside it.

    Raises:
        TypeError: it holds something else, with its path.
    """
    plain, tensors = split_tensors(dict(state))
    write_tensors(folder, "state", tensors, 0, 1)
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    document = {"format": _FORMAT, "tensor_files": files, "checkpoint": plain}
    (folder / _STATE).write_text(json.dumps(document, allow_nan=False), encoding="utf-8")


def read_state(folder: Path) -> tuple[dict[str, Any], dict[str, StoredTensors]]:
    """What `write_state` wrote, and the tensors by part; nothing but tensors and JSON is ever read.

    Raises:
        CheckpointError: the folder is of another format.
    """
    try:
        document = json.loads((folder / _STATE).read_text(encoding="utf-8"))
        if document["format"] != _FORMAT:
            raise ValueError(f"format {document['format']!r}; this version reads format {_FORMAT}")
        parts: dict[str, list[Path]] = {}
        for name in document["tensor_files"]:
            parts.setdefault(_part_of(name), []).append(folder / name)
        stored = {part: StoredTensors(paths) for part, paths in parts.items()}
        state: dict[str, Any] = join_tensors(document["checkpoint"], dict(stored.pop("state", {})))
    except (OSError, LookupError, TypeError, ValueError, AttributeError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"checkpoint {folder} is of another format: {error}") from error
    return state, stored


def _file_name(part: str, writer: int, writers: int) -> str:
    return f"{part}.safetensors" if writers == 1 else f"{part}-{writer + 1:05d}-of-{writers:05d}.safetensors"


def _part_of(file_name: str) -> str:
    """The part in a name of `_file_name`; file names come from a file, so they must be plain names."""
    stem, _, ending = file_name.rpartition(".")
    if ending != "safetensors" or Path(file_name).name != file_name:
        raise ValueError(f"{file_name!r:.80} is no file of tensors")
    head, of, _ = stem.rpartition("-of-")
    return head.rpartition("-")[0] if of else stem


def _storable(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous tensors on the CPU that share no memory: tied weights are stored once per name."""
    stored: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        address = plain.untyped_storage().data_ptr()
        if address and address in seen:
            plain = plain.clone()
        seen.add(address)
        stored[name] = plain
    return stored
