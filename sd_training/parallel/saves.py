"""Saving and resuming that every strategy shares: all processes take part, whole tensors are put together one at a
time, each process writes its share of them, the first one seals the folder.

Lightning saves on the first process only, in as many formats as it has strategies. Here a checkpoint says nothing about
the strategy or the number of processes that made it, so any other can go on from it.

One checkpoint on its way to disk: the files of each process, what all processes say of them, the seal.

All ranks resume from the same checkpoint: the first one verifies and chooses, the others follow.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from sd_training.checkpoint.folder import (
    begin_partial,
    folder_name,
    newest_verified,
    remove_partial,
    remove_partial_after,
    seal_partial,
    step_of,
)
from sd_training.checkpoint.run_lock import NO_LOCK, RunLock
from sd_training.checkpoint.tensors import (
    StoredTensors,
    join_tensors,
    read_state,
    split_tensors,
    write_state,
    write_tensors,
)
from sd_training.errors import CheckpointError
from sd_training.log import get_logger
from sd_training.parallel.cpu_group import CpuGroup
from sd_training.parallel.sharding import ParameterSharding, bytes_here


class Sealing:
    """What every strategy does between the first file and the seal. Nothing is left behind when it fails.

    Args:
        folder: the checkpoint, `step=N`.
        cpu_group: the processes that write it.
        run_lock: of this start of the run; the first process asks it.
    """

    def __init__(self, folder: Path, cpu_group: CpuGroup, run_lock: RunLock) -> None:
        self.root, self.step, self.cpu_group = folder.parent, step_of(folder), cpu_group
        self.run_lock = run_lock
        self._partial = Path()
        self._failure: OSError | None = None

    def begin(self, bytes_here: int) -> bool:
        """Collective: makes the folder to write into; false when this checkpoint is there already.

        Args:
            bytes_here: what this process is about to write, for the look at the free space.

        Raises:
            OSError: it cannot be made, or too little space is free; names both figures.
            TakenOverError: another start has the run.
        """
        needed_bytes = sum(self.cpu_group.all_gather(bytes_here))

        def make() -> str | None:
            partial = begin_partial(self.root, self.step, needed_bytes, self.run_lock)
            return None if partial is None else str(partial)

        made = self._on_first(make)
        self._partial = Path(made or "")
        return made is not None

    def write(self, part: str, tensors: Mapping[str, Tensor]) -> None:
        """This process's tensors of a part. after a failure nothing more is written; `seal` reports it."""
        if self._failure is not None:
            return
        try:
            write_tensors(self._partial, part, tensors, self.cpu_group.rank, self.cpu_group.count)
        except OSError as error:
            self._failure = error

    def finish(self, state: Mapping[str, Any], info: Mapping[str, Any]) -> None:
        """Collective: all files are there, flushed, hashed, read back and under their final name, or none is.

        Args:
            state: what is not a tensor of a part; the first process's is stored.
            info: JSON for the manifest, of the first process.

        Raises:
            OSError: some process could not write; names folder and free space.
            TakenOverError: another start has the run.
        """
        self._agree(self._failure)

        def seal_it() -> None:
            write_state(self._partial, state)
            seal_partial(self._partial, info, self.run_lock)

        self._on_first(seal_it)

    def _on_first(self, act: Callable[[], Any]) -> Any:
        """The first process acts, and tidies up when it fails."""

        def tidied() -> Any:
            with self._tidied():
                return act()

        return self.cpu_group.on_rank0(tidied)

    def _agree(self, failure: OSError | None) -> None:
        """All fail when one does; the first one tidies up."""
        with self._tidied():
            self.cpu_group.raise_first(failure)

    @contextmanager
    def _tidied(self) -> Iterator[None]:
        """Where the first process fails, what was written is removed, and the error names folder and free space."""
        try:
            yield
        except OSError as error:
            if self.cpu_group.rank == 0:
                raise remove_partial_after(self.root, self.step, error, self.run_lock) from error
            raise
        except BaseException:
            if self.cpu_group.rank == 0:
                remove_partial(self.root, self.step, self.run_lock)
            raise


def choose_checkpoint(root: Path, cpu_group: CpuGroup) -> Path:
    """Collective: the newest verified checkpoint below `root`, the same on every process.

    Raises:
        CheckpointError: none of them verifies; with the same words on every process.
    """
    return root / folder_name(cpu_group.on_rank0(lambda: _choose(root)))


def _choose(root: Path) -> int:
    newest = newest_verified(root)
    if newest is None:
        raise CheckpointError(f"{root}: no checkpoint was ever finished")
    return step_of(newest)


log = get_logger(__name__)

AVERAGES = "averages"
"""Key of a checkpoint on its way to and from callbacks: part → parameter → share (saving), whole tensor (loading)."""
_WEIGHTS, _OPTIMIZER = "weights", "optimizer"


