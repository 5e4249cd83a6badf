"""Finds where in a forward and backward pass the first value arises that is infinite or not a number."""

from collections.abc import Iterator, Mapping
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sd_training.types import PixelBatch


class FirstNonFinite:
    """Watches every module of some networks; of nested modules the innermost one is reported.

    Args:
        networks: by the name that findings use.
    """

    def __init__(self, networks: Mapping[str, nn.Module]) -> None:
        self.has_found = False
        self._networks = dict(networks)
        self._found: list[str] = []
        self._has_output = self._has_gradient = False
        for part, network in networks.items():
            for name, module in network.named_modules():
                look = partial(self._look_at_output, f"{part}.{name}".rstrip("."))
                module.register_forward_hook(look, with_kwargs=True)

    def begin(self, batch: PixelBatch) -> None:
        """A new micro-batch: looks at the weights and at the batch itself."""
        self._found, self._has_output, self._has_gradient = [], False, False
        for part, network in self._networks.items():
            odd = [name for name, p in network.named_parameters() if not _is_finite(p)]
            if odd:
                self._tell(f"{len(odd)} weights of {part} are not finite to begin with, the first is {odd[0]}")
        for field in fields(batch):
            value = getattr(batch, field.name)
            if isinstance(value, Tensor) and not _is_finite(value):
                rows = [i for i, row in enumerate(value) if not _is_finite(row)]
                self._tell(f"the batch's {field.name} is not finite in samples {rows[:20]}")

    def findings(self) -> list[str]:
        """What was found since `begin`, in the order of the computation; to be called after the backward pass."""
        return self._found

    def _tell(self, text: str) -> None:
        self.has_found = True
        self._found.append(text)

    def _look_at_output(self, name: str, module: nn.Module, inputs: Any, named_inputs: Any, output: Any) -> None:
        tensors = list(_tensors(output))
        if not self._has_output and not all(map(_is_finite, tensors)):
            self._has_output = True
            given = [t.detach().abs().max() for t in _tensors((inputs, named_inputs)) if t.numel()]
            kind, largest = type(module).__name__, max(map(float, given), default=0.0)
            cause = (
                f"inputs up to {largest:.4g}" if all(map(_is_finite, given)) else "inputs that were not finite already"
            )
            self._tell(f"first output that is not finite: {name} ({kind}), from {cause}")
        for tensor in tensors:
            if tensor.requires_grad:
                tensor.register_hook(partial(self._look_at_gradient, name))

    def _look_at_gradient(self, name: str, gradient: Tensor) -> None:
        if not self._has_gradient and not _is_finite(gradient):
            self._has_gradient = True
            self._tell(f"first gradient that is not finite: that of the output of {name}")


def _is_finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor.detach()).all())


def _tensors(value: Any) -> Iterator[Tensor]:
    """Those inside tuples, lists and mappings, such as the outputs of diffusers and transformers."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
