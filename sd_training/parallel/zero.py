"""Weights and optimizer state cut by DeepSpeed's ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054, section 5).

DeepSpeed updates fp32 *masters* that it flattens and cuts; the network computes with copies, in bf16 or fp16 where the
run is. Averages, checkpoints and exports are made of the masters. The attributes read here are those that
`deepspeed.utils.tensor_fragment` (stages 1 and 2) and `runtime/zero/stage3.py` (stage 3) read for the same purpose; its
own functions return whole tensors or no counters, so they cannot give a share.
"""

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn

from sd_training.parallel.sharding import ParameterSharding, StateOf


class ZeroSharding(ParameterSharding):
    """What all stages have in common.

    Args:
        engine: DeepSpeed's engine.
    """

    is_network_whole = False

    def __init__(self, engine: Any) -> None:
        self.zero = engine.optimizer
        self.optimizer: torch.optim.Optimizer = self.zero.optimizer

    @abstractmethod
    def _flat(self, parameter: nn.Parameter) -> Tensor:
        """The flat master tensor of this process that the parameter's share lies in."""

    @abstractmethod
    def _cut(self, parameter: nn.Parameter, flat: Tensor) -> Tensor:
        """The parameter's share of a flat tensor."""

    def local_shard(self, parameter: nn.Parameter) -> Tensor:
        """A run of the parameter's numbers, as one row."""
        return self._cut(parameter, self._flat(parameter)).detach()

    def backup(self, parameter: nn.Parameter) -> None:
        """The masters are the copy."""
        return

    def swap_in(self, parameter: nn.Parameter, share: Tensor) -> None:
        """The network's copy; the masters stay."""
        self._show(parameter, self.gather(parameter, share))

    def restore(self, parameter: nn.Parameter, kept: Tensor | None) -> None:
        """From the masters, rounded as the engine rounds them."""
        self._show(parameter, self.full_tensor(parameter))

    def load(self, parameter: nn.Parameter, whole: Tensor) -> None:
        """Masters and the network's copy."""
        self.local_shard(parameter).copy_(self.shard_of(parameter, whole))
        self._show(parameter, whole)

    @abstractmethod
    def _show(self, parameter: nn.Parameter, whole: Tensor) -> None:
        """Collective: the network computes with these weights."""

    def full_state(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Put together per parameter, although DeepSpeed keeps it per flat tensor."""
        flat = self._flat(parameter)
        state = self.optimizer.state.get(flat, {})
        whole: dict[str, Any] = {}
        for key, value in state.items():
            if isinstance(value, Tensor) and value.shape == flat.shape:
                whole[key] = self.gather(parameter, self._cut(parameter, value))
            elif key == "step":  # DeepSpeed's optimizers count in int, PyTorch's in a tensor
                whole[key] = torch.tensor(float(value))
        return whole

    def load_optimizer(
        self, parameters: Iterable[nn.Parameter], state_of: StateOf, groups: Sequence[Mapping[str, Any]]
    ) -> None:
        """Into the flat tensors. The groups hold options only, which are those of this run."""
        for parameter in parameters:
            self._load_state(parameter, state_of(parameter))

    def _load_state(self, parameter: nn.Parameter, state: Mapping[str, Any]) -> None:
        """Flat tensors that the optimizer has not made yet are made here."""
        flat = self._flat(parameter)
        own = self.optimizer.state[flat]
        for key, value in state.items():
            if key == "step":
                own[key] = self._step(value)
            elif isinstance(value, Tensor):
                if key not in own:
                    own[key] = torch.zeros_like(flat)
                self._cut(parameter, own[key]).copy_(self.shard_of(parameter, value))

    def _step(self, value: Tensor) -> int | Tensor:
        """The counter as this optimizer keeps it."""
        if type(self.optimizer).__module__.startswith("deepspeed"):
            return int(value)
        is_fused = any(group.get("fused") for group in self.optimizer.param_groups)
        return value.to(self.zero.device if is_fused else "cpu", copy=True)


class ZeroStage12Sharding(ZeroSharding):
    """Stages 1 and 2: the network has every weight; masters and optimizer state are cut."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self._group = {id(p): group for group, parameters in enumerate(self.zero.bit16_groups) for p in parameters}

    def _flat(self, parameter: nn.Parameter) -> Tensor:
        flat: Tensor = self.zero.single_partition_of_fp32_groups[self._group[id(parameter)]]
        return flat

    def _cut(self, parameter: nn.Parameter, flat: Tensor) -> Tensor:
        mapping = parameter._hp_mapping  # type: ignore[attr-defined]
        if mapping is None:
            return flat.narrow(0, 0, 0)
        address = mapping.hp_fragment_address
        return flat.narrow(0, address.start, address.numel)

    def shard_of(self, parameter: nn.Parameter, whole: Tensor) -> Tensor:
        """The run of numbers that this process keeps."""
        mapping = parameter._hp_mapping  # type: ignore[attr-defined]
        if mapping is None:
            return whole.new_empty(0)
        address = mapping.lp_fragment_address
        return whole.flatten().narrow(0, address.start, address.numel)

    def gather(self, parameter: nn.Parameter, share: Tensor) -> Tensor:
        """A sum, because the runs are of different lengths; of the bits, so that minus zero survives."""
        whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        self.shard_of(parameter, whole).copy_(share)
        distributed.all_reduce(whole.view(torch.int32))
        return whole.view(parameter.shape)

    def _show(self, parameter: nn.Parameter, whole: Tensor) -> None:
        """The network's copy; the masters stay."""
        parameter.data.copy_(whole)


class ZeroStage3Sharding(ZeroSharding):
    """Stage 3: the weights are cut as well. Every parameter is cut into equal runs, the last one filled up."""

    def _flat(self, parameter: nn.Parameter) -> Tensor:
        flat: Tensor = self.zero.fp32_partitioned_groups_flat[self._position(parameter)[0]]
        return flat

    def _cut(self, parameter: nn.Parameter, flat: Tensor) -> Tensor:
        _, start, length = self._position(parameter)
        return flat.narrow(0, start, length)

    def _position(self, parameter: nn.Parameter) -> tuple[int, int, int]:
        """Flat tensor, start and length of the share."""
        position: tuple[int, int, int] = self.zero.grad_position[self.zero.get_param_id(parameter)]
        return position

    def shard_of(self, parameter: nn.Parameter, whole: Tensor) -> Tensor:
        """This process's run, with zeros behind the last number."""
        length = self._position(parameter)[2]
        start = distributed.get_rank() * length
        run = whole.flatten()[start : start + length]
        return torch.nn.functional.pad(run, (0, length - run.numel()))

    def gather(self, parameter: nn.Parameter, share: Tensor) -> Tensor:
        """All runs, one after the other, without what fills them up."""
        share = share.to(parameter.device).contiguous()
        whole = share.new_empty(share.numel() * distributed.get_world_size())
        distributed.all_gather_into_tensor(whole, share)
        shape = parameter.ds_shape  # type: ignore[attr-defined]
        return whole[: shape.numel()].view(shape)

    def _show(self, parameter: nn.Parameter, whole: Tensor) -> None:
        """The cut copy that the network computes with; the masters stay."""
        from deepspeed.runtime.zero import GatheredParameters

        with GatheredParameters([parameter], modifier_rank=0), torch.no_grad():
            if distributed.get_rank() == 0:
                parameter.copy_(whole)
