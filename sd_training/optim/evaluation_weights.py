"""The weights to draw, save and compare with: for schedule-free optimizers they are not those that are trained."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def evaluation_weights(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Inside this scope the parameters of a schedule-free optimizer hold the average x (Defazio et al. 2024,
    arXiv:2405.15682, eq. 5); afterwards they hold the trained point y again, to the bit. Others are left as they are.

    To be opened around previews and exports, on all ranks. Not around checkpoints: these hold y, from which x follows.
    A copy of the weights is kept on the CPU meanwhile. Not to be nested.
    """
    swapped: Any = optimizer if is_schedule_free(optimizer) else None
    if swapped is None:
        yield
        return
    weights = [weight for group in swapped.param_groups for weight in group["params"]]
    trained = [weight.detach().to("cpu", copy=True) for weight in weights]
    swapped.eval()
    try:
        yield
    finally:
        # `train()` would compute y from x, and so lose the last bits.
        with torch.no_grad():
            for weight, value in zip(weights, trained, strict=True):
                weight.copy_(value)
        for group in swapped.param_groups:
            group["train_mode"] = True


def is_schedule_free(optimizer: torch.optim.Optimizer) -> bool:
    """Whether training and evaluation use different weights."""
    return all("train_mode" in group for group in optimizer.param_groups)
