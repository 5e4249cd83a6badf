"""`distributed.deepspeed_config`: a JSON file from anywhere, of which only what is known here reaches DeepSpeed.

Among DeepSpeed's keys are some that write to any path or start processes, so those that are taken are listed.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from sd_training.errors import ConfigError

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
