"""DeepSpeed's ZeRO through Lightning, on GPUs and, for debugging, on CPUs over gloo; its options from a JSON file.

DeepSpeed accumulates, clips, scales the loss (fp16) and skips non-finite steps itself. What is changed here: the loss
is divided by the micro-batches once, not by Lightning and by DeepSpeed (gradients were k times too small), inputs
keep their type (Lightning would round timesteps to bf16), layers run under autocast as with every other strategy,
position embeddings stay fp32, and the checks that insist on CUDA do not apply to CPUs.

`distributed.deepspeed_config` may come from anywhere. Among DeepSpeed's keys are some that write to any path or start
processes, so the file may only have those of `ALLOWED`.
"""

import json
import os
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_fabric.utilities.seed import reset_seed
from pytorch_lightning.plugins.precision import DeepSpeedPrecision
from pytorch_lightning.strategies import DeepSpeedStrategy
from torch import Tensor

from sd_training.errors import ConfigError
from sd_training.parallel.strategies import TrainingStrategy
from sd_training.parallel.zero import ZeroSharding, ZeroStage3Sharding, ZeroStage12Sharding

_MAX_BYTES = 2**20
"""Of the file; the rest is not read."""
ALLOWED = (
    *("activation_checkpointing", "comms_logger", "communication_data_type", "data_types", "disable_allgather"),
    *("dump_state", "gradient_predivide_factor", "memory_breakdown", "prescale_gradients", "steps_per_print", "timers"),
    *("wall_clock_breakdown", "zero_force_ds_cpu_optimizer", "zero_optimization"),
)
"""DeepSpeed's keys that may be in a file; DeepSpeed checks their values."""
_DECIDED_BY = {
    "system.batch_size": ("train_batch_size", "train_micro_batch_size_per_gpu"),
    "system.gradient_accumulation": ("gradient_accumulation_steps",),
    "optimizer.max_grad_norm": ("gradient_clipping",),
    "optimizer.name": ("optimizer", "zero_allow_untested_optimizer"),
    "lr_scheduler.name": ("scheduler",),
    "model.mixed_precision": ("fp16", "bf16", "torch_autocast", "amp"),
    "distributed.mesh.tensor": ("tensor_parallel",),
}
_DECIDED = {key: option for option, keys in _DECIDED_BY.items() for key in keys}
"""DeepSpeed's key → this trainer's option for the same."""
_UNUSABLE: Mapping[str, tuple[Any, str]] = {
    "round_robin_gradients": (True, "saves would not find the shards of the weights"),
    "compute_grad_norm": (False, "steps that are not finite would be taken"),
    "cpu_offload": (True, "set distributed.offload_optimizer=true instead"),
    "cpu_offload_param": (True, "set distributed.offload_parameters=true instead"),
}
"""ZeRO's key → the value that does not work here, and why."""
_OFFLOADS = {"offload_optimizer": "offload_optimizer", "offload_param": "offload_parameters"}
"""ZeRO's key → this trainer's option."""


def deepspeed_options(
    stage: int, *, offload_optimizer: bool, offload_parameters: bool, path: str | None
) -> dict[str, Any]:
    """DeepSpeed's configuration, except for what depends on the run (batch, precision, clipping).

    Args:
        stage: of ZeRO: 1, 2 or 3.
        path: JSON file of further options; HuggingFace's value "auto" counts as absent.

    Raises:
        ConfigError: the file cannot be read, or decides what this trainer's options decide.
    """
    wanted = {"offload_optimizer": offload_optimizer, "offload_param": offload_parameters}
    options = {} if path is None else _read_options(path)
    if problems := list(_problems(options, stage, wanted)):
        raise ConfigError([f"distributed.deepspeed_config: {path} has {problem}" for problem in problems])
    zero = options.setdefault("zero_optimization", {})
    zero["stage"] = stage
    for key in (key for key, is_wanted in wanted.items() if is_wanted):
        zero.setdefault(key, {"device": "cpu", "pin_memory": torch.cuda.is_available()})
    options["zero_allow_untested_optimizer"] = True
    if path is not None:
        from deepspeed.runtime.config import DeepSpeedConfig

        try:
            DeepSpeedConfig({**options, "train_micro_batch_size_per_gpu": 1})
        except Exception as error:  # it expects types of values that it has not checked
            reason = " ".join(str(error).split())
            raise ConfigError(f"distributed.deepspeed_config: {path}: DeepSpeed refuses it: {reason:.500}") from error
    return options


