"""Lightning's checkpoints as sealed folders of safetensors and JSON: `Trainer(plugins=[SealedCheckpointIO()])`.

step=N/weights.safetensors     the trained module, under the names of its state_dict
       ema.safetensors         tensors of callbacks whose path says "ema"
       optimizer.safetensors   optimizer state
       <part>.safetensors      tensors of any other part of the checkpoint
       state.json              everything that is not a tensor, and which tensor belongs where
       MANIFEST.json           sizes and checksums
"""

import errno
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning_fabric.plugins.io.checkpoint_io import CheckpointIO
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from sd_training.checkpoint import codec, seal
from sd_training.errors import CheckpointError

_STATE = "state.json"
_FORMAT = 1
_FILE_OF_PART = {"state_dict": "weights", "optimizer_states": "optimizer"}
_PREFIX_OF_FILE = {"weights": "state_dict/"}


class SealedCheckpointIO(CheckpointIO):
    """Reads and writes `checkpoints/step=N`. Lightning calls `save_checkpoint` on the first rank only.

    Args:
        info: JSON about the run for the manifest (versions, world size, fingerprints), see `seal.read_info`.
    """

    def __init__(self, info: Mapping[str, Any] | None = None) -> None:
        self.info = dict(info or {})

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Seals `checkpoint` as the folder `path`, whose name must be `step=N`.

        Raises:
            OSError: it could not be written; names folder and free space. Older checkpoints are intact.
            TypeError: the checkpoint holds something that is neither tensor nor JSON, with its path.
        """
        if storage_options is not None:
            raise TypeError("storage_options are not supported")
        folder = Path(path)
        step = seal.step_of(folder)
        state, tensors = codec.split(checkpoint)
        files = _sort_into_files(tensors)
        seal.write_sealed(folder.parent, step, lambda target: _write(target, state, files), self.info)

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None, **_: Any
    ) -> dict[str, Any]:
        """The checkpoint in the folder `path`, after its checksums were compared.

        Args:
            path: a sealed folder.
            map_location: device of the tensors, as `torch.device` or its name; anything else means the CPU.
            weights_only: accepted for Lightning; nothing but tensors and JSON is ever read.

        Raises:
            CheckpointError: the folder is missing, damaged or not a checkpoint.
        """
        folder = Path(path)
        problems = seal.verify(folder)
        if problems:
            raise CheckpointError(f"checkpoint {folder} cannot be used: {'; '.join(problems)}")
        device = str(map_location) if isinstance(map_location, (str, torch.device)) else "cpu"
        try:
            return _read(folder, device)
        except (KeyError, TypeError, ValueError, SafetensorError) as error:
            raise CheckpointError(f"checkpoint {folder} is of another format: {error}") from error

    def remove_checkpoint(self, path: str | Path) -> None:
        """Deletes a checkpoint folder; renamed first, so a kill half way leaves no damaged one."""
        seal.discard(Path(path))


def _sort_into_files(tensors: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Tensors by file stem, then by name in that file."""
    files: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        stem = _stem_of(name)
        files.setdefault(stem, {})[name.removeprefix(_PREFIX_OF_FILE.get(stem, ""))] = tensor
    return files


def _stem_of(name: str) -> str:
    part = name.split("/", 1)[0]
    if part in _FILE_OF_PART:
        return _FILE_OF_PART[part]
    if part == "callbacks" and "ema" in name.lower():
        return "ema"
    return "part-" + re.sub(r"[^A-Za-z0-9_-]", "_", part)  # cannot be one of the names above


def _write(folder: Path, state: codec.JsonValue, files: dict[str, dict[str, Tensor]]) -> None:
    for stem, tensors in files.items():
        _write_tensors(folder / f"{stem}.safetensors", tensors)
    document = {"format": _FORMAT, "tensor_files": sorted(files), "checkpoint": state}
    (folder / _STATE).write_text(json.dumps(document, allow_nan=False), encoding="utf-8")


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    try:
        save_file(_storable(tensors), path)
    except SafetensorError as error:  # the library's I/O errors are no OSErrors
        raise OSError(errno.EIO, str(error)) from error


def _storable(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
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


def _read(folder: Path, device: str) -> dict[str, Any]:
    document = json.loads((folder / _STATE).read_text(encoding="utf-8"))
    if document["format"] != _FORMAT:
        raise ValueError(f"format {document['format']!r}; this version reads format {_FORMAT}")
    tensors: dict[str, Tensor] = {}
    for stem in document["tensor_files"]:
        tensors |= _read_tensors(folder / f"{stem}.safetensors", _PREFIX_OF_FILE.get(stem, ""), device)
    checkpoint: dict[str, Any] = codec.join(document["checkpoint"], tensors)
    return checkpoint


def _read_tensors(path: Path, prefix: str, device: str) -> dict[str, Tensor]:
    """Copies: what safetensors hands out is the mapped file, which rotation will delete under a running training."""
    with safe_open(path, framework="pt", device=device) as stream:
        return {prefix + name: stream.get_tensor(name).clone() for name in stream.keys()}  # noqa: SIM118
