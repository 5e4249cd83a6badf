"""Channels last: [B, C, H, W] weights and activations that lie in memory as [B, H, W, C], which tensor cores want."""

from typing import Any, Literal

import torch


def wants_channels_last(option: Literal["auto"] | bool, accelerator: str) -> bool:
    """What `trainer.channels_last` says on this kind of device; `auto` is CUDA only."""
    return accelerator == "cuda" if option == "auto" else option


def use_channels_last(network: Any) -> None:
    """Lays convolution kernels out with channels last. A convolution with such a kernel answers in the same layout
    whatever it is given, so inputs need no conversion. Values, shapes and exports stay the same."""
    network.to(memory_format=torch.channels_last)
