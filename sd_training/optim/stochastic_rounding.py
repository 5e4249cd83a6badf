"""AdamW on bf16 weights that loses no small updates: fp32 arithmetic, then rounding at random without bias."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sd_training.optim.parameter_groups import Group
from sd_training.optim.skipped_steps import SkippingOptimizer

_MAX_COPIED_ELEMENTS = 2**26  # fp32 copies that live at once: 256 MiB of weights, as much of gradients


def round_stochastically(values: Tensor, generator: torch.Generator) -> Tensor:
    """fp32 to one of the two neighbouring bf16 values, with probabilities that keep the mean (Gupta et al. 2015,
    arXiv:1502.02551, section 3).

    Args:
        values: fp32, any shape. What bf16 can hold, infinities and NaN are kept.
        generator: of the device of `values`.

    Returns:
        bf16, the same shape.
    """
    # bf16 is the upper half of fp32: a uniform draw added to the lower half carries as often as the value is near
    # the upper neighbour.
    bits = values.contiguous().view(torch.int32)
    draws = torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32, device=bits.device, generator=generator)
    rounded = ((bits + draws) & -0x10000).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).to(torch.bfloat16)


def rounding_generator(seed: int, step: int, device: torch.device) -> torch.Generator:
    """The generator of one optimizer step: the same on every rank, so that replicas stay equal."""
    key = np.random.SeedSequence([seed % 2**64, step]).generate_state(
        1, np.uint32
    )  # torch's CPU generator reads 32 bits
    return torch.Generator(device).manual_seed(int(key[0]))


class StochasticRoundingAdamW(SkippingOptimizer):
    """`torch.optim.AdamW` computed in fp32; bf16 weights are rounded stochastically, fp32 weights are not rounded.

    The averages are kept in fp32.

    Args:
        groups: parameter groups with `lr` and `weight_decay`.
        seed: of the rounding; the number of the step is the other half of the key.
        betas: of AdamW.
        eps: of AdamW.
        fused: AdamW in one kernel.
    """

    def __init__(self, groups: list[Group], *, seed: int, betas: tuple[float, float], eps: float, fused: bool) -> None:
        self._adamw = torch.optim.AdamW([torch.zeros(1)], betas=betas, eps=eps, fused=fused)
        self._seed = seed
        super().__init__([{**self._adamw.defaults, "num_steps": 0, **group} for group in groups], {})

    def update(self) -> None:
        """One step."""
        generators: dict[torch.device, torch.Generator] = {}
        for group in self.param_groups:
            group["num_steps"] += 1
            for weights in _chunks([weight for weight in group["params"] if weight.grad is not None]):
                self._update(weights, group, generators)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, which would cast the averages to the type of the weights."""
        super().load_state_dict(state_dict)
        saved = [index for group in state_dict["param_groups"] for index in group["params"]]
        weights = [weight for group in self.param_groups for weight in group["params"]]
        for index, weight in zip(saved, weights, strict=True):
            for name, value in state_dict["state"].get(index, {}).items():
                if self.state[weight][name].dtype != value.dtype:
                    self.state[weight][name] = value.to(weight.device, copy=True)

    def _update(self, weights: list[Tensor], group: Group, generators: dict[torch.device, torch.Generator]) -> None:
        copies = [weight.detach().float() for weight in weights]  # fp32 weights are updated in place
        for weight, copy in zip(weights, copies, strict=True):
            assert weight.grad is not None
            copy.grad = weight.grad.float()
            self._adamw.state[copy] = self.state[weight]
        self._adamw.param_groups = [{**group, "params": copies}]
        self._adamw.step()
        self._adamw.state.clear()
        for weight, copy in zip(weights, copies, strict=True):
            if weight.dtype == torch.bfloat16:
                if weight.device not in generators:
                    generators[weight.device] = rounding_generator(self._seed, group["num_steps"], weight.device)
                weight.copy_(round_stochastically(copy, generators[weight.device]))


def _chunks(weights: list[Tensor]) -> Iterator[list[Tensor]]:
    """Weights in order, a limited number of elements at a time."""
    chunk: list[Tensor] = []
    for weight in weights:
        if chunk and sum(w.numel() for w in chunk) + weight.numel() > _MAX_COPIED_ELEMENTS:
            yield chunk
            chunk = []
        chunk.append(weight)
    if chunk:
        yield chunk
