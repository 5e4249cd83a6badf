"""Copies of networks whose live weights lie elsewhere, for exports."""

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import ModelMixin
from torch import Tensor, nn


def copy_with_weights(network: nn.Module, weights: Mapping[str, Tensor]) -> nn.Module:
    """A network of the same class and settings on the CPU, with other weights.

    Args:
        network: its weights are not read, unless they are missing in `weights`; it may be cut by FSDP2.
        weights: by parameter name; used as they are, not copied.
    """
    cls: Any = next(c for c in type(network).__mro__ if not c.__name__.startswith("FSDP"))
    settings: Any = network.config
    if issubclass(cls, ModelMixin):  # from_config leaves out what was a default once, even where it was changed since
        settings = {name: value for name, value in settings.items() if name != "_use_default_values"}
    with torch.device("meta"):  # no memory, no random numbers
        copy: nn.Module = cls.from_config(settings) if issubclass(cls, ModelMixin) else cls(settings)
    rest = {name: _whole(value) for name, value in network.state_dict().items() if name not in weights}
    copy.load_state_dict({**weights, **rest}, assign=True)
    _copy_tables(network, copy)
    return copy.eval()


def _whole(value: Tensor) -> Tensor:
    return value.detach().cpu()


def _copy_tables(network: nn.Module, copy: nn.Module) -> None:
    """Buffers that are computed at construction and not stored, such as tables of positions."""
    for name, buffer in network.named_buffers():
        parent, _, leaf = name.rpartition(".")
        setattr(copy.get_submodule(parent), leaf, buffer.detach().cpu())
