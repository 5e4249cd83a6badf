"""Collective save and load of a checkpoint. All ranks take part: full tensors are gathered one at a time, each rank
writes its share of them, rank 0 seals the folder.

step=N/weights.safetensors                  one rank; several: weights-00001-of-00004.safetensors …
       optimizer.safetensors, ema.safetensors …
       state.json                           everything that is not a tensor, and the names of the tensor files
       MANIFEST.json                        sizes and checksums (`folder.py`)

A checkpoint depends neither on the strategy nor on the world size, so that a run continues with any other. Which rank
wrote a tensor does not matter to a reader.
"""

import errno
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sd_training.checkpoint.atomic_io import remove_quietly, system_error, write_failure
from sd_training.checkpoint.codec import join_tensors, split_tensors
from sd_training.checkpoint.folder import begin_partial, folder_name, newest_verified, seal_partial, step_of
from sd_training.checkpoint.run_lock import RunLock
from sd_training.errors import CheckpointError
from sd_training.parallel.cpu_group import CpuGroup
from sd_training.parallel.sharding import ParameterSharding, local_bytes

WEIGHTS, OPTIMIZER = "weights", "optimizer"
"""Parts of every checkpoint; averages are further ones."""
_STATE = "state.json"
_FORMAT = 2
_LOSS_SCALE = "deepspeed_loss_scale"


@dataclass(frozen=True)
class TrainingContents:
    """What a checkpoint is made of, as it lies on this rank."""

    module: nn.Module
    """Its trained parameters are stored from `sharding`; frozen ones and buffers are the same on every rank."""
    sharding: ParameterSharding
    averages: Mapping[str, Mapping[str, Tensor]]
    """Part of the checkpoint → trained parameter → this rank's shard of its average."""
    state: Mapping[str, Any]
    """Everything else, as `split_tensors` takes it; that of rank 0 is stored."""


class PendingWrite:
    """A checkpoint of which this rank holds its share of full tensors, ready to be written.

    Args:
        folder: `step=N`.
        partial: where the files go until they are sealed.
        parts: part → this rank's tensors by name; may gather them as it goes.
        state: for `state.json`.
        info: JSON for the manifest.
        group: the ranks that write.
        run_lock: of this start of the run, on rank 0.
    """

    def __init__(
        self,
        folder: Path,
        partial: Path,
        parts: Iterable[tuple[str, Mapping[str, Tensor]]],
        state: Mapping[str, Any],
        info: Mapping[str, Any],
        group: CpuGroup,
        run_lock: RunLock,
    ) -> None:
        self.folder, self.partial, self.parts, self.state, self.info = folder, partial, parts, state, info
        self.group, self.run_lock = group, run_lock

    def write(self) -> None:
        """Collective. Of copies (`asynchronous`) it uses the CPU group only, so that a thread may run it while the
        device trains; nothing else may use the group meanwhile. Either all files get their final name or none is left.

        Raises:
            OSError: some rank could not write; names folder and free space. Older checkpoints are intact.
            TakenOverError: another start has taken the run over.
        """
        failure: OSError | None = None
        with _removed_on_failure(self.partial, self.group):
            for part, tensors in self.parts:  # gathers may be collective: they go on after a failure
                if failure is None:
                    failure = self._write_part(part, tensors)
            self.group.raise_first(failure)
            self.group.on_rank0(self._seal)

    def _write_part(self, part: str, tensors: Mapping[str, Tensor]) -> OSError | None:
        try:
            with _failure_named(self.folder):
                write_tensors(self.partial, part, tensors, self.group.rank, self.group.world_size)
        except OSError as error:
            return error
        return None

    def _seal(self) -> None:
        with _failure_named(self.folder):
            write_state(self.partial, self.state)
            seal_partial(self.partial, self.info, self.run_lock)


