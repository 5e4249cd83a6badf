"""Saving and resuming that every strategy shares: all processes take part, whole tensors are put together one at a
time, each process writes its share of them, the first one seals the folder.

Lightning saves on the first process only, in as many formats as it has strategies. Here a checkpoint says nothing about
the strategy or the number of processes that made it, so any other can go on from it.
"""

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from sd_training.checkpoint import codec
from sd_training.checkpoint.tensor_files import StoredTensors, read_state
from sd_training.checkpoint.writer import UNFENCED
from sd_training.distributed.peers import Peers
from sd_training.distributed.placement import Placement, bytes_here
from sd_training.distributed.resume import choose_checkpoint
from sd_training.distributed.sealing import Sealing
from sd_training.errors import CheckpointError

AVERAGES = "averages"
"""Key of a checkpoint on its way to and from callbacks: part → parameter → share (saving), whole tensor (loading)."""
_WEIGHTS, _OPTIMIZER = "weights", "optimizer"


class WholeCheckpoints:
    """Mixed into Lightning's strategies.

    Attributes:
        placement: where weights and optimizer state lie; known once the strategy is set up.
        has_collective_forward: whether a forward pass of the network is a collective operation.
        does_clip: whether the engine clips gradients and skips non-finite steps itself.
    """

    has_collective_forward = False
    does_clip = False
    ranks_per_share = 1
    """Processes that draw the same samples."""
    num_replicas = 1
    """Copies of all weights that are updated alike, from the same averaged gradients."""
    fence = UNFENCED
    """Of this start of the run, on the first process."""
    collective_timeout: timedelta | None = None
    """How long processes wait for each other; null: as long as torch likes."""

    is_written_later = False
    """Whether `save_checkpoint` only copies, and `take_unwritten` gives what writes: as much memory on the CPU as this
    process's part of a checkpoint takes on disk."""

    global_rank: int
    world_size: int
    lightning_module: pl.LightningModule
    optimizers: list[torch.optim.Optimizer]
    _placement: Placement | None = None
    _peers: Peers | None = None
    _unwritten: Callable[[], None] | None = None

    @property
    def placement(self) -> Placement:
        """Where weights and optimizer state lie."""
        if self._placement is None:
            self._placement = self.make_placement()
        return self._placement

    def make_placement(self) -> Placement:
        """Called once, after the engine was set up."""
        raise NotImplementedError

    @property
    def data_rank(self) -> int:
        """Which share of a global batch this process draws."""
        return self.global_rank // self.ranks_per_share

    @property
    def data_ranks(self) -> int:
        """Shares that a global batch is cut into."""
        return self.world_size // self.ranks_per_share

    def dealt(self, count: int) -> tuple[list[int], int]:
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
        sealing = Sealing(Path(filepath), self.peers, self.fence)
        if not sealing.begin(self._bytes_here(averages)):
            return
        described: dict[str, Any] = {}
        state |= {_OPTIMIZER: described, AVERAGES: sorted(averages)}
        parts = self._parts(averages, described)
        if not self.is_written_later:
            for part, tensors in parts.items():
                sealing.write(part, self._dealt(tensors))
            sealing.finish(state, storage_options or {})
            return
        copies = {part: self._dealt(tensors, is_copied=True) for part, tensors in parts.items()}
        self._unwritten = partial(_write, sealing, copies, deepcopy(state), storage_options or {})

    def take_unwritten(self) -> Callable[[], None]:
        """What the last save left to do, where `is_written_later`: collective, and of no use of the training's tensors,
        so that a thread may do it. Nothing else may use `peers` meanwhile. Errors as in `save_checkpoint`."""
        unwritten, self._unwritten = self._unwritten, None
        return unwritten or (lambda: None)

    @property
    def peers(self) -> Peers:
        """The processes of the run; the first use is collective."""
        if self._peers is None:
            self._peers = Peers(self.global_rank, self.world_size, self.collective_timeout)
        return self._peers

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
        placement, trained = self.placement, self._trained()
        weights = sum(bytes_here([placement.share(p)]) // placement.copies(p) for p in trained.values())
        shares = sum(
            bytes_here([share]) // placement.copies(trained[name])
            for average in averages.values()
            for name, share in average.items()
        )
        own = nn.Module.state_dict(self.lightning_module, keep_vars=True)
        unchanged = sum(value.numel() * value.element_size() for name, value in own.items() if name not in trained)
        return weights + placement.state_bytes() + shares + (unchanged if self.global_rank == 0 else 0)

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
            yield name, self.placement.whole(parameter)
        yield from self._unchanged(trained)

    def _unchanged(self, trained: Mapping[str, nn.Parameter]) -> Iterator[tuple[str, Tensor]]:
        for name, value in nn.Module.state_dict(self.lightning_module, keep_vars=True).items():
            if name not in trained:
                yield name, value.full_tensor() if hasattr(value, "full_tensor") else value.detach()

    def _optimizer_tensors(self, described: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
        """Tensors of the optimizer's state; fills `described` with what they are put together to."""
        groups = self.placement.groups()
        described["groups"] = [{k: v for k, v in group.items() if k != "params"} for group in groups]
        described["state"] = {}
        for name, parameter in self._trained().items():
            plain, tensors = codec.split({name: self.placement.whole_state(parameter)})
            described["state"] |= plain
            yield from tensors.items()

    def _average(self, shares: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._trained().items():
            if name in shares:
                yield name, self.placement.gather(parameter, shares[name])

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """The newest checkpoint below `checkpoint_path` that verifies, the same on every process; tensors are read when
        they are asked for.

        Raises:
            CheckpointError: none of them verifies, or it is of another format.
        """
        return self.open_checkpoint(choose_checkpoint(Path(checkpoint_path), self.peers))

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
                self.placement.load(trained[name], whole.to(trained[name].device))
            elif not hasattr(value, "full_tensor"):  # frozen weights in blocks are what they were at the start
                value.detach().copy_(whole)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Collective: the optimizer's state; what a group takes from the options stays as the options say."""
        described, tensors = checkpoint["optimizer_states"][0]
        names = {id(parameter): name for name, parameter in self._trained().items()}

        def state_of(parameter: nn.Parameter) -> dict[str, Any]:
            state: dict[str, Any] = codec.join(described["state"].get(names[id(parameter)], {}), tensors)
            return state

        self.placement.load_optimizer(self._trained().values(), state_of, described["groups"])


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
