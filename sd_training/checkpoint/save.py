"""Collective save and load of a checkpoint. All ranks take part: full tensors are gathered one at a time, each rank
writes its share of them, rank 0 seals the folder.

step=N/weights.safetensors                  one rank; several: weights-00001-of-00004.safetensors …
       optimizer.safetensors, ema.safetensors …
       state.json                           everything that is not a tensor of a part
       MANIFEST.json                        sizes and checksums (`folder.py`)

A checkpoint depends neither on the strategy nor on the world size, so that a run continues with any other. Which rank
wrote a tensor does not matter to a reader.

Lightning saves and resumes by `Trainer.save_checkpoint` and `Trainer.fit(ckpt_path=...)`, in a format per strategy and
with hooks for weights and optimizer in the strategies. This trainer uses neither: `training_state` and
`restore_training_state` call the same hooks of callbacks, module, data module, loops and precision plugin
as Lightning's `_CheckpointConnector` (2.6), through public names. `tests/unit/test_lightning_internals.py` tests
what they rely on: `on_fit_start` comes after the strategy's setup and before the loops, and a loop that loaded its
state continues from there.
"""

import errno
import json
import re
from collections import ChainMap, OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sd_training.checkpoint import folder as sealed
from sd_training.errors import CheckpointError
from sd_training.parallel.strategies import CpuGroup, ParameterSharding, strategy_of

WEIGHTS, OPTIMIZER = "weights", "optimizer"
"""Parts of every checkpoint; averages are further ones."""
_STATE = "state.json"
_FORMAT = 3
_LOSS_SCALE = "deepspeed_loss_scale"
_TENSOR_FILE = re.compile(r"(.+?)(-\d{5}-of-\d{5})?\.safetensors")


def save_checkpoint(
    folder: Path,
    trainer: pl.Trainer,
    averages: Mapping[str, Mapping[str, Tensor]],
    info: Mapping[str, Any],
    run_lock: sealed.RunLock,
    *,
    asynchronous: bool = False,
) -> Callable[[], None]:
    """Collective: begins to save everything that training continues from as `folder`.

    Args:
        folder: `…/step=N`.
        trainer: in fit.
        averages: part of the checkpoint → trained parameter of the module → this rank's shard of its average.
        info: JSON for the manifest, that of rank 0.
        run_lock: of this start of the run; rank 0 checks it.
        asynchronous: copy to CPU memory, as much as this rank's part of the checkpoint takes on disk.

    Returns:
        What is left to do, unless an intact checkpoint is there; it is collective and seals the checkpoint. To be done
        at once, unless `asynchronous`: then it uses the CPU group only, so that a thread may do it while the device
        trains; nothing else may use the group meanwhile.

    Raises:
        OSError: some rank could not write; names folder and free space. No file gets its final name, older checkpoints
            are intact. What is left to do raises the same.
        TakenOverError: another start has taken the run over.
    """
    module, sharding, group = trainer.lightning_module, strategy_of(trainer).sharding, strategy_of(trainer).cpu_group
    state = training_state(trainer)
    with _failure_named(folder):
        begun = group.on_rank0(lambda: str(sealed.begin_partial(folder.parent, sealed.step_of(folder), run_lock) or ""))
    if not begun:
        return lambda: None
    partial = Path(begun)
    if scale := sharding.loss_scale():
        state[_LOSS_SCALE] = scale
    streams = _full_tensors(module, sharding, averages, state)
    parts = ((part, _local_share(stream, group, is_copied=asynchronous)) for part, stream in streams.items())
    if asynchronous:
        copies = dict(parts)  # this also completes the state
        parts = ((part, copies.pop(part)) for part in list(copies))  # frees memory part by part
        state = deepcopy(state)

    def seal() -> None:
        write_state(partial, state)
        sealed.seal_partial(partial, info, run_lock)

    def write() -> None:
        failure: OSError | None = None
        try:
            with _failure_named(folder):
                for part, tensors in parts:  # gathers may be collective: they continue after a failure
                    try:
                        if failure is None:
                            write_tensors(partial, part, tensors, group.rank, group.world_size)
                    except OSError as error:
                        failure = error
                group.raise_first(failure)
                group.on_rank0(seal)
        except BaseException:
            if group.rank == 0:
                sealed.remove_quietly(partial)
            raise

    return write


