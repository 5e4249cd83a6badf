"""DeepSpeed's ZeRO through Lightning, on GPUs and, for debugging, on CPUs over gloo.

DeepSpeed accumulates, clips, scales the loss (fp16) and skips non-finite steps itself. What is changed here: the loss
is divided by the micro-batches once, not by Lightning and by DeepSpeed (gradients were k times too small), inputs
keep their type (Lightning would round timesteps to bf16), layers run under autocast as with every other strategy,
position embeddings stay fp32, and the checks that insist on CUDA do not apply to CPUs.

It updates flattened fp32 *master weights*, each rank a range of them (Rajbhandari et al. 2020, arXiv:1910.02054,
section 5); the network computes with copies, in bf16 or fp16 where the run does. Averages, checkpoints and exports are
made of the masters. The attributes read here are those that `deepspeed.utils.tensor_fragment` (stages 1 and 2) and
`runtime/zero/stage3.py` (stage 3) read for the same purpose; DeepSpeed's own functions return full tensors or no
counters, so they cannot return a shard.
"""

import os
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_fabric.utilities.seed import reset_seed
from pytorch_lightning.plugins.precision import DeepSpeedPrecision
from pytorch_lightning.strategies import DeepSpeedStrategy
from torch import Tensor, distributed, nn

from sd_training.config.schema import Config
from sd_training.parallel.strategies import ParameterSharding, StateOf, TrainingStrategy

_LOSS_SCALE_KEYS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class DeepSpeedZeroStrategy(TrainingStrategy, DeepSpeedStrategy):
    """ZeRO stages 1 to 3.

    Args:
        stage: 1, 2 or 3.
        config: of the run.
        precision: no, bf16 or fp16.
        options: backend and timeout.
    """

    clips_gradients = True

    def __init__(self, stage: int, config: Config, precision: str, **options: Any) -> None:
        zero: dict[str, Any] = {"stage": stage}
        on_cpu = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
        if config.distributed.offload_optimizer:
            zero["offload_optimizer"] = on_cpu
        if config.distributed.offload_parameters:
            zero["offload_param"] = on_cpu
        engine: dict[str, Any] = {
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "train_micro_batch_size_per_gpu": config.system.batch_size,
            "gradient_clipping": config.optimizer.max_grad_norm or 0.0,
        }
        if precision == "bf16":
            engine["bf16"] = {"enabled": True, "check_grad_overflow": True}  # or a non-finite step would be taken
        super().__init__(config=engine, **options)
        self.has_collective_forward = self.zero_stage_3

    @property
    def root_device(self) -> torch.device:  # type: ignore[override]
        """DeepSpeed requires a device index for CPUs as well."""
        device = super().root_device
        return torch.device("cpu", self.local_rank) if device.type == "cpu" else device

    def setup_environment(self) -> None:
        """As Lightning does it, without its check for CUDA."""
        if self.root_device.type == "cpu":
            os.environ["DS_ACCELERATOR"] = "cpu"  # on a machine with GPUs too
            from deepspeed import ops  # asks for the accelerator

            ops.__compatible_ops__ = {}  # or it compiles, for a minute, collectives to use in place of gloo's
        super(DeepSpeedStrategy, self).setup_environment()

    def setup_distributed(self) -> None:
        """As Lightning does it; indices of CPUs mean nothing."""
        if self.root_device.type != "cpu":
            super().setup_distributed()
            return
        reset_seed()
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    def setup(self, trainer: pl.Trainer) -> None:
        """Also runs the training step under autocast, and keeps buffers as they were."""
        module = self.lightning_module
        buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
        dtype = self.precision_plugin._desired_dtype  # type: ignore[attr-defined]
        if dtype != torch.float32:
            step = torch.autocast(self.root_device.type, dtype=dtype)(module.training_step)
            module.training_step = step  # type: ignore[method-assign]
        super().setup(trainer)
        for name, buffer in buffers.items():
            parent, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(parent), leaf, buffer.to(self.root_device))

    @cached_property
    def sharding(self) -> ParameterSharding:
        """By stage."""
        return (ZeroStage3Sharding if self.zero_stage_3 else ZeroStage12Sharding)(self.deepspeed_engine)


