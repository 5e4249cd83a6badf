"""Where trained weights and optimizer state lie. Everything above asks a `ParameterSharding`, and no engine, for them.

A *share* is the part of a parameter that a process averages and keeps: a whole tensor that was dealt to it (replicas),
a block of it (FSDP2, tensor parallelism) or a run of its numbers (ZeRO). Checkpoints and exports are made of whole
tensors, put together one at a time, so they mean the same under every strategy and number of processes.

Weights cut into blocks by PyTorch's DTensor: FSDP2 (Zhao et al. 2023, arXiv:2304.11277, rewritten per parameter) and
tensor parallelism (Shoeybi et al. 2019, arXiv:1909.08053).
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

StateOf = Callable[[nn.Parameter], dict[str, Any]]
"""Parameter → its optimizer state in whole tensors, as a checkpoint has it; empty for none."""
_OF_THIS_RUN = {"params", "fused", "foreach", "capturable", "differentiable"}
"""Keys of an optimizer's groups that follow from the device and the strategy."""


class ParameterSharding(ABC):
    """How parameters lie over the processes. Methods marked collective are called by all of them, in the same order."""

    optimizer: torch.optim.Optimizer
    """What updates the shares; inside the engine, where there is one."""
    is_network_whole: ClassVar[bool]
    """Whether the network itself holds whole weights as training updates them, so that it can be exported as it is."""

    @abstractmethod
    def local_shard(self, parameter: nn.Parameter) -> Tensor:
        """This process's part of the weights that training updates; empty for none. A view."""

    @abstractmethod
    def shard_of(self, parameter: nn.Parameter, whole: Tensor) -> Tensor:
        """This process's part of a whole tensor of the parameter's shape, as `share` cuts it."""

    @abstractmethod
    def gather(self, parameter: nn.Parameter, share: Tensor) -> Tensor:
        """Collective: the whole tensor, on the parameter's device, from what is like `share` on each process."""

    def full_tensor(self, parameter: nn.Parameter) -> Tensor:
        """Collective: the whole tensor of the weights that training updates."""
        return self.gather(parameter, self.local_shard(parameter))

    @abstractmethod
    def backup(self, parameter: nn.Parameter) -> Tensor | None:
        """What `give_back` needs to undo `lend`; None where the engine keeps a copy."""

    @abstractmethod
    def swap_in(self, parameter: nn.Parameter, share: Tensor) -> None:
        """Collective: the network computes with the weights that these shares make, until `give_back`."""

    @abstractmethod
    def restore(self, parameter: nn.Parameter, kept: Tensor | None) -> None:
        """Collective: the network computes with its own weights again, to the bit."""

    def reshard(self) -> None:  # noqa: B027 - most engines leave nothing open
        """Ends what forward passes without a backward pass left open, such as gathered weights."""

    @abstractmethod
    def load(self, parameter: nn.Parameter, whole: Tensor) -> None:
        """Collective: training goes on from these weights."""

    @abstractmethod
    def full_state(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Collective: the optimizer's state of a parameter, with whole tensors; empty before the first step."""

    @abstractmethod
    def load_optimizer(
        self, parameters: Iterable[nn.Parameter], state_of: StateOf, groups: Sequence[Mapping[str, Any]]
    ) -> None:
        """Collective: the optimizer goes on from states as `whole_state` gives them, and from what `groups` held."""

    def copies(self, parameter: nn.Parameter) -> int:
        """How many processes have the same share."""
        return 1

    def state_bytes(self) -> int:
        """This process's part of the optimizer's state in a checkpoint [bytes]."""
        state: Mapping[Any, Mapping[str, Any]] = self.optimizer.state
        return sum(bytes_here(values.values()) // self.copies(parameter) for parameter, values in state.items())

    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups of parameters, with what it keeps per group."""
        return self.optimizer.param_groups


class ReplicatedSharding(ParameterSharding):
    """Every process has every weight: one process, or DDP. Averages are dealt out by size."""

    is_network_whole = True

    def __init__(self, parameters: Iterable[nn.Parameter], optimizer: torch.optim.Optimizer, world_size: int) -> None:
        parameters = list(parameters)
        owners = deal([p.numel() for p in parameters], world_size)
        self.optimizer = optimizer
        self._owner = {id(p): owner for p, owner in zip(parameters, owners, strict=True)}
        self._rank = distributed.get_rank() if world_size > 1 else 0
        self._world_size = world_size

    def local_shard(self, parameter: nn.Parameter) -> Tensor:
        """All or nothing."""
        return self.shard_of(parameter, parameter.detach())

    def shard_of(self, parameter: nn.Parameter, whole: Tensor) -> Tensor:
        """All or nothing."""
        return whole if self._owner[id(parameter)] == self._rank else whole.new_empty(0)

    def gather(self, parameter: nn.Parameter, share: Tensor) -> Tensor:
        """The owner hands its tensor to the others."""
        if self._world_size == 1:
            return share
        owner = self._owner[id(parameter)]
        whole = share if owner == self._rank else torch.empty(parameter.shape, dtype=share.dtype)
        whole = whole.to(parameter.device).contiguous()
        distributed.broadcast(whole, src=owner)
        return whole

    def full_tensor(self, parameter: nn.Parameter) -> Tensor:
        """It is here already."""
        return parameter.detach()

    def backup(self, parameter: nn.Parameter) -> Tensor:
        """A copy on the CPU."""
        return parameter.detach().to("cpu", copy=True)

    def swap_in(self, parameter: nn.Parameter, share: Tensor) -> None:
        """The owner's tensor, everywhere."""
        self.load(parameter, self.gather(parameter, share))

    def restore(self, parameter: nn.Parameter, kept: Tensor | None) -> None:
        """From the copy."""
        assert kept is not None
        self.load(parameter, kept)

    def load(self, parameter: nn.Parameter, whole: Tensor) -> None:
        """In place: optimizer and communication buckets refer to the memory."""
        with torch.no_grad():
            parameter.copy_(whole)

    def full_state(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Whatever the optimizer keeps."""
        return dict(self.optimizer.state.get(parameter, {}))

    def state_bytes(self) -> int:
        """Every process has all of it; files are dealt out."""
        return sum(bytes_here(values.values()) for values in self.optimizer.state.values()) // self._world_size

    def load_optimizer(
        self, parameters: Iterable[nn.Parameter], state_of: StateOf, groups: Sequence[Mapping[str, Any]]
    ) -> None:
        """As the optimizer itself does it: some keep more than tensors."""
        packed = self.optimizer.state_dict()
        ordered = [p for group in self.optimizer.param_groups for p in group["params"]]
        states = ((index, state_of(parameter)) for index, parameter in enumerate(ordered))
        packed["state"] = {index: state for index, state in states if state}
        if len(groups) == len(packed["param_groups"]):  # else tensor parallelism made more; these hold options only
            for group, stored in zip(packed["param_groups"], groups, strict=True):
                group.update({key: stored[key] for key in stored.keys() & group.keys() - _OF_THIS_RUN})
        self.optimizer.load_state_dict(packed)


def bytes_here(values: Iterable[Any]) -> int:
    """Bytes of this process's part of those values that are tensors."""
    tensors = (value.to_local() if hasattr(value, "to_local") else value for value in values)
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if isinstance(tensor, Tensor))


def deal(sizes: list[int], count: int) -> list[int]:
    """Which of `count` processes gets which tensor, so that each has about the same: largest first, to the one that has
    least. The same on every process."""
    loads = [0] * count
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        owners[index] = loads.index(min(loads))
        loads[owners[index]] += sizes[index]
    return owners


class DTensorSharding(ParameterSharding):
    """Every trained parameter is a DTensor; a share is this process's block of it."""

    is_network_whole = False

    def __init__(self, optimizer: torch.optim.Optimizer, modules: Iterable[nn.Module]) -> None:
        self.optimizer = optimizer
        self._cut_modules = [module for module in modules if isinstance(module, FSDPModule)]

    def reshard(self) -> None:
        """Weights that were gathered for drawing are given back; the next step would compute with them."""
        for module in self._cut_modules:
            module.reshard()

    def local_shard(self, parameter: nn.Parameter) -> Tensor:
        """The local block."""
        return _dtensor(parameter).to_local().detach()

    def shard_of(self, parameter: nn.Parameter, whole: Tensor) -> Tensor:
        """The same block of another tensor; nothing is sent."""
        own = _dtensor(parameter)
        whole = whole.to(own.device_mesh.device_type)
        cut = distribute_tensor(whole, own.device_mesh, own.placements, src_data_rank=None)
        return cut.to_local().to(own.to_local().device)

    def gather(self, parameter: nn.Parameter, share: Tensor) -> Tensor:
        """All blocks, put together."""
        own = _dtensor(parameter)
        local = share.to(own.device_mesh.device_type)
        whole = DTensor.from_local(
            local, own.device_mesh, own.placements, run_check=False, shape=own.shape, stride=own.stride()
        )
        return whole.full_tensor()

    def backup(self, parameter: nn.Parameter) -> Tensor:
        """A copy of the block on the CPU."""
        return self.local_shard(parameter).to("cpu", copy=True)

    def swap_in(self, parameter: nn.Parameter, share: Tensor) -> None:
        """Nothing is sent."""
        self.local_shard(parameter).copy_(share)

    def restore(self, parameter: nn.Parameter, kept: Tensor | None) -> None:
        """From the copy."""
        assert kept is not None
        self.swap_in(parameter, kept)

    def load(self, parameter: nn.Parameter, whole: Tensor) -> None:
        """This process's block of it."""
        self.local_shard(parameter).copy_(self.shard_of(parameter, whole))

    def full_state(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Tensors of the parameter's shape are put together; counters are the same everywhere."""
        state = self.optimizer.state.get(parameter, {})
        return {key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in state.items()}

    def load_optimizer(
        self, parameters: Iterable[nn.Parameter], state_of: StateOf, groups: Sequence[Mapping[str, Any]]
    ) -> None:
        """This process's blocks. The groups hold options only, which are those of this run."""
        for parameter in parameters:
            state = state_of(parameter)
            if state:
                self.optimizer.state[parameter] = {k: self._placed(parameter, k, v) for k, v in state.items()}

    def _placed(self, parameter: nn.Parameter, key: str, value: Any) -> Any:
        own = _dtensor(parameter)
        if not isinstance(value, Tensor):
            return value
        if key == "step":
            is_on_device = any(group.get("fused") for group in self.optimizer.param_groups)
            return value.to(own.to_local().device if is_on_device else "cpu", copy=True)
        local = self.shard_of(parameter, value).clone()
        return DTensor.from_local(
            local, own.device_mesh, own.placements, run_check=False, shape=own.shape, stride=own.stride()
        )

    def copies(self, parameter: nn.Parameter) -> int:
        """All processes that differ along no axis that the parameter is cut along."""
        own = _dtensor(parameter)
        axes = zip(own.device_mesh.shape, own.placements, strict=True)
        return distributed.get_world_size() // math.prod(size for size, how in axes if how.is_shard())


def _dtensor(parameter: nn.Parameter) -> DTensor:
    assert isinstance(parameter, DTensor), "a trained parameter was not cut"
    return parameter
