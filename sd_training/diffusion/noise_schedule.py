"""Noise schedules of the forward process q(x_t | x_0) = N(α x_0, σ² I) (Ho et al. 2020, arXiv:2006.11239, eq. 4, with
α = √ᾱ_t and σ = √(1 - ᾱ_t))."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from sd_training.errors import ConfigError


class Levels(NamedTuple):
    """Noise levels of a micro-batch, x_t = α x_0 + σ ε."""

    signal: Tensor
    """[B] α."""
    noise: Tensor
    """[B] σ."""
    model_time: Tensor
    """[B] time input of the denoiser: int64 timestep, 1000 σ of flow models, or ¼ ln σ of EDM."""


class NoiseSchedule(Protocol):
    """Which noise levels there are."""

    @property
    def num_timesteps(self) -> int:
        """T: `model_time` of the noisiest level is T - 1 or T; the sampler's `num_train_timesteps`."""
        ...

    def levels(self, time: Tensor) -> Levels:
        """Levels at `time` [B] as the timestep density gives it."""
        ...

    def to(self, device: torch.device) -> "NoiseSchedule":
        """The same schedule on `device`."""
        return self


@dataclass(frozen=True)
class DiscreteSchedule(NoiseSchedule):
    """Variance-preserving: α = √ᾱ_t, σ = √(1 - ᾱ_t) at T timesteps; time in [0, 1) is t / T."""

    alphas_cumprod: Tensor
    """[T] float32, ᾱ_t."""

    @property
    def num_timesteps(self) -> int:
        """T."""
        return self.alphas_cumprod.shape[0]

    def levels(self, time: Tensor) -> Levels:
        """As `NoiseSchedule.levels`."""
        timesteps = (time * self.num_timesteps).long().clamp_(max=self.num_timesteps - 1)
        alpha_bar = self.alphas_cumprod[timesteps]
        return Levels(alpha_bar.sqrt(), (1.0 - alpha_bar).sqrt(), timesteps)

    def to(self, device: torch.device) -> "DiscreteSchedule":
        """As `NoiseSchedule.to`."""
        return DiscreteSchedule(self.alphas_cumprod.to(device))


@dataclass(frozen=True)
class FlowSchedule(NoiseSchedule):
    """Rectified flow: α = 1 - σ, time = σ in [0, 1] (Liu et al. 2022, arXiv:2209.03003, eq. 1)."""

    num_timesteps: int = 1000

    def levels(self, time: Tensor) -> Levels:
        """As `NoiseSchedule.levels`."""
        return Levels(1.0 - time, time, time * self.num_timesteps)


@dataclass(frozen=True)
class SigmaSchedule(NoiseSchedule):
    """Variance-exploding: α = 1; time is ln σ (Karras et al. 2022, arXiv:2206.00364, section 5)."""

    num_timesteps: int = 1000

    def levels(self, time: Tensor) -> Levels:
        """As `NoiseSchedule.levels`."""
        return Levels(torch.ones_like(time), time.exp(), time / 4)


def _cosine_betas(num_timesteps: int) -> Tensor:
    """Nichol & Dhariwal 2021 (arXiv:2102.09672), eq. 17, with betas capped at 0.999."""

    def alpha_bar(time: float) -> float:
        return math.cos((time + 0.008) / 1.008 * math.pi / 2) ** 2

    steps = range(num_timesteps)
    ratios = [alpha_bar((i + 1) / num_timesteps) / alpha_bar(i / num_timesteps) for i in steps]
    return torch.tensor([min(1 - ratio, 0.999) for ratio in ratios], dtype=torch.float64)


def betas_of(scheduler_config: Mapping[str, Any]) -> Tensor:
    """[T] float64 betas that a diffusers scheduler config describes.

    Raises:
        ConfigError: on a `beta_schedule` that is not one of linear, scaled_linear, squaredcos_cap_v2.
    """
    trained = scheduler_config.get("trained_betas")
    if trained is not None:
        return torch.tensor(list(trained), dtype=torch.float64)
    start, end = scheduler_config.get("beta_start", 0.0001), scheduler_config.get("beta_end", 0.02)
    count = scheduler_config.get("num_train_timesteps", 1000)
    name = scheduler_config.get("beta_schedule", "linear")
    match name:
        case "linear":
            return torch.linspace(start, end, count, dtype=torch.float64)
        case "scaled_linear":
            return torch.linspace(start**0.5, end**0.5, count, dtype=torch.float64) ** 2
        case "squaredcos_cap_v2":
            return _cosine_betas(count)
        case _:
            known = "linear, scaled_linear, squaredcos_cap_v2"
            raise ConfigError(f"model.noise_scheduler_training: beta_schedule {name!r} is not one of {known}")


def rescale_zero_terminal_snr(alphas_cumprod: Tensor) -> Tensor:
    """Shift and scale √ᾱ so that the last step is pure noise and the first keeps its level.

    Lin et al. 2023 (arXiv:2305.08891), algorithm 1.

    Args:
        alphas_cumprod: [T] ᾱ_t.
    """
    root = alphas_cumprod.sqrt()
    first, last = root[0].clone(), root[-1].clone()
    return ((root - last) * first / (first - last)) ** 2


def discrete_schedule_of(scheduler_config: Mapping[str, Any]) -> DiscreteSchedule:
    """The schedule of a diffusers scheduler config, zero-terminal-SNR rescaled where the config says so.

    Everything is computed in float64 and after the rescaling, so that what is made from it (SNR, weights) agrees.
    """
    alphas_cumprod = torch.cumprod(1.0 - betas_of(scheduler_config), dim=0)
    if scheduler_config.get("rescale_betas_zero_snr", False):
        alphas_cumprod = rescale_zero_terminal_snr(alphas_cumprod)
    return DiscreteSchedule(alphas_cumprod.float())