class DeepSpeedZeroPrecision(DeepSpeedPrecision):
    """Types as every other strategy has them; the module gets the gradient norm and whether the step was skipped."""

    def convert_input(self, data: Any) -> Any:
        """As they are; layers cast under autocast."""
        return data

    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *arguments: Any, **options: Any) -> None:
        """Lightning has divided the loss by the number of micro-batches already; DeepSpeed would do it again."""
        super().backward(tensor, model, optimizer, *arguments, scale_wrt_gas=False, **options)

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: Any, closure: Any, **options: Any
    ) -> Any:
        """DeepSpeed's step; it reads the norm on the host in any case."""
        result = super().optimizer_step(optimizer, model, closure, **options)
        engine = model.trainer.model
        norm = engine.get_global_grad_norm()
        if norm is not None:
            model.grad_norm = norm if isinstance(norm, Tensor) else torch.tensor(float(norm))
        if self.precision != "16-mixed":  # in fp16 a skipped step only means that the scale of the loss was too large
            model.was_step_skipped = torch.tensor(float(engine.optimizer.overflow))
        return result


class ZeroSharding(ParameterSharding):
    """What all stages have in common.

    Args:
        engine: DeepSpeed's engine.
    """

    def __init__(self, engine: Any) -> None:
        self.zero = engine.optimizer
        self.optimizer: torch.optim.Optimizer = self.zero.optimizer

    @abstractmethod
    def _place(self, parameter: nn.Parameter) -> tuple[Tensor, int, int]:
        """The flat master tensor of this rank that contains the parameter's shard; start and length of the shard."""

    def _slice(self, parameter: nn.Parameter, flat: Tensor) -> Tensor:
        """The parameter's shard of a flat tensor."""
        _, start, length = self._place(parameter)
        return flat.narrow(0, start, length)

    def local_shard(self, parameter: nn.Parameter) -> Tensor:
        """A range of the parameter's elements, as one row."""
        return self._slice(parameter, self._place(parameter)[0]).detach()

    def backup(self, parameter: nn.Parameter) -> Tensor:
        """The masters, which `swap_in` leaves alone."""
        return self.local_shard(parameter)

    def full_state(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Per parameter, although DeepSpeed keeps it per flat tensor."""
        flat = self._place(parameter)[0]
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
        counts_in_int = type(self.optimizer).__module__.startswith("deepspeed")
        is_fused = any(group.get("fused") for group in self.optimizer.param_groups)
        counter_device = self.zero.device if is_fused else "cpu"
        for parameter in parameters:
            flat = self._place(parameter)[0]
            own = self.optimizer.state[flat]
            for key, value in state_of(parameter).items():
                if key == "step":
                    own[key] = int(value) if counts_in_int else value.to(counter_device, copy=True)
                elif isinstance(value, Tensor):
                    if key not in own:
                        own[key] = torch.zeros_like(flat)
                    self._slice(parameter, own[key]).copy_(self.shard_of(parameter, value))

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

    def _place(self, parameter: nn.Parameter) -> tuple[Tensor, int, int]:
        flat = self.zero.single_partition_of_fp32_groups[self._group[id(parameter)]]
        mapping = parameter._hp_mapping  # type: ignore[attr-defined]
        if mapping is None:
            return flat, 0, 0
        return flat, mapping.hp_fragment_address.start, mapping.hp_fragment_address.numel

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


class ZeroStage3Sharding(ZeroSharding):
    """Stage 3: the weights are sharded as well. Every parameter is cut into equal ranges, the last one padded."""

    def full_shape(self, parameter: nn.Parameter) -> torch.Size:
        """The parameter itself is empty between its uses."""
        return parameter.ds_shape  # type: ignore[attr-defined]

    def _place(self, parameter: nn.Parameter) -> tuple[Tensor, int, int]:
        group, start, length = self.zero.grad_position[self.zero.get_param_id(parameter)]
        return self.zero.fp32_partitioned_groups_flat[group], start, length

    def shard_of(self, parameter: nn.Parameter, full: Tensor) -> Tensor:
        """This rank's range, with zeros after the last element."""
        length = self._place(parameter)[2]
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
