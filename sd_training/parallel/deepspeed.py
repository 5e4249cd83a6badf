"""DeepSpeed's ZeRO through Lightning, on GPUs and, for debugging, on CPUs over gloo; its options from a JSON file.

DeepSpeed accumulates, clips, scales the loss (fp16) and skips non-finite steps itself. What is changed here: the loss
is divided by the micro-batches once, not by Lightning and by DeepSpeed (gradients were k times too small), inputs
keep their type (Lightning would round timesteps to bf16), layers run under autocast as with every other strategy,
position embeddings stay fp32, and the checks that insist on CUDA do not apply to CPUs.

`distributed.deepspeed_config` may come from anywhere. Among DeepSpeed's keys are some that write to any path or start
processes, so the file may only have those of `ALLOWED`.
"""

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
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
_MAX_NAMED = 10

Rule = tuple[Callable[[Any], bool], str]
"""Whether a value is possible, and what it must be in words."""

_BY_DEEPSPEED: Rule = (lambda value: True, "")
"""DeepSpeed checks these itself, before the run starts."""
_SWITCH: Rule = (lambda value: type(value) is bool, "true or false")
ALLOWED: Mapping[str, Rule] = {
    "activation_checkpointing": _BY_DEEPSPEED,
    "comms_logger": _BY_DEEPSPEED,
    "communication_data_type": _BY_DEEPSPEED,
    "data_types": (lambda value: isinstance(value, dict), "a JSON object"),
    "disable_allgather": _SWITCH,
    "dump_state": _SWITCH,
    "gradient_predivide_factor": (
        lambda value: type(value) in (int, float) and 0 < value < math.inf,
        "a positive number",
    ),
    "memory_breakdown": _SWITCH,
    "prescale_gradients": _SWITCH,
    "steps_per_print": (lambda value: type(value) is int and value > 0, "a positive whole number"),
    "timers": _BY_DEEPSPEED,
    "wall_clock_breakdown": _SWITCH,
    "zero_force_ds_cpu_optimizer": _SWITCH,
    "zero_optimization": (lambda value: isinstance(value, dict), "a JSON object"),
}
"""DeepSpeed's keys that may be in a file."""
_DECIDED = {
    "train_batch_size": "system.batch_size",
    "train_micro_batch_size_per_gpu": "system.batch_size",
    "gradient_accumulation_steps": "system.gradient_accumulation",
    "gradient_clipping": "optimizer.max_grad_norm",
    "optimizer": "optimizer.name",
    "scheduler": "lr_scheduler.name",
    "fp16": "model.mixed_precision",
    "bf16": "model.mixed_precision",
    "torch_autocast": "model.mixed_precision",
    "amp": "model.mixed_precision",
    "zero_allow_untested_optimizer": "optimizer.name",
    "tensor_parallel": "distributed.mesh.tensor",
}
"""DeepSpeed's key → this trainer's option for the same."""
_APART = "its processes keep what saves cannot read"
_UNUSABLE: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "round_robin_gradients": (lambda value: value is True, "saves would not find the shards of the weights"),
    "compute_grad_norm": (lambda value: value is False, "steps that are not finite would be taken"),
    "legacy_stage1": (lambda value: value is True, "DeepSpeed no longer has it"),
    "cpu_offload": (lambda value: value is True, "say distributed.offload_optimizer=true instead"),
    "cpu_offload_param": (lambda value: value is True, "say distributed.offload_parameters=true instead"),
    "zenflow": (lambda value: value is not None, _APART),
}
"""ZeRO's key → which values do not work here, and why."""
_OFFLOADS = {"offload_optimizer": "offload_optimizer", "offload_param": "offload_parameters"}
"""ZeRO's key → this trainer's option."""


def deepspeed_options(
    stage: int, *, offload_optimizer: bool, offload_parameters: bool, path: str | None
) -> dict[str, Any]:
    """DeepSpeed's configuration, but for what depends on the run (batch, precision, clipping).

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
        ConfigError: the file cannot be read, is larger than any such file, or is no JSON object.
    """
    where = f"distributed.deepspeed_config: {path}"
    try:
        with Path(path).expanduser().open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise ConfigError(f"{where} is larger than 1 MiB; name a file of DeepSpeed's options")
        options = json.loads(content)
        if not isinstance(options, dict):
            raise ConfigError(f"{where} is no JSON object")
        options = _without_auto(options)
    except RecursionError as error:
        raise ConfigError(
            f"{where} holds JSON that is nested too deeply; name a file of DeepSpeed's options"
        ) from error
    except (OSError, ValueError) as error:
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
        more = f" and {len(unknown) - _MAX_NAMED:,} more" if len(unknown) > _MAX_NAMED else ""
        named = ", ".join(unknown[:_MAX_NAMED])
        yield f"{named}{more}, which this trainer does not pass on; remove what is not one of {', '.join(ALLOWED)}"
    for key, (is_possible, needed) in ALLOWED.items():
        if key in options and not is_possible(options[key]):
            yield f"{key}={options[key]!a:.60}, which must be {needed}"
    types = options.get("data_types")
    for key, value in types.items() if isinstance(types, dict) else ():
        if key != "grad_accum_dtype":
            yield f"{f'data_types.{key}'!a:.100}, which model.mixed_precision decides; remove it"
        elif value not in ("fp32", "bf16", "fp16"):
            yield f"data_types.{key}={value!a:.60}, which must be one of fp32, bf16 and fp16"
    zero = options.get("zero_optimization")
    if isinstance(zero, dict):
        yield from _zero_problems(zero, stage, wanted)


def _zero_problems(zero: Mapping[str, Any], stage: int, wanted: Mapping[str, bool]) -> Iterator[str]:
    if zero.get("stage", stage) != stage:
        yield f"ZeRO stage {zero['stage']!a:.20}, but distributed.strategy is deepspeed_{stage}"
    for key, (is_unusable, why) in _UNUSABLE.items():
        if is_unusable(zero.get(key)):
            yield f"zero_optimization.{key}={json.dumps(zero[key]):.60}: {why}; remove it"
    for key, option in _OFFLOADS.items():
        given = zero.get(key)
        if given is not None and not wanted[key]:
            yield f"zero_optimization.{key}; say distributed.{option}=true as well"
        elif isinstance(given, dict) and given.get("device") == "nvme":
            yield f"zero_optimization.{key}.device=nvme, from which saves cannot read; use cpu"
        elif isinstance(given, dict) and given.get("super_offload", False) is not False:
            yield f"zero_optimization.{key}.super_offload: {_APART}; remove it"


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
    """Types as every other strategy has them; tells the module what DeepSpeed did with the gradient."""

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
