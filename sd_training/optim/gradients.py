"""Gradients before a step: their norm, clipping, and skipping the whole step where one is not finite.

The norm is taken over full tensors, whether parameters are replicated or sharded (DTensor).
"""

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def gradient_norm(gradients: Iterable[Tensor]) -> Tensor:
    """Euclidean norm over all gradients, the same on every process; nothing is read on the host.

    Args:
        gradients: averaged over processes; DTensors may have different meshes.
    """
    groups: dict[object, list[Tensor]] = {}
    for gradient in gradients:
        key = (gradient.device_mesh, gradient.placements) if isinstance(gradient, DTensor) else gradient.device
        groups.setdefault(key, []).append(gradient)
    norms = [torch.nn.utils.get_total_norm(group) for group in groups.values()]
    whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    return whole[0] if len(whole) == 1 else torch.linalg.vector_norm(torch.stack(whole))


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float | None) -> Tensor:
    """Scales gradients in place so that their norm is at most `max_norm`; returns the norm before."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = gradient_norm(gradients)
    if max_norm is not None:
        # DTensors of different meshes cannot be scaled in one call, their local tensors can.
        local = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]
        torch._foreach_mul_(local, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


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
        # Removed, because torch's own optimizers refuse to run with a flag that they do not read.
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
