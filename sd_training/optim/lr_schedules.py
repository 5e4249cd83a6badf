"""Learning-rate schedules: pure functions of the optimizer step, so that a resumed run needs no schedule state."""

import math
from collections.abc import Callable
from functools import partial

from sd_training.config.schema import LRScheduleConfig, warmup_length
from sd_training.errors import ConfigError

LRSchedule = Callable[[int], float]
"""Optimizer steps completed → factor of the peak learning rate for the next step, in [0, 1]."""

_DEFAULT_DECAY_SHARE = 0.2  # of the run; longer decays gain little (arXiv:2405.18392)


def lr_schedule(config: LRScheduleConfig, *, num_steps: int, global_batch: int) -> LRSchedule:
    """The schedule that `config` describes.

    Args:
        num_steps: length of the run [optimizer steps].
        global_batch: samples per optimizer step over all processes; it converts a warm-up given in images.

    Raises:
        ConfigError: warm-up and decay of `wsd` are longer than the run.
    """
    params, warmup_steps = config.params, warmup_length(config.params, global_batch)
    start = warmup_steps
    if config.scheduler == "wsd":
        length = params.decay_length
        if length is None:
            length = max(1, min(round(_DEFAULT_DECAY_SHARE * num_steps), num_steps - warmup_steps))
        elif warmup_steps + length > num_steps:
            sizes = f"{length:,} steps after {warmup_steps:,} of warm-up do not fit into a run of {num_steps:,} steps"
            raise ConfigError(f"lr_scheduler.params.decay_length: {sizes}; shorten it, or leave it out")
        start = num_steps - length
    return partial(_factor, config=config, warmup_steps=warmup_steps, start=start, end=num_steps)


def _factor(step: int, *, config: LRScheduleConfig, warmup_steps: int, start: int, end: int) -> float:
    """A linear warm-up, (step + 1) / warmup_steps as in sd-training, then what the schedule makes of x, which runs from
    0 at `start` to 1 at `end`, falling to `end_factor` instead of 0."""
    params, is_rising = config.params, step < warmup_steps
    rise = (step + 1) / warmup_steps if is_rising else 1.0
    x = min(1.0, max(0.0, (step - start) / max(1, end - start)))
    match config.scheduler:
        case "constant" | "ConstantWithWarmup":
            return rise
        case "inverse_sqrt":  # 1 / √max(t / t_ref, 1) (EDM2: Karras et al. 2024, arXiv:2312.02696), t from the start
            return rise / math.sqrt(max(step / params.reference_length, 1.0))
        case "cosine" | "CosineWithWarmup":  # Loshchilov & Hutter 2017 (arXiv:1608.03983, eq. 5)
            fall = 0.5 * (1.0 + math.cos(math.pi * x))
        case "linear":
            fall = 1.0 - x
        case "polynomial":
            fall = (1.0 - x) ** params.power
        case "wsd":  # Hu et al. 2024 (arXiv:2404.06395); 1 - √x: Hägele et al. 2024 (arXiv:2405.18392)
            fall = 1.0 - (x if params.decay_shape == "linear" else math.sqrt(x))
    return rise if is_rising else params.end_factor + (1.0 - params.end_factor) * fall
