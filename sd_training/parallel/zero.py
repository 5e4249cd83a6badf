"""Weights and optimizer state sharded by DeepSpeed's ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054, section 5).

DeepSpeed updates flattened fp32 *master weights*, each rank a range of them; the network computes with copies, in bf16
or fp16 where the run does. Averages, checkpoints and exports are made of the masters. The attributes read here are
those that `deepspeed.utils.tensor_fragment` (stages 1 and 2) and `runtime/zero/stage3.py` (stage 3) read for the same
purpose; DeepSpeed's own functions return full tensors or no counters, so they cannot return a shard.
"""

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn

from sd_training.parallel.sharding import ParameterSharding, StateOf

_LOSS_SCALE_KEYS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class ZeroSharding(ParameterSharding):
    """What all stages have in common.

    Args:
        engine: DeepSpeed's engine.
    """

    def __init__(self, engine: Any) -> None:
        self.zero = engine.optimizer
        self.optimizer: torch.optim.Optimizer = self.zero.optimizer

    @abstractmethod
    def _flat(self, parameter: nn.Parameter) -> Tensor:
        """The flat master tensor of this rank that contains the parameter's shard."""

    @abstractmethod
    def _slice(self, parameter: nn.Parameter, flat: Tensor) -> Tensor:
        """The parameter's shard of a flat tensor."""

    @abstractmethod
    def _update_network(self, parameter: nn.Parameter, full: Tensor) -> None:
        """Collective: the network computes with these weights; the masters stay."""

    def local_shard(self, parameter: nn.Parameter) -> Tensor:
        """A range of the parameter's elements, as one row."""
        return self._slice(parameter, self._flat(parameter)).detach()

    def backup(self, parameter: nn.Parameter) -> None:
        """The masters are the copy."""
        return

    def swap_in(self, parameter: nn.Parameter, shard: Tensor) -> None:
        """Into the network's copy; the masters stay."""
        self._update_network(parameter, self.gather(parameter, shard))

    def restore(self, parameter: nn.Parameter, backup: Tensor | None) -> None:
        """From the masters, rounded as the engine rounds them."""
        self._update_network(parameter, self.full_tensor(parameter))

    def load(self, parameter: nn.Parameter, full: Tensor) -> None:
        """Masters and the network's copy."""
        self.local_shard(parameter).copy_(self.shard_of(parameter, full))
        self._update_network(parameter, full)

    def full_state(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Per parameter, although DeepSpeed keeps it per flat tensor."""
        flat = self._flat(parameter)
        full: dict[str, Any] = {}
        for key, value in self.optimizer.state.get(flat, {}).items():
            if isinstance(value, Tensor) and value.shape == flat.shape:
                full[key] = self.gather(parameter, self._slice(parameter, value))
            elif key == "step":  # DeepSpeed's optimizers count in int, PyTorch's in a tensor
                full[key] = torch.tensor(float(value))
        return full

    def load_optimizer(
        self, parameters: Iterable[nn.Parameter], state_of: StateOf, groups: Sequence[Mapping[str, Any]]
    ) -> None:
        """Into the flat tensors, made here where the optimizer has not yet. The groups hold options of this run."""
        for parameter in parameters:
            flat = self._flat(parameter)
            own = self.optimizer.state[flat]
            for key, value in state_of(parameter).items():
                if key == "step":
                    own[key] = self._step_count(value)
                elif isinstance(value, Tensor):
                    if key not in own:
                        own[key] = torch.zeros_like(flat)
                    self._slice(parameter, own[key]).copy_(self.shard_of(parameter, value))

    def _step_count(self, value: Tensor) -> int | Tensor:
        """The counter as this optimizer keeps it."""
        if type(self.optimizer).__module__.startswith("deepspeed"):
            return int(value)
        is_fused = any(group.get("fused") for group in self.optimizer.param_groups)
        return value.to(self.zero.device if is_fused else "cpu", copy=True)

    def loss_scale(self) -> dict[str, Any]:
        """Of fp16 runs; in other precisions the scale is not dynamic."""
        scaler = self.zero.loss_scaler
        return {key: getattr(scaler, key) for key in _LOSS_SCALE_KEYS} if scaler.dynamic else {}

    def load_loss_scale(self, state: Mapping[str, Any]) -> None:
        """Ignored in other precisions than fp16."""
        if self.zero.loss_scaler.dynamic:
            for key, value in state.items():
                setattr(self.zero.loss_scaler, key, value)


class ZeroStage12Sharding(ZeroSharding):
    """Stages 1 and 2: the network has every weight; masters and optimizer state are sharded."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self._group = {id(p): group for group, parameters in enumerate(self.zero.bit16_groups) for p in parameters}

    def _flat(self, parameter: nn.Parameter) -> Tensor:
        flat: Tensor = self.zero.single_partition_of_fp32_groups[self._group[id(parameter)]]
        return flat

    def _slice(self, parameter: nn.Parameter, flat: Tensor) -> Tensor:
        mapping = parameter._hp_mapping  # type: ignore[attr-defined]
        if mapping is None:
            return flat.narrow(0, 0, 0)
        address = mapping.hp_fragment_address
        return flat.narrow(0, address.start, address.numel)

    def shard_of(self, parameter: nn.Parameter, full: Tensor) -> Tensor:
        """The range of elements of this rank."""
        mapping = parameter._hp_mapping  # type: ignore[attr-defined]
        if mapping is None:
            return full.new_empty(0)
        address = mapping.lp_fragment_address
        return full.flatten().narrow(0, address.start, address.numel)

    def gather(self, parameter: nn.Parameter, shard: Tensor) -> Tensor:
        """A sum, because the ranges differ in length; of the bits, so that minus zero survives."""
        full = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        self.shard_of(parameter, full).copy_(shard)
        distributed.all_reduce(full.view(torch.int32))
        return full.view(parameter.shape)

    def _update_network(self, parameter: nn.Parameter, full: Tensor) -> None:
        parameter.data.copy_(full)


class ZeroStage3Sharding(ZeroSharding):
    """Stage 3: the weights are sharded as well. Every parameter is cut into equal ranges, the last one padded."""

    def full_shape(self, parameter: nn.Parameter) -> torch.Size:
        """The parameter itself is empty between its uses."""
        shape: torch.Size = parameter.ds_shape  # type: ignore[attr-defined]
        return shape

    def _flat(self, parameter: nn.Parameter) -> Tensor:
        flat: Tensor = self.zero.fp32_partitioned_groups_flat[self._position(parameter)[0]]
        return flat

    def _slice(self, parameter: nn.Parameter, flat: Tensor) -> Tensor:
        _, start, length = self._position(parameter)
        return flat.narrow(0, start, length)

    def _position(self, parameter: nn.Parameter) -> tuple[int, int, int]:
        """Flat tensor, start and length of the shard."""
        position: tuple[int, int, int] = self.zero.grad_position[self.zero.get_param_id(parameter)]
        return position

    def shard_of(self, parameter: nn.Parameter, full: Tensor) -> Tensor:
        """This rank's range, with zeros after the last element."""
        length = self._position(parameter)[2]
        start = distributed.get_rank() * length
        own = full.flatten()[start : start + length]
        return torch.nn.functional.pad(own, (0, length - own.numel()))

    def gather(self, parameter: nn.Parameter, shard: Tensor) -> Tensor:
        """All ranges in order, without the padding."""
        shard = shard.to(parameter.device).contiguous()
        full = shard.new_empty(shard.numel() * distributed.get_world_size())
        distributed.all_gather_into_tensor(full, shard)
        shape = self.full_shape(parameter)
        return full[: shape.numel()].view(shape)

    def _update_network(self, parameter: nn.Parameter, full: Tensor) -> None:
        from deepspeed.runtime.zero import GatheredParameters

        with GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
            if distributed.get_rank() == 0:
                parameter.copy_(full)