def _full_tensors(
    module: nn.Module, sharding: ParameterSharding, averages: Mapping[str, Mapping[str, Tensor]], state: dict[str, Any]
) -> dict[str, Iterator[tuple[str, Tensor]]]:
    """Part of the checkpoint → its full tensors by name, which are collective to gather. Those of the optimizer add
    what is not a tensor to `state`."""
    trained = _trained(module)
    groups = [{k: v for k, v in own.items() if k != "params"} for own in sharding.optimizer.param_groups]
    state_of_parameters: dict[str, str] = {}  # as JSON, to which the part's tensors are joined
    state[OPTIMIZER] = {"groups": groups, "state": state_of_parameters}

    def weights() -> Iterator[tuple[str, Tensor]]:
        for name, value in nn.Module.state_dict(module, keep_vars=True).items():
            if name in trained:
                yield name, sharding.full_tensor(trained[name])
            elif not isinstance(value, nn.Parameter):  # frozen weights are what they were at the start
                yield name, value.full_tensor() if isinstance(value, DTensor) else value

    def optimizer_tensors() -> Iterator[tuple[str, Tensor]]:
        for name, parameter in trained.items():
            plain, tensors = split_tensors({name: sharding.full_state(parameter)})
            state_of_parameters[name] = json.dumps(plain[name])
            yield from tensors.items()

    def average(shards: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        return ((name, sharding.gather(trained[name], shard)) for name, shard in shards.items())

    return {
        WEIGHTS: weights(),
        OPTIMIZER: optimizer_tensors(),
        **{part: average(shards) for part, shards in averages.items()},
    }


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint on disk; tensors are read when they are used."""

    state: dict[str, Any]
    """Everything that is not a tensor of a part."""
    parts: dict[str, Mapping[str, Tensor]]

    def averages(self) -> dict[str, Mapping[str, Tensor]]:
        """Part → full tensors by parameter."""
        return {part: tensors for part, tensors in self.parts.items() if part not in (WEIGHTS, OPTIMIZER)}

    def for_new_run(self, reset: Collection[str], data: str, average: str | None) -> "StoredCheckpoint":
        """What a run of another name begins with (`experiment.reset`): without the parts that begin anew, and with
        their step and requirements.

        Args:
            reset: of optimizer, ema, data.
            data: the data's entry of the state.
            average: part that is taken as weights; None: the raw ones.

        Raises:
            CheckpointError: there is no such average.
        """
        state, parts = dict(self.state), dict(self.parts)
        if average is not None:
            if average not in parts:
                raise CheckpointError("experiment.start_from_average: the checkpoint has no average; leave it out")
            # Buffers have no average.
            parts[WEIGHTS] = ChainMap(parts[average], parts[WEIGHTS])  # type: ignore[arg-type]  # it is only read
        if "ema" in reset:
            parts = {part: tensors for part, tensors in parts.items() if part in (WEIGHTS, OPTIMIZER)}
        if "optimizer" in reset:
            del state[OPTIMIZER]
            required = state["trained_as"].items()
            state["trained_as"] = {key: value for key, value in required if not key.startswith("optimizer.")}
        if "data" in reset:
            state |= {"global_step": 0, data: {}}
        return replace(self, state=state, parts=parts)


def open_checkpoint(folder: Path) -> StoredCheckpoint:
    """A checkpoint's state, and access to its tensors; nothing but tensors and JSON is ever read.

    Raises:
        CheckpointError: the folder is of another format.
    """
    try:
        document = json.loads((folder / _STATE).read_text(encoding="utf-8"))
        if document["format"] != _FORMAT:
            remedy = "end the run with the version that began it, or begin another from its current_pipeline"
            raise ValueError(f"format {document['format']!r}; this version reads format {_FORMAT}: {remedy}")
        paths: dict[str, list[Path]] = {}
        for name in sealed.read_manifest(folder).files:
            if found := _TENSOR_FILE.fullmatch(name):
                paths.setdefault(found[1], []).append(folder / name)
        parts: dict[str, Mapping[str, Tensor]] = {part: StoredTensors(files) for part, files in paths.items()}
        state: dict[str, Any] = join_tensors(document["checkpoint"], dict(parts.pop("state", {})))
    except (OSError, LookupError, TypeError, ValueError, AttributeError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"checkpoint {folder} is of another format: {error}") from error
    return StoredCheckpoint(state, parts)


def load_checkpoint(stored: StoredCheckpoint, trainer: pl.Trainer) -> None:
    """Collective: module, optimizer and gradient scaler continue from the checkpoint's weights, buffers and state.
    Options that an optimizer's group takes from the config stay as the config has them.

    Raises:
        CheckpointError: the checkpoint belongs to another network.
    """
    module, sharding = trainer.lightning_module, strategy_of(trainer).sharding
    weights: Mapping[str, Tensor] = stored.parts.get(WEIGHTS, {})
    trained, problem = _trained(module), "the checkpoint belongs to another network: "
    state = nn.Module.state_dict(module, keep_vars=True)
    own = {n: value for n, value in state.items() if n in trained or not isinstance(value, nn.Parameter)}
    if odd := sorted((set(own) ^ set(weights)) - (set(state) - set(own))):  # older versions stored frozen weights, too
        raise CheckpointError(f"{problem}{len(odd)} names of weights differ, e.g. {odd[0]}")
    for name, value in own.items():
        full = weights[name]
        if name in trained:
            shape = sharding.full_shape(trained[name])
            if full.shape != shape:
                raise CheckpointError(f"{problem}{name} is {tuple(full.shape)}, now {tuple(shape)}")
            sharding.load(trained[name], full.to(trained[name].device))
        else:
            value.detach().copy_(full)
    if OPTIMIZER not in stored.state:  # it begins anew
        return
    names = {id(parameter): name for name, parameter in trained.items()}
    optimizer = stored.state[OPTIMIZER]
    tensors: Mapping[str, Tensor] = stored.parts.get(OPTIMIZER, {})

    def state_of(parameter: nn.Parameter) -> dict[str, Any]:
        return dict(join_tensors(json.loads(optimizer["state"].get(names[id(parameter)], "{}")), tensors))

    sharding.load_optimizer(trained.values(), state_of, optimizer["groups"])
    sharding.load_loss_scale(stored.state.get(_LOSS_SCALE, {}))
    precision = trainer.precision_plugin  # with the loss scale of fp16
    if own_state := stored.state.get(type(precision).__qualname__):
        precision.load_state_dict(own_state)


def load_into(module: nn.Module, weights: Mapping[str, Tensor], name: str) -> None:
    """Into a module without a trainer, on one device. Frozen weights are what they were at the start: a checkpoint does
    not hold them.

    Args:
        name: of the checkpoint, for the error.

    Raises:
        CheckpointError: it belongs to another network.
    """
    frozen = {own for own, parameter in module.named_parameters() if not parameter.requires_grad}
    try:
        missing, unexpected = module.load_state_dict(dict(weights), strict=False)
        if odd := sorted({*unexpected, *missing} - frozen):
            raise RuntimeError(f"{len(odd)} names of weights differ, e.g. {odd[0]}")
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(f"{name}: its weights do not fit the model of these options: {reason}") from error


@contextmanager
def _failure_named(folder: Path) -> Iterator[None]:
    """Errors of the disk name the checkpoint, its folder and the free space."""
    try:
        yield
    except OSError as error:
        raise sealed.write_failure(f"checkpoint {folder.name}", folder.parent, error) from error


def _trained(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def _local_share(stream: Iterator[tuple[str, Tensor]], group: CpuGroup, *, is_copied: bool) -> dict[str, Tensor]:
    """This rank's share of a stream of full tensors: each goes to the rank with the fewest bytes so far.

    Args:
        is_copied: on the CPU, in its own memory.
    """
    loads, share = [0] * group.world_size, {}
    for name, tensor in stream:
        writer = loads.index(min(loads))
        loads[writer] += tensor.numel() * tensor.element_size()
        if writer == group.rank:
            is_view_enough = group.world_size == 1 and not is_copied
            share[name] = tensor if is_view_enough else tensor.detach().to("cpu", copy=True)
    return share


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
        return self._file_of[name].get_tensor(name).clone()

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
        plain = tensor.detach().cpu().contiguous()
        address = plain.untyped_storage().data_ptr()
        stored[name] = plain.clone() if address and address in seen else plain
        seen.add(address)
    number = "" if world_size == 1 else f"-{rank + 1:05d}-of-{world_size:05d}"
    try:
        save_file(stored, folder / f"{part}{number}.safetensors")
    except SafetensorError as error:  # the library's I/O errors are no OSErrors
        raise sealed.system_error(error) or OSError(errno.EIO, str(error)) from error


def write_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Writes what is not a tensor of a part.

    Args:
        state: what `split_tensors` takes; the few tensors in it are stored beside it.

    Raises:
        TypeError: it holds something else, with its path.
    """
    plain, tensors = split_tensors(dict(state))
    write_tensors(folder, "state", tensors, 0, 1)
    (folder / _STATE).write_text(json.dumps({"format": _FORMAT, "checkpoint": plain}), encoding="utf-8")


def training_state(trainer: pl.Trainer) -> dict[str, Any]:
    """Everything but weights and optimizer state. Collective where a callback's `on_save_checkpoint` is."""
    lightning: Any = trainer  # its type lacks attributes that it has
    state: dict[str, Any] = {
        "global_step": trainer.global_step,
        "loops": {"fit_loop": trainer.fit_loop.state_dict()},
        "callbacks": {callback.state_key: own for callback in lightning.callbacks if (own := callback.state_dict())},
    }
    for part in (lightning.datamodule, trainer.precision_plugin):
        if part is not None and (own := part.state_dict()):
            state[type(part).__qualname__] = own
    for callback in lightning.callbacks:
        callback.on_save_checkpoint(trainer, trainer.lightning_module, state)
    trainer.lightning_module.on_save_checkpoint(state)
    return state


def restore_training_state(trainer: pl.Trainer, state: dict[str, Any]) -> None:
    """The inverse of `training_state`; to be called in `on_fit_start`, after `load_checkpoint`."""
    lightning: Any = trainer
    if own := state.get(type(lightning.datamodule).__qualname__):
        lightning.datamodule.load_state_dict(own)
    for callback in lightning.callbacks:
        callback.on_load_checkpoint(trainer, trainer.lightning_module, state)
        if own := state["callbacks"].get(callback.state_key):
            callback.load_state_dict(own)
    # Progress is counted in optimizer steps; Lightning also stores micro-batches, which mean something else after a
    # change of `system.gradient_accumulation`.
    loop, micro_batches = state["loops"]["fit_loop"], state["global_step"] * trainer.accumulate_grad_batches
    progress = loop["epoch_loop.batch_progress"]
    for counts in (progress["total"], progress["current"]):
        counts |= {"ready": micro_batches, "started": micro_batches, "processed": micro_batches}
        # Saved inside on_train_batch_end, where Lightning has not yet counted the batch as completed.
        counts["completed"] = micro_batches - 1
    progress["is_last_batch"] = False
    trainer.fit_loop.load_state_dict(loop)


def split_tensors(state: Any) -> tuple[Any, dict[str, Tensor]]:
    """Nested state as JSON plus named tensors: exactly, and without pickle.

    A tensor becomes `{"$tensor": name}`, a tuple `{"$tuple": [...]}`.

    Args:
        state: dict and OrderedDict with texts as keys, list, tuple, None, bool, int, float, str and tensors, nested
            freely.

    Returns:
        What `json.dumps` takes, and the tensors by name: those of `state`, not copies. A name is the tensor's
        path joined by `/`.

    Raises:
        TypeError: a value of another type, with its path.
    """
    tensors: dict[str, Tensor] = {}
    return _encode(state, (), tensors), tensors


def join_tensors(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The inverse of `split_tensors`; an OrderedDict comes back as a dict in the same order.

    Raises:
        LookupError, TypeError: `value` was not made by `split_tensors`, or a tensor that it names is missing.
    """
    if isinstance(value, list):
        return [join_tensors(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if "$tensor" in value:
        return tensors[value["$tensor"]]
    if "$tuple" in value:
        return tuple(join_tensors(value["$tuple"], tensors))
    return {key: join_tensors(item, tensors) for key, item in value.items()}


def _encode(value: Any, path: tuple[str, ...], tensors: dict[str, Tensor]) -> Any:
    kind = type(value)  # exact types: a subclass would come back as its base
    if kind in (type(None), bool, int, float, str):
        return value
    if kind in (list, tuple):
        items = [_encode(item, (*path, str(i)), tensors) for i, item in enumerate(value)]
        return items if kind is list else {"$tuple": items}
    if kind in (dict, OrderedDict) and all(type(key) is str and not key.startswith("$") for key in value):
        return {key: _encode(item, (*path, key), tensors) for key, item in value.items()}
    if kind in (Tensor, nn.Parameter):
        name = "/".join(path)
        while name in tensors:  # `{"a/b": x, "a": {"b": y}}` has two tensors of one path
            name += "~"
        tensors[name] = value
        return {"$tensor": name}
    raise TypeError(
        f"{'/'.join(path) or 'the state'} is a {kind.__module__}.{kind.__qualname__}; a checkpoint holds tensors, "
        "numbers, text, None, and lists, tuples and dicts by text of these"
    )
