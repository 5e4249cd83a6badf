"""Where trained weights and optimizer state lie, behind one interface that averages, checkpoints and exports use.

A *local shard* is the part of a parameter that a rank averages and stores: a whole tensor assigned to it (replicas),
its block of a DTensor (FSDP2: Zhao et al. 2023, arXiv:2304.11277, rewritten per parameter; tensor parallelism: Shoeybi
et al. 2019, arXiv:1909.08053), or a run of its elements (DeepSpeed's ZeRO, `deepspeed.py`). Checkpoints and exports
hold full tensors, gathered one at a time, so they mean the same under every strategy and world size.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

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


class ParameterSharding(ABC):
    """How parameters are distributed over the ranks. Collective methods are called by all ranks in the same order."""

    optimizer: torch.optim.Optimizer
    """Updates the local shards; inside the engine, where there is one."""

    @abstractmethod
    def local_shard(self, parameter: nn.Parameter) -> Tensor:
        """This rank's part of the weights that training updates; empty for none. A view."""

    @abstractmethod
    def shard_of(self, parameter: nn.Parameter, full: Tensor) -> Tensor:
        """This rank's part of a tensor of the parameter's full shape, cut as `local_shard` is."""

    @abstractmethod
    def gather(self, parameter: nn.Parameter, shard: Tensor) -> Tensor:
        """Collective: the full tensor, on the parameter's device, from a tensor cut like `local_shard` on each rank."""

    def full_tensor(self, parameter: nn.Parameter) -> Tensor:
        """Collective: the full tensor of the weights that training updates."""
        return self.gather(parameter, self.local_shard(parameter))

    def full_shape(self, parameter: nn.Parameter) -> torch.Size:
        """Shape of the full tensor."""
        return parameter.shape

    def backup(self, parameter: nn.Parameter) -> Tensor:
        """What `restore` needs."""
        return self.local_shard(parameter).to("cpu", copy=True)

    def swap_in(self, parameter: nn.Parameter, shard: Tensor) -> None:
        """Collective: the network computes with the weights that these shards make up."""
        self._update_network(parameter, self.gather(parameter, shard))

    def restore(self, parameter: nn.Parameter, backup: Tensor) -> None:
        """Collective: the network computes with its own weights again, bit for bit."""
        self.swap_in(parameter, backup)

    def reshard(self) -> None:
        """Frees weights that forward passes without a backward pass left gathered; the next step would use them."""
        return

    def load(self, parameter: nn.Parameter, full: Tensor) -> None:
        """Collective: training continues from these weights."""
        self.local_shard(parameter).copy_(self.shard_of(parameter, full))
        self._update_network(parameter, full)

    def _update_network(self, parameter: nn.Parameter, full: Tensor) -> None:
        """Collective: in place, because optimizer and communication buckets refer to the memory."""
        parameter.detach().copy_(full)

    def full_state(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Collective: the optimizer's state of a parameter in full tensors; empty before the first step."""
        state = self.optimizer.state.get(parameter, {})
        return {key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in state.items()}

    def load_optimizer(
        self, parameters: Iterable[nn.Parameter], state_of: StateOf, groups: Sequence[Mapping[str, Any]]
    ) -> None:
        """Collective: the optimizer continues from states as `full_state` returns them, and from stored `groups`;
        through its own `load_state_dict`, because some keep more than tensors."""
        packed = self.optimizer.state_dict()
        packed["state"] = {}
        self.optimizer.state.clear()  # at a rollback, the old state and the new one would not fit beside each other
        ordered = [p for group in self.optimizer.param_groups for p in group["params"]]
        states = ((index, p, state_of(p)) for index, p in enumerate(ordered))
        packed["state"] = {
            i: {k: self._local_state(p, k, v) if isinstance(v, Tensor) else v for k, v in state.items()}
            for i, p, state in states
            if state
        }
        if len(groups) == len(packed["param_groups"]):  # tensor parallelism makes more groups, which hold options only
            for group, stored in zip(packed["param_groups"], groups, strict=True):
                group.update({key: stored[key] for key in stored.keys() & group.keys() - _OF_THIS_RUN})
        self.optimizer.load_state_dict(packed)

    def loss_scale(self) -> dict[str, Any]:
        """State of the engine's own dynamic loss scale; empty where Lightning's precision plugin scales the loss."""
        return {}

    def load_loss_scale(self, state: Mapping[str, Any]) -> None:
        """Continues from what `loss_scale` returned, if this run has a dynamic scale as well."""
        return

    def _local_state(self, parameter: nn.Parameter, key: str, full: Tensor) -> Tensor:
        """This rank's part of a tensor of the optimizer's state."""
        return _laid_out_like(parameter, full)


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
        """The whole tensor on every rank: replicas that differ have to be found to differ (`NumericGuard`), and not to
        get the owner's weights."""
        return parameter.detach().to("cpu", copy=True)

    def restore(self, parameter: nn.Parameter, backup: Tensor) -> None:
        """Without communication, so that a rank may fail alone while it draws or measures."""
        self._update_network(parameter, backup)


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
        own = _dtensor(parameter)
        return _placed_like(own, shard.to(own.device_mesh.device_type)).full_tensor()

    def swap_in(self, parameter: nn.Parameter, shard: Tensor) -> None:
        """Without communication."""
        self.local_shard(parameter).copy_(shard)

    def _update_network(self, parameter: nn.Parameter, full: Tensor) -> None:
        """The network computes with the local blocks."""

    def _local_state(self, parameter: nn.Parameter, key: str, full: Tensor) -> Tensor:
        if key == "step":
            return full
        own = _dtensor(parameter)
        return _placed_like(own, _laid_out_like(own.to_local(), self.shard_of(parameter, full).clone()))


def assign_by_size(sizes: list[int], count: int) -> list[int]:
    """The rank of each tensor, so that all of `count` ranks get about the same: largest first, to the least loaded."""
    loads, ranks = [0] * count, [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        ranks[index] = loads.index(min(loads))
        loads[ranks[index]] += sizes[index]
    return ranks


def _laid_out_like(parameter: Tensor, value: Tensor) -> Tensor:
    """Optimizer state in its parameter's memory layout, such as channels-last, which fused optimizers rely on."""
    if value.shape != parameter.shape:
        return value
    return torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)


def _dtensor(parameter: nn.Parameter) -> DTensor:
    assert isinstance(parameter, DTensor), "a trained parameter is not sharded"
    return parameter


def _placed_like(own: DTensor, local: Tensor) -> DTensor:
    """A DTensor of `own`'s shape and placement around a local block."""
    return DTensor.from_local(
        local, own.device_mesh, own.placements, run_check=False, shape=own.shape, stride=own.stride()
    )
