"""Activations of repeated blocks that are made again in the backward pass instead of being kept (Chen et al. 2016,
arXiv:1604.06174).

Only `forward` of a block is replaced, on the block itself: names of weights, classes and exports stay what they are,
and whatever wraps or compiles the block afterwards sees an ordinary block.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cache
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

_PRODUCTS = {"aten.mm", "aten.addmm", "aten.convolution"}
"""Not `aten.bmm`: batched products are the scores of unfused attention, which are larger than all else in a block."""
_ATTENTION = ("aten._scaled_dot_product_", "aten._flash_attention_forward", "aten._efficient_attention_forward")
_XFORMERS = "xformers"


def recompute_activations(blocks: Sequence[nn.Module], *, every: int = 1, is_selective: bool = False) -> None:
    """Makes every `every`-th block, from the first one on, keep its inputs only while autograd is on.

    Losses and gradients are the same to the bit; random numbers drawn inside (dropout) are drawn again alike.

    Args:
        blocks: changed in place. To be called before blocks are compiled or sharded.
        is_selective: also keep the results of attention, matrix products and convolutions, which are slow to make
            again; norms, activations and sums are recomputed.
    """
    forward = _forward_selectively if is_selective else _forward_whole
    for block in blocks[::every]:
        # A bound method, not a closure: a copy of the block then runs the copy's weights.
        block.forward = MethodType(forward, block)


def _forward_whole(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    forward = type(block).forward
    if not torch.is_grad_enabled():
        return forward(block, *args, **kwargs)
    return checkpoint(forward, block, *args, use_reentrant=False, **kwargs)


def _forward_selectively(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    forward = type(block).forward
    if not torch.is_grad_enabled():
        return forward(block, *args, **kwargs)
    return checkpoint(forward, block, *args, use_reentrant=False, context_fn=_selective_contexts, **kwargs)


def _selective_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    return create_selective_checkpoint_contexts(_policy)


def _policy(_: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if is_kept(operation) else CheckpointPolicy.PREFER_RECOMPUTE


@cache
def is_kept(operation: Any) -> bool:
    """Whether selective recomputation keeps the result of an operation such as `torch.ops.aten.mm.default`."""
    name = str(operation).rpartition(".")[0]
    if name.startswith(_XFORMERS):
        return "forward" in name or "fwd" in name
    return name in _PRODUCTS or name.startswith(_ATTENTION)
