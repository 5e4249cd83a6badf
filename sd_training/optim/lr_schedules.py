"""Learning-rate schedules: pure functions of the optimizer step, so that a resumed run needs no schedule state."""

import math
from collections.abc import Callable
from functools import partial

LRSchedule = Callable[[int], float]
"""Optimizer steps completed → factor of the peak learning rate for the next step, in [0, 1]."""


def constant_with_warmup(step: int, *, warmup_steps: int) -> float:
    """(step + 1) / warmup_steps during the warm-up, then 1; as sd-training."""
    return min(1.0, (step + 1) / warmup_steps) if warmup_steps > 0 else 1.0


def cosine_with_warmup(step: int, *, warmup_steps: int, num_steps: int) -> float:
    """Linear warm-up, then ½(1 + cos πx) with x from 0 at the end of the warm-up to 1 at `num_steps`
    (Loshchilov & Hutter 2017, arXiv:1608.03983, eq. 5)."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(1, num_steps - warmup_steps)
    return 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))


def lr_schedule(name: str, *, warmup_steps: int, num_steps: int) -> LRSchedule:
    """The schedule by its config name.

    Raises:
        ValueError: for a name that is not known.
    """
    match name:
        case "ConstantWithWarmup":
            return partial(constant_with_warmup, warmup_steps=warmup_steps)
        case "CosineWithWarmup":
            return partial(cosine_with_warmup, warmup_steps=warmup_steps, num_steps=num_steps)
        case _:
            raise ValueError(f"lr_scheduler.scheduler {name!r} is not one of ConstantWithWarmup, CosineWithWarmup")