def save_checkpoint(
    folder: Path,
    contents: TrainingContents,
    info: Mapping[str, Any],
    group: CpuGroup,
    run_lock: RunLock,
    *,
    asynchronous: bool = False,
) -> PendingWrite | None:
    """Collective: seals `contents` as `folder`, unless an intact checkpoint is there already.

    Args:
        folder: `…/step=N`.
        contents: of this rank.
        info: JSON for the manifest (`read_info`), that of rank 0.
        group: all ranks.
        run_lock: of this start of the run; rank 0 checks it.
        asynchronous: only copy to CPU memory, as much as this rank's part of the checkpoint takes on disk.

    Returns:
        None, or what is still to be written where `asynchronous`.

    Raises:
        OSError: as `PendingWrite.write`, and where too little space is free.
        TakenOverError: another start has taken the run over.
    """
    needed_bytes = sum(group.all_gather(_bytes_here(contents, group.rank)))

    def begin() -> str | None:
        with _failure_named(folder):
            partial = begin_partial(folder.parent, step_of(folder), needed_bytes, run_lock)
        return None if partial is None else str(partial)

    made = group.on_rank0(begin)
    if made is None:
        return None
    partial = Path(made)
    groups = [{k: v for k, v in group.items() if k != "params"} for group in contents.sharding.optimizer.param_groups]
    state_of_parameters: dict[str, Any] = {}
    state = {**contents.state, OPTIMIZER: {"groups": groups, "state": state_of_parameters}}
    state["averages"] = sorted(contents.averages)
    if scale := contents.sharding.loss_scale():
        state[_LOSS_SCALE] = scale
    streams = {
        WEIGHTS: _weights(contents),
        OPTIMIZER: _optimizer_tensors(contents, state_of_parameters),
        **{part: _average(contents, shards) for part, shards in contents.averages.items()},
    }
    parts = ((part, _own_share(stream, group, is_copied=asynchronous)) for part, stream in streams.items())
    if not asynchronous:
        PendingWrite(folder, partial, parts, state, info, group, run_lock).write()
        return None
    with _removed_on_failure(partial, group):
        copies = dict(parts)
        drained = ((part, copies.pop(part)) for part in list(copies))  # frees memory part by part
        return PendingWrite(folder, partial, drained, deepcopy(state), info, group, run_lock)


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint on disk; tensors are read when they are used."""

    state: dict[str, Any]
    """The `state` it was saved with."""
    optimizer: dict[str, Any]
    """Groups of the optimizer, and per parameter what its state is joined from."""
    parts: dict[str, "StoredTensors"]

    def averages(self) -> dict[str, "StoredTensors"]:
        """Part → full tensors by parameter."""
        return {part: tensors for part, tensors in self.parts.items() if part not in (WEIGHTS, OPTIMIZER)}


def newest_checkpoint(root: Path, group: CpuGroup) -> Path:
    """Collective: the newest checkpoint below `root` that verifies, the same on every rank.

    Raises:
        CheckpointError: none of them verifies; with the same text on every rank.
    """

    def choose() -> int:
        newest = newest_verified(root)
        if newest is None:
            raise CheckpointError(f"{root}: no checkpoint was ever finished")
        return step_of(newest)

    return root / folder_name(group.on_rank0(choose))


def open_checkpoint(folder: Path) -> StoredCheckpoint:
    """The plain state of a checkpoint, and access to its tensors.

    Raises:
        CheckpointError: it is of another format.
    """
    state, parts = read_state(folder)
    try:
        return StoredCheckpoint(state, state.pop(OPTIMIZER), parts)
    except KeyError as error:
        raise CheckpointError(f"checkpoint {folder} is of another format: {error} is missing") from error


def load_checkpoint(stored: StoredCheckpoint, module: nn.Module, sharding: ParameterSharding) -> None:
    """Collective: `module` and its optimizer continue from the checkpoint's weights, buffers and optimizer state.
    Options that an optimizer's group takes from the config stay as the config has them.

    Raises:
        CheckpointError: the checkpoint belongs to another network.
    """
    weights: Mapping[str, Tensor] = stored.parts.get(WEIGHTS, {})
    own = nn.Module.state_dict(module, keep_vars=True)
    if odd := sorted(set(own) ^ set(weights)):
        raise CheckpointError(
            f"the checkpoint belongs to another network: {len(odd)} names of weights differ, e.g. {odd[0]}"
        )
    trained = _trained(module)
    for name, value in own.items():
        full = weights[name]
        if name in trained:
            shape = sharding.full_shape(trained[name])
            if full.shape != shape:
                raise CheckpointError(
                    f"the checkpoint belongs to another network: {name} is {tuple(full.shape)}, now {tuple(shape)}"
                )
            sharding.load(trained[name], full.to(trained[name].device))
        elif not isinstance(value, DTensor):  # sharded frozen weights are what they were at the start
            value.detach().copy_(full)
    names = {id(parameter): name for name, parameter in trained.items()}
    tensors: Mapping[str, Tensor] = stored.parts.get(OPTIMIZER, {})

    def state_of(parameter: nn.Parameter) -> dict[str, Any]:
        state: dict[str, Any] = join_tensors(stored.optimizer["state"].get(names[id(parameter)], {}), tensors)
        return state

    sharding.load_optimizer(trained.values(), state_of, stored.optimizer["groups"])
    sharding.load_loss_scale(stored.state.get(_LOSS_SCALE, {}))


@contextmanager
def _failure_named(folder: Path) -> Iterator[None]:
    """Errors of the disk name the checkpoint, its folder and the free space."""
    try:
        yield
    except OSError as error:
        raise write_failure(f"checkpoint {folder.name}", folder.parent, error) from error


@contextmanager
def _removed_on_failure(partial: Path, group: CpuGroup) -> Iterator[None]:
    """Rank 0 removes what was written."""
    try:
        yield
    except BaseException:
        if group.rank == 0:
            remove_quietly(partial)
        raise


def _trained(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def _weights(contents: TrainingContents) -> Iterator[tuple[str, Tensor]]:
    """Collective: full tensors of the module's parameters and buffers."""
    trained = _trained(contents.module)
    for name, parameter in trained.items():
        yield name, contents.sharding.full_tensor(parameter)
    for name, value in nn.Module.state_dict(contents.module, keep_vars=True).items():
        if name not in trained:
            yield name, value.full_tensor() if isinstance(value, DTensor) else value.detach()


