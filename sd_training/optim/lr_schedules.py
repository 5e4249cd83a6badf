"""Learning-rate schedules: pure functions of the optimizer step, so that a resumed run needs no schedule state.

Every function takes the number of optimizer steps completed and returns the factor of the peak learning rate for the
next step, in [0, 1]. A warm-up rises linearly, (step + 1) / warmup_steps, as in sd-training.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from sd_training.config.schema import LRScheduleConfig, LRScheduleParams, warmup_length
from sd_training.errors import ConfigError

LRSchedule = Callable[[int], float]
"""Optimizer steps completed → factor of the peak learning rate for the next step, in [0, 1]."""

_DEFAULT_DECAY_SHARE = 0.2  # of the run; longer decays gain little (arXiv:2405.18392)


def constant(step: int, *, warmup_steps: int) -> float:
    """The warm-up, then 1."""
    return min(1.0, (step + 1) / warmup_steps) if warmup_steps > 0 else 1.0


def cosine(step: int, *, warmup_steps: int, num_steps: int, end_factor: float = 0.0) -> float:
    """The warm-up, then ½(1 + cos πx) with x from 0 at the end of the warm-up to 1 at `num_steps`
    (Loshchilov & Hutter 2017, arXiv:1608.03983, eq. 5), falling to `end_factor` instead of 0."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    fall = 0.5 * (1.0 + math.cos(math.pi * _progress(step, warmup_steps, num_steps)))
    return end_factor + (1.0 - end_factor) * fall


def polynomial(step: int, *, warmup_steps: int, num_steps: int, power: float, end_factor: float) -> float:
    """The warm-up, then (1 - x)^power with x as in `cosine`, falling to `end_factor`; power 1 is linear."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    fall = (1.0 - _progress(step, warmup_steps, num_steps)) ** power
    return end_factor + (1.0 - end_factor) * fall


def inverse_sqrt(step: int, *, warmup_steps: int, reference_steps: int) -> float:
    """1 / √max(t / t_ref, 1), times the warm-up (EDM2: Karras et al. 2024, arXiv:2312.02696).

    Args:
        reference_steps: t_ref, counted as t from the start of the run.
    """
    return constant(step, warmup_steps=warmup_steps) / math.sqrt(max(step / reference_steps, 1.0))


def wsd(
    step: int, *, warmup_steps: int, num_steps: int, decay_steps: int, decay_shape: str, end_factor: float
) -> float:
    """Warm-up, stable at 1, then a decay over the last `decay_steps` (Hu et al. 2024, arXiv:2404.06395).

    Args:
        decay_shape: `linear` is 1 - x; `1-sqrt` is 1 - √x (Hägele et al. 2024, arXiv:2405.18392), with x from
            0 to 1 over the decay.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    x = _progress(step, num_steps - decay_steps, num_steps)
    fall = 1.0 - (x if decay_shape == "linear" else math.sqrt(x))
    return end_factor + (1.0 - end_factor) * fall


def lr_schedule(config: LRScheduleConfig, *, num_steps: int, global_batch: int) -> LRSchedule:
    """The schedule that `config` describes.

    Args:
        num_steps: length of the run [optimizer steps].
        global_batch: samples per optimizer step over all processes; it converts a warm-up given in images.

    Raises:
        ConfigError: warm-up and decay of `wsd` are longer than the run.
    """
    params = config.params
    warmup_steps = warmup_length(params, global_batch)
    falling: dict[str, Any] = {"warmup_steps": warmup_steps, "num_steps": num_steps, "end_factor": params.end_factor}
    match config.scheduler:
        case "constant" | "ConstantWithWarmup":
            return partial(constant, warmup_steps=warmup_steps)
        case "inverse_sqrt":
            return partial(inverse_sqrt, warmup_steps=warmup_steps, reference_steps=params.reference_length)
        case "cosine" | "CosineWithWarmup":
            return partial(cosine, **falling)
        case "linear":
            return partial(polynomial, power=1.0, **falling)
        case "polynomial":
            return partial(polynomial, power=params.power, **falling)
        case "wsd":
            decay = _decay_length(params, warmup_steps, num_steps)
            return partial(wsd, decay_steps=decay, decay_shape=params.decay_shape, **falling)


def _decay_length(params: LRScheduleParams, warmup_steps: int, num_steps: int) -> int:
    if params.decay_length is None:
        return max(1, min(round(_DEFAULT_DECAY_SHARE * num_steps), num_steps - warmup_steps))
    if warmup_steps + params.decay_length > num_steps:
        raise ConfigError(
            f"lr_scheduler.params.decay_length: {params.decay_length:,} steps of decay after {warmup_steps:,} steps of "
            f"warm-up do not fit into a run of {num_steps:,} steps; shorten one of them, or leave decay_length out"
        )
    return params.decay_length


def _progress(step: int, start: int, end: int) -> float:
    """0 at `start` and before, 1 at `end` and after."""
    return min(1.0, max(0.0, (step - start) / max(1, end - start)))
