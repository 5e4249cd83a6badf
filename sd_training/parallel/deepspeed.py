"""DeepSpeed's ZeRO through Lightning, on GPUs and, for debugging, on CPUs over gloo.

DeepSpeed accumulates, clips, scales the loss (fp16) and skips non-finite steps itself. What is changed here: the loss
is divided by the micro-batches once, not by Lightning and by DeepSpeed (gradients were k times too small), inputs
keep their type (Lightning would round timesteps to bf16), layers run under autocast as with every other strategy,
tables of positions stay fp32, and the checks that insist on CUDA do not apply to CPUs.

`distributed.deepspeed_config`: a JSON file from anywhere, of which only what is known here reaches DeepSpeed.

Among DeepSpeed's keys are some that write to any path or start processes, so those that are taken are listed.
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

MAX_BYTES = 2**20
MAX_DEPTH = 20
"""Objects and lists in each other."""
_MAX_NAMED = 10
_WHERE = "distributed.deepspeed_config:"

Rule = tuple[Callable[[Any], bool], str]
"""Whether a value is possible, and what it must be in words."""

_BY_DEEPSPEED: Rule = (lambda value: True, "")
"""DeepSpeed looks at these itself, before the run starts (`deepspeed_options`)."""
_SWITCH: Rule = (lambda value: type(value) is bool, "true or false")
_COUNT: Rule = (lambda value: type(value) is int and value > 0, "a positive whole number")
_FACTOR: Rule = (lambda value: type(value) in (int, float) and 0 < value < math.inf, "a positive number")
TAKEN: Mapping[str, Rule] = {
    "activation_checkpointing": _BY_DEEPSPEED,
    "comms_logger": _BY_DEEPSPEED,
    "communication_data_type": _BY_DEEPSPEED,
    "data_types": (lambda value: isinstance(value, dict), "a JSON object"),
    "disable_allgather": _SWITCH,
    "dump_state": _SWITCH,
    "gradient_predivide_factor": _FACTOR,
    "memory_breakdown": _SWITCH,
    "prescale_gradients": _SWITCH,
    "steps_per_print": _COUNT,
    "timers": _BY_DEEPSPEED,
    "wall_clock_breakdown": _SWITCH,
    "zero_force_ds_cpu_optimizer": _SWITCH,
    "zero_optimization": _BY_DEEPSPEED,
}
"""DeepSpeed's keys that may be in a file."""
_GRADIENT_TYPES = ("fp32", "bf16", "fp16")


def read_file(path: str) -> dict[str, Any]:
    """The options of a file; HuggingFace's value "auto" counts as not given.

    Raises:
        ConfigError: it cannot be read, is larger or deeper than any such file, or is no JSON object.
    """
    try:
        with Path(path).expanduser().open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise ConfigError(f"{_WHERE} {path} is larger than 1 MiB; name a file of DeepSpeed's options")
        options = json.loads(content)
    except RecursionError as error:
        raise _too_deep(path) from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{_WHERE} {path} cannot be read: {error}") from error
    if not isinstance(options, dict):
        raise ConfigError(f"{_WHERE} {path} is no JSON object")
    if _is_deep(options):
        raise _too_deep(path)
    return _without_auto(options)


def problems_of(options: Mapping[str, Any], decided: Mapping[str, str], path: str | None) -> list[str]:
    """What of a file's options this trainer does not pass on.

    Args:
        decided: DeepSpeed's key → the option that decides it.
    """
    problems = [
        f"{_WHERE} {path} has {key!r}, which {option} decides; remove it from the file"
        for key, option in decided.items()
        if key in options
    ]
    if unknown := [f"{key!a:.100}" for key in options if key not in TAKEN and key not in decided]:
        more = f" and {len(unknown) - _MAX_NAMED:,} more" if len(unknown) > _MAX_NAMED else ""
        problems.append(
            f"{_WHERE} {path} has {', '.join(unknown[:_MAX_NAMED])}{more}, which this trainer does not pass on; remove "
            f"what is not one of {', '.join(TAKEN)}"
        )
    return [*problems, *_wrong_values(options, path)]


def _wrong_values(options: Mapping[str, Any], path: str | None) -> Iterator[str]:
    for key, (is_possible, wanted) in TAKEN.items():
        if key in options and not is_possible(options[key]):
            yield f"{_WHERE} {path} has {key}={options[key]!a:.60}, which must be {wanted}"
    types = options.get("data_types")
    for key, value in types.items() if isinstance(types, dict) else ():
        if key != "grad_accum_dtype":
            yield f"{_WHERE} {path} has {f'data_types.{key}'!a:.100}, which model.mixed_precision decides; remove it"
        elif value not in _GRADIENT_TYPES:
            yield f"{_WHERE} {path} has data_types.{key}={value!a:.60}, which must be one of fp32, bf16 and fp16"


def _without_auto(options: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in options.items() if value != "auto"}
    return {key: _without_auto(value) if isinstance(value, dict) else value for key, value in kept.items()}


def _is_deep(value: Any) -> bool:
    """Level by level: what is deep would be too deep for a function that calls itself."""
    level = [value]
    for _ in range(MAX_DEPTH):
        inner = [list(item.values()) if isinstance(item, dict) else item for item in level]
        level = [item for items in inner for item in items if isinstance(item, (dict, list))]
    return bool(level)


