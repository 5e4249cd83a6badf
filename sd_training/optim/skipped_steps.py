"""Skipping the whole step of a non-finite gradient, for optimizers that cannot do it on the device."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor


class SkippingOptimizer(torch.optim.Optimizer):
    """Leaves weights, state and step counts alone when `found_inf` is not zero.

    `found_inf` is a float tensor that the closure sets on the optimizer; it holds for one step. The host reads it once
    per step and waits for the device there. Fused AdamW needs none of this: its kernel reads the flag.
    """

    found_inf: Tensor

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Run `closure` (forward, backward, clipping), then update, unless the gradient was marked.

        Returns:
            What the closure returns.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # Taken away, because torch's own optimizers refuse to run beside a flag that they do not read.
        found_inf = self.__dict__.pop("found_inf", None)
        if found_inf is None or not found_inf.item():
            with torch.no_grad():
                self.update()
        return loss

    def update(self) -> None:
        """The step itself, from the gradients as they are."""
        raise NotImplementedError


@cache
def skipping(optimizer: type[torch.optim.Optimizer]) -> Any:
    """`optimizer` as a class of the same name, with the same arguments, that skips marked steps."""
    return type(optimizer.__name__, (SkippingOptimizer, optimizer), {"update": optimizer.step})