def _optimizer_tensors(contents: TrainingContents, state: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Collective: full tensors of the optimizer's state; fills `state` with what they are joined to, by parameter."""
    for name, parameter in _trained(contents.module).items():
        plain, tensors = split_tensors({name: contents.sharding.full_state(parameter)})
        state |= plain
        yield from tensors.items()


def _average(contents: TrainingContents, shards: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Collective."""
    for name, parameter in _trained(contents.module).items():
        if name in shards:
            yield name, contents.sharding.gather(parameter, shards[name])


def _own_share(stream: Iterator[tuple[str, Tensor]], group: CpuGroup, *, is_copied: bool) -> dict[str, Tensor]:
    """This rank's share of a stream of full tensors: each goes to the rank with the fewest bytes so far.

    Args:
        is_copied: on the CPU, in memory of its own.
    """
    loads, kept = [0] * group.world_size, {}
    for name, tensor in stream:
        writer = loads.index(min(loads))
        loads[writer] += tensor.numel() * tensor.element_size()
        if writer == group.rank:
            is_kept_as_it_is = group.world_size == 1 and not is_copied
            kept[name] = tensor if is_kept_as_it_is else tensor.detach().to("cpu", copy=True)
    return kept


def _bytes_here(contents: TrainingContents, rank: int) -> int:
    """What this rank adds to a checkpoint [bytes]; the sum over all ranks is its size."""
    sharding, trained = contents.sharding, _trained(contents.module)
    shards = [(parameter, sharding.local_shard(parameter)) for parameter in trained.values()]
    shards += [(trained[name], shard) for average in contents.averages.values() for name, shard in average.items()]
    own = nn.Module.state_dict(contents.module, keep_vars=True)
    unchanged = sum(value.numel() * value.element_size() for name, value in own.items() if name not in trained)
    divided = sum(local_bytes([shard]) // sharding.copies(parameter) for parameter, shard in shards)
    return divided + sharding.state_bytes() + (unchanged if rank == 0 else 0)


class StoredTensors(Mapping[str, Tensor]):
    """Tensors of one part, read one at a time, so that a process never holds more than it needs.

    Args:
        paths: the files of the part.
    """

    def __init__(self, paths: list[Path]) -> None:
        files = [safe_open(path, framework="pt", device="cpu") for path in paths]
        self._file_of = {name: file for file in files for name in file.keys()}  # noqa: SIM118 - not a dict

    def __getitem__(self, name: str) -> Tensor:
        """A copy: safetensors returns memory of the mapped file, which rotation will delete under a running run."""
        tensor: Tensor = self._file_of[name].get_tensor(name).clone()
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)


def write_tensors(folder: Path, part: str, tensors: Mapping[str, Tensor], rank: int, world_size: int) -> None:
    """Writes one rank's tensors of a part; no file when it has none.

    Raises:
        OSError: they could not be written.
    """
    if not tensors:
        return
    stored: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():  # contiguous, on the CPU; tied weights are stored once per name
        plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        address = plain.untyped_storage().data_ptr()
        stored[name] = plain.clone() if address and address in seen else plain
        seen.add(address)
    number = "" if world_size == 1 else f"-{rank + 1:05d}-of-{world_size:05d}"
    try:
        save_file(stored, folder / f"{part}{number}.safetensors")
    except SafetensorError as error:  # the library's I/O errors are no OSErrors
        raise system_error(error) or OSError(errno.EIO, str(error)) from error


def write_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Writes what is not a tensor of a part; to be called when all tensors are written.

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
        paths: dict[str, list[Path]] = {}
        for name in document["tensor_files"]:
            stem, _, suffix = name.rpartition(".")
            if suffix != "safetensors" or Path(name).name != name:  # the name comes from a file
                raise ValueError(f"{name!r:.80} is no file of tensors")
            head, of, _ = stem.rpartition("-of-")
            paths.setdefault(head.rpartition("-")[0] if of else stem, []).append(folder / name)
        parts = {part: StoredTensors(files) for part, files in paths.items()}
        state: dict[str, Any] = join_tensors(document["checkpoint"], dict(parts.pop("state", {})))
    except (OSError, LookupError, TypeError, ValueError, AttributeError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"checkpoint {folder} is of another format: {error}") from error
    return state, parts
