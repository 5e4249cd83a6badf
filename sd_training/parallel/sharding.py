"""Where trained weights and optimizer state lie, behind one interface that averages, checkpoints and exports use.

A *local shard* is the part of a parameter that a rank averages and stores: a whole tensor assigned to it (replicas),
its block of a DTensor (FSDP2: Zhao et al. 2023, arXiv:2304.11277, rewritten per parameter; tensor parallelism: Shoeybi
et al. 2019, arXiv:1909.08053), or a run of its elements (DeepSpeed's ZeRO, `deepspeed.py`). Checkpoints and exports
hold full tensors, gathered one at a time, so they mean the same under every strategy and world size.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

StateOf = Callable[[nn.Parameter], dict[str, Any]]
"""Parameter → its optimizer state in full tensors, as a checkpoint holds it; empty for none."""
_OF_THIS_RUN = {
    *("params", "fused", "foreach", "capturable", "differentiable"),
    *("lr_factor", "weight_decay", "betas", "eps", "momentum", "d_coef"),
}
"""Keys of an optimizer's groups that follow from the device, the strategy and the options of this run."""


class ParameterSharding(Protocol):
    """How parameters are distributed over the ranks. Collective methods are called by all ranks in the same order."""

    optimizer: torch.optim.Optimizer
    """Updates the local shards; inside the engine, where there is one."""

    def local_shard(self, parameter: nn.Parameter) -> Tensor:
        """This rank's part of the weights that training updates; empty for none. A view."""

    def shard_of(self, parameter: nn.Parameter, full: Tensor) -> Tensor:
        """This rank's part of a tensor of the parameter's full shape, cut as `local_shard` is."""

    def gather(self, parameter: nn.Parameter, shard: Tensor) -> Tensor:
        """Collective: the full tensor, on the parameter's device, from a tensor cut like `local_shard` on each rank."""

    def full_tensor(self, parameter: nn.Parameter) -> Tensor:
        """Collective: the full tensor of the weights that training updates."""
        return self.gather(parameter, self.local_shard(parameter))

    def full_shape(self, parameter: nn.Parameter) -> torch.Size:
        """Shape of the full tensor."""
        return parameter.shape

    def backup(self, parameter: nn.Parameter) -> Tensor | None:
        """What `restore` needs to undo `swap_in`; None where the engine holds a copy."""

    def swap_in(self, parameter: nn.Parameter, shard: Tensor) -> None:
        """Collective: the network computes with the weights that these shards make up, until `restore`."""

    def restore(self, parameter: nn.Parameter, backup: Tensor | None) -> None:
        """Collective: the network computes with its own weights again, bit for bit."""

    def reshard(self) -> None:
        """Frees weights that forward passes without a backward pass left gathered; the next step would use them."""
        return

    def load(self, parameter: nn.Parameter, full: Tensor) -> None:
        """Collective: training continues from these weights."""

    def full_state(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Collective: the optimizer's state of a parameter in full tensors; empty before the first step."""

    def load_optimizer(
        self, parameters: Iterable[nn.Parameter], state_of: StateOf, groups: Sequence[Mapping[str, Any]]
    ) -> None:
        """Collective: the optimizer continues from states as `full_state` returns them, and from stored `groups`."""

    def loss_scale(self) -> dict[str, Any]:
        """State of the engine's own dynamic loss scale; empty where Lightning's precision plugin scales the loss."""
        return {}

    def load_loss_scale(self, state: Mapping[str, Any]) -> None:
        """Continues from what `loss_scale` returned, if this run has a dynamic scale as well."""
        return


class ReplicatedSharding(ParameterSharding):
    """Every rank holds every weight: one process, or DDP. Averages are assigned to ranks by size."""

    def __init__(self, parameters: Iterable[nn.Parameter], optimizer: torch.optim.Optimizer, world_size: int) -> None:
        parameters = list(parameters)
        owners = assign_by_size([p.numel() for p in parameters], world_size)
        self.optimizer = optimizer
        self._owner = {id(p): owner for p, owner in zip(parameters, owners, strict=True)}
        self._rank = distributed.get_rank() if world_size > 1 else 0
        self._world_size = world_size

    def local_shard(self, parameter: nn.Parameter) -> Tensor:
        """The whole tensor on its owner, nothing on other ranks."""
        return self.shard_of(parameter, parameter.detach())

    def shard_of(self, parameter: nn.Parameter, full: Tensor) -> Tensor:
        """The whole tensor on its owner, nothing on other ranks."""
        return full if self._owner[id(parameter)] == self._rank else full.new_empty(0)

    def gather(self, parameter: nn.Parameter, shard: Tensor) -> Tensor:
        """The owner broadcasts its tensor."""
        if self._world_size == 1:
            return shard
        owner = self._owner[id(parameter)]
        full = shard if owner == self._rank else torch.empty(parameter.shape, dtype=shard.dtype)
        full = full.to(parameter.device).contiguous()
        distributed.broadcast(full, src=owner)
        return full

    def full_tensor(self, parameter: nn.Parameter) -> Tensor:
        """Already here."""
        return parameter.detach()

    def backup(self, parameter: nn.Parameter) -> Tensor:
        """A copy on the CPU."""
        return parameter.detach().to("cpu", copy=True)

    def swap_in(self, parameter: nn.Parameter, shard: Tensor) -> None:
        """The owner's tensor, on all ranks."""
        self.load(parameter, self.gather(parameter, shard))

    def restore(self, parameter: nn.Parameter, backup: Tensor | None) -> None:
        """From the copy."""
        assert backup is not None
        self.load(parameter, backup)

    def load(self, parameter: nn.Parameter, full: Tensor) -> None:
        """In place: optimizer and communication buckets refer to the memory."""
        with torch.no_grad():
            parameter.copy_(full)

    def full_state(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Whatever the optimizer keeps."""
        return dict(self.optimizer.state.get(parameter, {}))

    def load_optimizer(
        self, parameters: Iterable[nn.Parameter], state_of: StateOf, groups: Sequence[Mapping[str, Any]]
    ) -> None:
        """Through the optimizer's own `load_state_dict`: some keep more than tensors."""
        packed = self.optimizer.state_dict()
        ordered = [p for group in self.optimizer.param_groups for p in group["params"]]
        states = ((index, p, state_of(p)) for index, p in enumerate(ordered))
        packed["state"] = {i: {k: _laid_out_like(p, v) for k, v in state.items()} for i, p, state in states if state}
        if len(groups) == len(packed["param_groups"]):  # tensor parallelism makes more groups, which hold options only
            for group, stored in zip(packed["param_groups"], groups, strict=True):
                group.update({key: stored[key] for key in stored.keys() & group.keys() - _OF_THIS_RUN})
        self.optimizer.load_state_dict(packed)


class DTensorSharding(ParameterSharding):
    """Every trained parameter is a DTensor; the local shard is this rank's block of it."""

    def __init__(self, optimizer: torch.optim.Optimizer, modules: Iterable[nn.Module]) -> None:
        self.optimizer = optimizer
        self._fsdp_modules = [module for module in modules if isinstance(module, FSDPModule)]

    def reshard(self) -> None:
        """Every FSDP2 module."""
        for module in self._fsdp_modules:
            module.reshard()

    def local_shard(self, parameter: nn.Parameter) -> Tensor:
        """The local block."""
        return _dtensor(parameter).to_local().detach()

    def shard_of(self, parameter: nn.Parameter, full: Tensor) -> Tensor:
        """The same block of another tensor, without communication."""
        own = _dtensor(parameter)
        full = full.to(own.device_mesh.device_type)
        block = distribute_tensor(full, own.device_mesh, own.placements, src_data_rank=None).to_local()
        return block.to(own.to_local().device)

    def gather(self, parameter: nn.Parameter, shard: Tensor) -> Tensor:
        """All blocks, joined."""
        return _placed_like(_dtensor(parameter), shard).full_tensor()

    def backup(self, parameter: nn.Parameter) -> Tensor:
        """A copy of the block on the CPU."""
        return self.local_shard(parameter).to("cpu", copy=True)

    def swap_in(self, parameter: nn.Parameter, shard: Tensor) -> None:
        """Without communication."""
        self.local_shard(parameter).copy_(shard)

    def restore(self, parameter: nn.Parameter, backup: Tensor | None) -> None:
        """From the copy."""
        assert backup is not None
        self.swap_in(parameter, backup)

    def load(self, parameter: nn.Parameter, full: Tensor) -> None:
        """This rank's block of it."""
        self.local_shard(parameter).copy_(self.shard_of(parameter, full))

    def full_state(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Tensors of the parameter's shape are gathered; counters are the same on every rank."""
        state = self.optimizer.state.get(parameter, {})
        return {key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in state.items()}

    def load_optimizer(
        self, parameters: Iterable[nn.Parameter], state_of: StateOf, groups: Sequence[Mapping[str, Any]]
    ) -> None:
        """This rank's blocks. The groups hold options only, which are those of this run."""
        for parameter in parameters:
            state = state_of(parameter)
            if state:
                self.optimizer.state[parameter] = {k: self._local_state(parameter, k, v) for k, v in state.items()}

    def _local_state(self, parameter: nn.Parameter, key: str, value: Any) -> Any:
        own = _dtensor(parameter)
        if not isinstance(value, Tensor):
            return value
        if key == "step":
            is_on_device = any(group.get("fused") for group in self.optimizer.param_groups)
            return value.to(own.to_local().device if is_on_device else "cpu", copy=True)
        return _placed_like(own, _laid_out_like(own.to_local(), self.shard_of(parameter, value).clone()), moves=False)


def assign_by_size(sizes: list[int], count: int) -> list[int]:
    """The rank of each tensor, so that all of `count` ranks get about the same: largest first, to the least loaded."""
    loads, ranks = [0] * count, [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        ranks[index] = loads.index(min(loads))
        loads[ranks[index]] += sizes[index]
    return ranks


def _laid_out_like(parameter: Tensor, value: Any) -> Any:
    """Optimizer state in its parameter's memory layout, such as channels-last, which fused optimizers rely on."""
    if not isinstance(value, Tensor) or value.shape != parameter.shape:
        return value
    return torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)


def _dtensor(parameter: nn.Parameter) -> DTensor:
    assert isinstance(parameter, DTensor), "a trained parameter is not sharded"
    return parameter


def _placed_like(own: DTensor, local: Tensor, *, moves: bool = True) -> DTensor:
    """A DTensor of `own`'s shape and placement around a local block, moved to the mesh's device unless offloaded."""
    local = local.to(own.device_mesh.device_type) if moves else local
    return DTensor.from_local(
        local, own.device_mesh, own.placements, run_check=False, shape=own.shape, stride=own.stride()
    )
