"""Weights cut into blocks by PyTorch's DTensor: FSDP2 (Zhao et al. 2023, arXiv:2304.11277, rewritten per parameter) and
tensor parallelism (Shoeybi et al. 2019, arXiv:1909.08053)."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from sd_training.distributed.placement import Placement, StateOf


class Blocks(Placement):
    """Every trained parameter is a DTensor; a share is this process's block of it."""

    is_network_whole = False

    def __init__(self, optimizer: torch.optim.Optimizer, modules: Iterable[nn.Module]) -> None:
        self.optimizer = optimizer
        self._cut_modules = [module for module in modules if isinstance(module, FSDPModule)]

    def settle(self) -> None:
        """Weights that were gathered for drawing are given back; the next step would compute with them."""
        for module in self._cut_modules:
            module.reshard()

    def share(self, parameter: nn.Parameter) -> Tensor:
        """The local block."""
        return _dtensor(parameter).to_local().detach()

    def take(self, parameter: nn.Parameter, whole: Tensor) -> Tensor:
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

    def keep(self, parameter: nn.Parameter) -> Tensor:
        """A copy of the block on the CPU."""
        return self.share(parameter).to("cpu", copy=True)

    def lend(self, parameter: nn.Parameter, share: Tensor) -> None:
        """Nothing is sent."""
        self.share(parameter).copy_(share)

    def give_back(self, parameter: nn.Parameter, kept: Tensor | None) -> None:
        """From the copy."""
        assert kept is not None
        self.lend(parameter, kept)

    def load(self, parameter: nn.Parameter, whole: Tensor) -> None:
        """This process's block of it."""
        self.share(parameter).copy_(self.take(parameter, whole))

    def whole_state(self, parameter: nn.Parameter) -> dict[str, Any]:
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
        local = self.take(parameter, value).clone()
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
