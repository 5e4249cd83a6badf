"""Broken variants of the project's functions: mistakes that trainers have made."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch

from sd_training import diffusion
from sd_training.diffusion import DiscreteSchedule, Levels, Objective

Apply = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Mutation:
    """A broken variant and the checks that must catch it."""

    name: str
    apply: Apply
    caught_by: tuple["partial[None]", ...]


def swap(owner: Any, name: str, broken: Callable[..., Any]) -> Apply:
    """Replaces a function by `broken(original, *arguments)`."""
    original = getattr(owner, name)

    def changed(*arguments: Any, **options: Any) -> Any:
        return broken(original, *arguments, **options)

    return lambda monkeypatch: monkeypatch.setattr(owner, name, changed)


def weights_of_unrescaled(original: Any, config: Any, kind: Any, signal: Any, sigma: Any, sigma_data: Any) -> Any:
    """Weights from the SNR of before the zero-SNR rescaling."""
    plain = diffusion.discrete_schedule_of({"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012})
    root = plain.alphas_cumprod.sqrt()
    before = signal * (root[0] - root[-1]) / root[0] + root[-1]
    return original(config, kind, before, (1 - before.square()).sqrt(), sigma_data)


def edm_target_swapped(original: Any, kind: str, x0: Any, noise: Any, signal: Any, sigma: Any, data: float) -> Any:
    """c_skip where c_out belongs and the other way round."""
    if kind != "edm":
        return original(kind, x0, noise, signal, sigma, data)
    variance = sigma.square() + data**2
    skip, out = data**2 / variance, sigma * data / variance.sqrt()
    return (x0 - out * (x0 + sigma * noise)) / skip


def target_without_offset(original: Any, self: Objective, latents: Any, draws: Any) -> Any:
    """The denoiser sees the offset and is asked for the noise without."""
    plain = replace(self, config=self.config.replace(offset_noise=0.0))
    return replace(original(self, latents, draws), target=original(plain, latents, draws).target)


def changed_levels(change: Callable[[Levels], Levels]) -> Callable[..., Levels]:
    """Levels with a field changed."""
    return lambda original, self, time: change(original(self, time))


def cosine_betas_from_zero(_: Any, num_timesteps: int) -> torch.Tensor:
    """Eq. 17 of Nichol & Dhariwal without its s = 0.008."""
    root = (torch.linspace(0, math.pi / 2, num_timesteps + 1, dtype=torch.float64)).cos()
    return (1 - (root[1:] / root[:-1]) ** 2).clamp(max=0.999)


def rescaled_alpha_bar(_: Any, alphas_cumprod: torch.Tensor) -> torch.Tensor:
    """Algorithm 1 on ᾱ instead of √ᾱ."""
    first, last = alphas_cumprod[0], alphas_cumprod[-1]
    return (alphas_cumprod - last) * first / (first - last)


def unscaled_root(_: Any, alphas_cumprod: torch.Tensor) -> torch.Tensor:
    """Algorithm 1 without scaling the first step back."""
    return (alphas_cumprod.sqrt() - alphas_cumprod[-1].sqrt()) ** 2


def one_step_early(original: Any, config: Any) -> DiscreteSchedule:
    """ᾱ_{t-1} in place of ᾱ_t."""
    alphas_cumprod = original(config).alphas_cumprod
    return DiscreteSchedule(torch.cat([torch.ones(1), alphas_cumprod[:-1]]))


def settings_without(key: str) -> Callable[..., Any]:
    """The sampler is not told one of the training settings."""

    def settings(original: Any, *arguments: Any) -> Any:
        return {name: value for name, value in original(*arguments).items() if name != key}

    return settings


def flow_sampler_unshifted(original: Any, *arguments: Any, **options: Any) -> Any:
    """The sampler is not told the shift."""
    made = original(*arguments, **options)
    key = "flow_shift" if "flow_shift" in made.config else "shift"
    return type(made).from_config(made.config, **{key: 1.0})


def edm_sampler_with_default_data(original: Any, *arguments: Any, **options: Any) -> Any:
    """The sampler is not told sigma_data."""
    made = original(*arguments, **options)
    return type(made).from_config(made.config, sigma_data=0.5 if made.config.sigma_data != 0.5 else 1.0)


def per_target_of_epsilon(original: Any, kind: str, *rest: Any) -> Any:
    """The Jacobian of ε for v."""
    return original("epsilon" if kind == "v_prediction" else kind, *rest)