def _too_deep(path: str) -> ConfigError:
    return ConfigError(f"{_WHERE} {path} holds JSON deeper than {MAX_DEPTH} levels; name a file of DeepSpeed's options")


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
_UNUSABLE: Mapping[str, tuple[bool, str]] = {
    "round_robin_gradients": (True, "saves would not find the shares of the weights"),
    "compute_grad_norm": (False, "steps that are not finite would be taken"),
    "legacy_stage1": (True, "DeepSpeed has it no more"),
    "cpu_offload": (True, "say distributed.offload_optimizer=true instead"),
    "cpu_offload_param": (True, "say distributed.offload_parameters=true instead"),
}
"""ZeRO's key → the value that does not work here, and why."""
_APART = "its processes keep what saves cannot read"
_OFFLOADS = {"offload_optimizer": "offload_optimizer", "offload_param": "offload_parameters"}
"""ZeRO's key → this trainer's option."""


def deepspeed_options(
    stage: int, *, offload_optimizer: bool, offload_parameters: bool, path: str | None
) -> dict[str, Any]:
    """DeepSpeed's configuration, but for what depends on the run (batch, precision, clipping).

    Args:
        stage: of ZeRO: 1, 2 or 3.
        path: JSON file of further options; HuggingFace's value "auto" counts as not given.

    Raises:
        ConfigError: the file cannot be read, or decides what this trainer's options decide.
    """
    options = _stated(path) if path is not None else {}
    zero: dict[str, Any] = options.setdefault("zero_optimization", {})
    if not isinstance(zero, dict):
        raise ConfigError(f"distributed.deepspeed_config: {path} has a zero_optimization that is no JSON object")
    problems = problems_of(options, _DECIDED, path)
    if zero.get("stage", stage) != stage:
        problems.append(
            f"distributed.deepspeed_config: {path} has ZeRO stage {zero['stage']!a:.20}, but distributed.strategy is "
            f"deepspeed_{stage}"
        )
    problems += _zero_problems(
        zero, path, {"offload_optimizer": offload_optimizer, "offload_param": offload_parameters}
    )
    if problems:
        raise ConfigError(problems)
    zero["stage"] = stage
    if offload_optimizer:
        zero.setdefault("offload_optimizer", {"device": "cpu", "pin_memory": torch.cuda.is_available()})
    if offload_parameters:
        zero.setdefault("offload_param", {"device": "cpu", "pin_memory": torch.cuda.is_available()})
    options["zero_allow_untested_optimizer"] = True
    if path is not None:
        _check_with_deepspeed(options, path)
    return options


def _zero_problems(zero: Mapping[str, Any], path: str | None, wanted: Mapping[str, bool]) -> list[str]:
    """What of the file's `zero_optimization` this trainer cannot do.

    Args:
        wanted: which offloads the options ask for, by DeepSpeed's key.
    """
    where = f"distributed.deepspeed_config: {path} has zero_optimization"
    problems = [
        f"{where}.{key}={json.dumps(bad)}: {why}; remove it"
        for key, (bad, why) in _UNUSABLE.items()
        if zero.get(key) is bad
    ]
    for key, option in _OFFLOADS.items():
        given = zero.get(key)
        if given is not None and not wanted[key]:
            problems.append(f"{where}.{key}; say distributed.{option}=true as well")
        elif isinstance(given, dict) and given.get("device") == "nvme":
            problems.append(f"{where}.{key}.device=nvme, from which saves cannot read; use cpu")
        elif isinstance(given, dict) and given.get("super_offload", False) is not False:
            problems.append(f"{where}.{key}.super_offload: {_APART}; remove it")
    if zero.get("zenflow") is not None:
        problems.append(f"{where}.zenflow: {_APART}; remove it")
    return problems


def _check_with_deepspeed(options: Mapping[str, Any], path: str) -> None:
    """DeepSpeed's own rules, before the run starts."""
    from deepspeed.runtime.config import DeepSpeedConfig

    try:
        DeepSpeedConfig({**options, "train_micro_batch_size_per_gpu": 1})
    except Exception as error:  # it expects types of values that it has not looked at
        reason = " ".join(str(error).split())
        raise ConfigError(f"distributed.deepspeed_config: {path}: DeepSpeed refuses it: {reason:.500}") from error


def _stated(path: str) -> dict[str, Any]:
    stated = read_file(path)
    zero = stated.get("zero_optimization")
    if isinstance(zero, dict):
        stated["zero_optimization"] = {key: value for key, value in zero.items() if not _is_no_offload(key, value)}
    return stated


def _is_no_offload(key: str, value: Any) -> bool:
    return key in _OFFLOADS and isinstance(value, dict) and value.get("device") == "none"


class DeepSpeedZeroStrategy(TrainingStrategy, DeepSpeedStrategy):
    """ZeRO stages 1 to 3.

    Args:
        options: as `deepspeed_options` gives them.
        max_grad_norm: gradients are clipped to this norm; None leaves them.
        backend: communication library.
        timeout: how long processes wait for each other.
    """

    does_clip = True

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
