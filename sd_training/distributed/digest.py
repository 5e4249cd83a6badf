"""A number that stands for the bits of many tensors, computed where they lie."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element → integers of that size."""
_CHUNK = 1 << 22
"""Elements at once: what is needed beside the tensors is 64 MiB."""


def bit_digest(tensors: Iterable[Tensor]) -> Tensor:
    """[] int64: the sum of every element's bits, as an integer, times an odd number of its own, modulo 2^64.

    One flipped bit always changes it: a power of two below 2^64 times an odd number is no multiple of 2^64. Several
    differences cancel with a probability of about 2^-64.

    Args:
        tensors: on one device, in the same order on every process; of a DTensor the local block counts.
    """
    total: Tensor | None = None
    start = 0
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        bits = local.detach().contiguous().view(-1).view(_INTEGERS[local.element_size()])
        for chunk in bits.split(_CHUNK):
            factors = torch.arange(start, start + len(chunk), device=chunk.device).mul_(2).add_(1)
            part = factors.mul_(chunk).sum()
            total = part if total is None else total + part
            start += len(chunk)
    return torch.zeros((), dtype=torch.int64) if total is None else total
