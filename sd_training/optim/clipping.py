"""The norm of all gradients, and clipping by it, for whole tensors and for tensors cut into blocks."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def gradient_norm(gradients: Iterable[Tensor]) -> Tensor:
    """Euclidean norm over all gradients, the same on every process; nothing is read on the host.

    Args:
        gradients: averaged over processes; those cut into blocks may be cut over different meshes.
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
    trained = [parameter for parameter in parameters if parameter.grad is not None]
    norm = gradient_norm(p.grad for p in trained if p.grad is not None)
    if max_norm is not None:
        # Blocks of different meshes cannot be scaled in one call, the local tensors can.
        plain = [nn.Parameter(_local(p), requires_grad=False) for p in trained]
        for stand_in, parameter in zip(plain, trained, strict=True):
            assert parameter.grad is not None
            stand_in.grad = _local(parameter.grad)
        torch.nn.utils.clip_grads_with_norm_(plain, max_norm, norm)
    return norm


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
