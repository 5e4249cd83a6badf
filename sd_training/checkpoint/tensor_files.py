"""A checkpoint's tensors, whole, by part and name, in as many files as processes wrote them.

step=N/weights.safetensors                  one process; several: weights-00001-of-00004.safetensors …
       optimizer.safetensors, ema.safetensors …
       state.json                           everything that is not a tensor, and which files there are
       MANIFEST.json                        sizes and checksums

Which process wrote a tensor does not matter to who reads it.
"""

import errno
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from sd_training.checkpoint import codec
from sd_training.checkpoint.durable import system_error
from sd_training.errors import CheckpointError

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
        state: what `codec.split` takes; the few tensors in it are stored beside it.

    Raises:
        TypeError: it holds something else, with its path.
    """
    plain, tensors = codec.split(dict(state))
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
        state: dict[str, Any] = codec.join(document["checkpoint"], dict(stored.pop("state", {})))
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