class WholeCheckpoints:
    """Mixed into Lightning's strategies.

    Attributes:
        sharding: where weights and optimizer state lie; known once the strategy is set up.
        has_collective_forward: whether a forward pass of the network is a collective operation.
        does_clip: whether the engine clips gradients and skips non-finite steps itself.
    """

    has_collective_forward = False
    does_clip = False
    tensor_parallel_size = 1
    """Processes that draw the same samples."""
    num_replicas = 1
    """Copies of all weights that are updated alike, from the same averaged gradients."""
    run_lock = NO_LOCK
    """Of this start of the run, on the first process."""
    collective_timeout: timedelta | None = None
    """How long processes wait for each other; null: as long as torch likes."""

    asynchronous = False
    """Whether `save_checkpoint` only copies, and `take_pending_write` gives what writes: as much CPU memory as this
    process's part of a checkpoint takes on disk."""

    global_rank: int
    world_size: int
    lightning_module: pl.LightningModule
    optimizers: list[torch.optim.Optimizer]
    _sharding: ParameterSharding | None = None
    _cpu_group: CpuGroup | None = None
    _unwritten: Callable[[], None] | None = None

    @property
    def sharding(self) -> ParameterSharding:
        """Where weights and optimizer state lie."""
        if self._sharding is None:
            self._sharding = self.make_sharding()
        return self._sharding

    def make_sharding(self) -> ParameterSharding:
        """Called once, after the engine was set up."""
        raise NotImplementedError

    @property
    def data_rank(self) -> int:
        """Which share of a global batch this process draws."""
        return self.global_rank // self.tensor_parallel_size

    @property
    def data_ranks(self) -> int:
        """Shares that a global batch is cut into."""
        return self.world_size // self.tensor_parallel_size

    def split_over_ranks(self, count: int) -> tuple[list[int], int]:
        """Which of `count` things this process does when they are dealt out, and how many fewer these are than those of
        the process that does most."""
        own = list(range(self.data_rank, count, self.data_ranks))
        return own, -(-count // self.data_ranks) - len(own)

    # Lightning asks these; weights and optimizer state travel by `save_checkpoint` and the two `load_…` below.

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Weights are loaded into the places that the engine gives them."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """`load_optimizer_state_dict` is to be called."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Nothing yet: see `save_checkpoint`."""
        return {}

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Nothing yet: see `save_checkpoint`."""
        return {}

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Collective: seals `checkpoint`, with weights, optimizer state and averages, as the folder `step=N`.

        Args:
            checkpoint: what Lightning and the callbacks keep.
            filepath: `…/step=N`.
            storage_options: JSON for the manifest (`seal.read_info`).

        Raises:
            OSError: a process could not write; names folder and free space. Older checkpoints are intact.
        """
        state = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
        averages: Mapping[str, Mapping[str, Tensor]] = state.pop(AVERAGES, {})
        sealing = Sealing(Path(filepath), self.cpu_group, self.run_lock)
        if not sealing.begin(self._bytes_here(averages)):
            return
        described: dict[str, Any] = {}
        state |= {_OPTIMIZER: described, AVERAGES: sorted(averages)}
        parts = self._parts(averages, described)
        if not self.asynchronous:
            for part, tensors in parts.items():
                sealing.write(part, self._dealt(tensors))
            sealing.finish(state, storage_options or {})
            return
        copies = {part: self._dealt(tensors, is_copied=True) for part, tensors in parts.items()}
        self._unwritten = partial(_write, sealing, copies, deepcopy(state), storage_options or {})

    def take_pending_write(self) -> Callable[[], None]:
        """What the last save left to do, where `asynchronous`: collective, and of no use of the training's tensors,
        so that a thread may do it. Nothing else may use `cpu_group` meanwhile. Errors as in `save_checkpoint`."""
        unwritten, self._unwritten = self._unwritten, None
        return unwritten or (lambda: None)

    @property
    def cpu_group(self) -> CpuGroup:
        """The processes of the run; the first use is collective."""
        if self._cpu_group is None:
            self._cpu_group = CpuGroup(self.global_rank, self.world_size, self.collective_timeout)
        return self._cpu_group

    def _parts(
        self, averages: Mapping[str, Mapping[str, Tensor]], described: dict[str, Any]
    ) -> dict[str, Iterator[tuple[str, Tensor]]]:
        """Collective streams of whole tensors; fills `described` with how the optimizer's state is made of them."""
        return {
            _WEIGHTS: self._weights(),
            _OPTIMIZER: self._optimizer_tensors(described),
            **{part: self._average(shares) for part, shares in averages.items()},
        }

    def _bytes_here(self, averages: Mapping[str, Mapping[str, Tensor]]) -> int:
        """What this process adds to a checkpoint [bytes]; all processes together give its size."""
        sharding, trained = self.sharding, self._trained()
        weights = sum(bytes_here([sharding.local_shard(p)]) // sharding.copies(p) for p in trained.values())
        shares = sum(
            bytes_here([share]) // sharding.copies(trained[name])
            for average in averages.values()
            for name, share in average.items()
        )
        own = nn.Module.state_dict(self.lightning_module, keep_vars=True)
        unchanged = sum(value.numel() * value.element_size() for name, value in own.items() if name not in trained)
        return weights + sharding.state_bytes() + shares + (unchanged if self.global_rank == 0 else 0)

    def _dealt(self, tensors: Iterator[tuple[str, Tensor]], *, is_copied: bool = False) -> dict[str, Tensor]:
        """This process's share of a stream of whole tensors: each goes to the process that has least so far.

        Args:
            tensors: by name.
            is_copied: on the CPU, and nobody else's memory.
        """
        loads, kept = [0] * self.world_size, {}
        for name, tensor in tensors:
            writer = loads.index(min(loads))
            loads[writer] += tensor.numel() * tensor.element_size()
            if writer == self.global_rank:
                kept[name] = tensor if self.world_size == 1 and not is_copied else tensor.detach().to("cpu", copy=True)
        return kept

    def _trained(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.lightning_module.named_parameters() if p.requires_grad}

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        """Trained parameters, whole; frozen ones and buffers are the same everywhere."""
        trained = self._trained()
        for name, parameter in trained.items():
            yield name, self.sharding.full_tensor(parameter)
        yield from self._unchanged(trained)

    def _unchanged(self, trained: Mapping[str, nn.Parameter]) -> Iterator[tuple[str, Tensor]]:
        for name, value in nn.Module.state_dict(self.lightning_module, keep_vars=True).items():
            if name not in trained:
                yield name, value.full_tensor() if hasattr(value, "full_tensor") else value.detach()

    def _optimizer_tensors(self, described: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
        """Tensors of the optimizer's state; fills `described` with what they are put together to."""
        groups = self.sharding.groups()
        described["groups"] = [{k: v for k, v in group.items() if k != "params"} for group in groups]
        described["state"] = {}
        for name, parameter in self._trained().items():
            plain, tensors = split_tensors({name: self.sharding.full_state(parameter)})
            described["state"] |= plain
            yield from tensors.items()

    def _average(self, shares: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._trained().items():
            if name in shares:
                yield name, self.sharding.gather(parameter, shares[name])

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """The newest checkpoint below `checkpoint_path` that verifies, the same on every process; tensors are read when
        they are asked for.

        Raises:
            CheckpointError: none of them verifies, or it is of another format.
        """
        chosen = choose_checkpoint(Path(checkpoint_path), self.cpu_group)
        log.info(f"resuming from {chosen}")
        return self.open_checkpoint(chosen)

    def open_checkpoint(self, folder: Path) -> dict[str, Any]:
        """What `load_model_state_dict`, `load_optimizer_state_dict` and the averages go on from.

        Raises:
            CheckpointError: it is of another format.
        """
        checkpoint, stored = read_state(folder)
        checkpoint["state_dict"] = stored.get(_WEIGHTS, StoredTensors([]))
        checkpoint["optimizer_states"] = [(checkpoint.pop(_OPTIMIZER), stored.get(_OPTIMIZER, StoredTensors([])))]
        checkpoint[AVERAGES] = {part: stored[part] for part in checkpoint[AVERAGES] if part in stored}
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Collective: weights and buffers.

        Raises:
            CheckpointError: they belong to another network.
        """
        stored: Mapping[str, Tensor] = checkpoint["state_dict"]
        own = nn.Module.state_dict(self.lightning_module, keep_vars=True)
        if odd := sorted(set(own) ^ set(stored)):
            raise CheckpointError(
                f"the checkpoint belongs to another network: {len(odd)} names of weights differ, e.g. {odd[0]}"
            )
        trained = self._trained()
        for name, value in own.items():
            whole = stored[name]
            if name in trained:
                _check_shape(name, whole, trained[name])
                self.sharding.load(trained[name], whole.to(trained[name].device))
            elif not hasattr(value, "full_tensor"):  # frozen weights in blocks are what they were at the start
                value.detach().copy_(whole)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Collective: the optimizer's state; what a group takes from the options stays as the options say."""
        described, tensors = checkpoint["optimizer_states"][0]
        names = {id(parameter): name for name, parameter in self._trained().items()}

        def state_of(parameter: nn.Parameter) -> dict[str, Any]:
            state: dict[str, Any] = join_tensors(described["state"].get(names[id(parameter)], {}), tensors)
            return state

        self.sharding.load_optimizer(self._trained().values(), state_of, described["groups"])


def _write(
    sealing: Sealing, copies: dict[str, dict[str, Tensor]], state: Mapping[str, Any], info: Mapping[str, Any]
) -> None:
    """Memory is given back part by part."""
    for part in list(copies):
        sealing.write(part, copies.pop(part))
    sealing.finish(state, info)


def _check_shape(name: str, whole: Tensor, parameter: nn.Parameter) -> None:
    shape = getattr(parameter, "ds_shape", parameter.shape)
    if whole.shape != shape:
        raise CheckpointError(
            f"the checkpoint belongs to another network: {name} is {tuple(whole.shape)}, now {tuple(shape)}"
        )