def _read_options(path: str) -> dict[str, Any]:
    """Without "auto", and without offloads to no device.

    Raises:
        ConfigError: the file cannot be read, or is not a JSON object.
    """
    where = f"distributed.deepspeed_config: {path}"
    try:
        with Path(path).expanduser().open("rb") as file:
            options = json.loads(file.read(_MAX_BYTES))
        if not isinstance(options, dict):
            raise ConfigError(f"{where} is not a JSON object")
        options = _without_auto(options)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{where} cannot be read: {error}") from error
    if isinstance(zero := options.get("zero_optimization"), dict):
        for key in _OFFLOADS:
            if isinstance(zero.get(key), dict) and zero[key].get("device") == "none":
                del zero[key]
    return options


def _without_auto(options: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in options.items() if value != "auto"}
    return {key: _without_auto(value) if isinstance(value, dict) else value for key, value in kept.items()}


def _problems(options: Mapping[str, Any], stage: int, wanted: Mapping[str, bool]) -> Iterator[str]:
    """What of a file's options this trainer cannot pass on; each completes "the file has …".

    Args:
        wanted: whether the config asks for an offload, by ZeRO's key.
    """
    for key in _DECIDED.keys() & options.keys():
        yield f"{key!r}, which {_DECIDED[key]} decides; remove it from the file"
    if unknown := [f"{key!a:.100}" for key in options if key not in ALLOWED and key not in _DECIDED]:
        named = ", ".join(unknown)
        yield f"{named:.500}, which this trainer does not pass on; remove what is not one of {', '.join(ALLOWED)}"
    types, zero = options.get("data_types", {}), options.get("zero_optimization", {})
    if not isinstance(types, dict) or types.keys() - {"grad_accum_dtype"}:
        yield "'data_types', of which only grad_accum_dtype may be set; model.mixed_precision decides the others"
    if not isinstance(zero, dict):
        yield f"zero_optimization={zero!a:.60}, which must be a JSON object"
        return
    if zero.get("stage", stage) != stage:
        yield f"ZeRO stage {zero['stage']!a:.20}, but distributed.strategy is deepspeed_{stage}"
    for key, (value, why) in _UNUSABLE.items():
        if zero.get(key) is value:
            yield f"zero_optimization.{key}={json.dumps(value)}: {why}; remove it"
    if zero.get("zenflow") is not None:
        yield "zero_optimization.zenflow: its processes hold state that saves cannot read; remove it"
    for key, option in _OFFLOADS.items():
        given = zero.get(key)
        if given is not None and not wanted[key]:
            yield f"zero_optimization.{key}; set distributed.{option}=true as well"
        elif isinstance(given, dict) and given.get("device") == "nvme":
            yield f"zero_optimization.{key}.device=nvme, from which saves cannot read; use cpu"
        elif isinstance(given, dict) and given.get("super_offload", False) is not False:
            yield f"zero_optimization.{key}.super_offload: its processes hold state that saves cannot read; remove it"


class DeepSpeedZeroStrategy(TrainingStrategy, DeepSpeedStrategy):
    """ZeRO stages 1 to 3.

    Args:
        options: as `deepspeed_options` gives them.
        max_grad_norm: gradients are clipped to this norm; None leaves them.
        backend: communication library.
        timeout: how long processes wait for each other.
    """

    clips_gradients = True

    def __init__(self, options: dict[str, Any], max_grad_norm: float | None, backend: str, timeout: timedelta) -> None:
        options = options | {"gradient_clipping": max_grad_norm or 0.0}
        super().__init__(config=options, process_group_backend=backend, timeout=timeout)
        self.collective_timeout = timeout
        self.has_collective_forward = self.zero_stage_3

    @property
    def root_device(self) -> torch.device:
        """DeepSpeed wants an index of CPUs as well."""
        device = super().root_device
        return torch.device("cpu", self.local_rank) if device.type == "cpu" else device

    def setup_environment(self) -> None:
        """As Lightning does it, without its check for CUDA."""
        if self.root_device.type == "cpu":
            os.environ["DS_ACCELERATOR"] = "cpu"  # on a machine with GPUs too
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

    def make_sharding(self) -> ZeroSharding:
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
