"""Noise schedules of the discrete-time forward process q(x_t | x_0) = N(√ᾱ_t x_0, (1 - ᾱ_t) I) (Ho et al. 2020,
arXiv:2006.11239, eq. 4)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class NoiseSchedule:
    """Signal level of every timestep."""

    alphas_cumprod: Tensor
    """[T] float32, ᾱ_t."""

    @property
    def num_timesteps(self) -> int:
        """T."""
        return self.alphas_cumprod.shape[0]

    @property
    def snr(self) -> Tensor:
        """[T] signal-to-noise ratio ᾱ_t / (1 - ᾱ_t); 0 at a zero-terminal-SNR end."""
        return self.alphas_cumprod / (1.0 - self.alphas_cumprod)

    def to(self, device: torch.device) -> "NoiseSchedule":
        """The same schedule on `device`."""
        return NoiseSchedule(self.alphas_cumprod.to(device))

    def signal_and_noise_level(self, timesteps: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        """√ᾱ_t and √(1 - ᾱ_t), each [B, 1, 1, 1], for `timesteps` [B] and samples shaped `like` [B, ...]."""
        alpha_bar = self.alphas_cumprod[timesteps].view(-1, *[1] * (like.dim() - 1))
        return alpha_bar.sqrt(), (1.0 - alpha_bar).sqrt()


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
        ValueError: on a `beta_schedule` that is not one of linear, scaled_linear, squaredcos_cap_v2.
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
            raise ValueError(f"beta_schedule {name!r} is not one of linear, scaled_linear, squaredcos_cap_v2")


def rescale_zero_terminal_snr(alphas_cumprod: Tensor) -> Tensor:
    """Shift and scale √ᾱ so that the last step is pure noise and the first keeps its level.

    Lin et al. 2023 (arXiv:2305.08891), algorithm 1.

    Args:
        alphas_cumprod: [T] ᾱ_t.
    """
    root = alphas_cumprod.sqrt()
    first, last = root[0].clone(), root[-1].clone()
    return ((root - last) * first / (first - last)) ** 2


def noise_schedule_of(scheduler_config: Mapping[str, Any]) -> NoiseSchedule:
    """The schedule of a diffusers scheduler config, zero-terminal-SNR rescaled where the config says so.

    Everything is computed in float64 and after the rescaling, so that tables made from it (SNR, weights) agree.
    """
    alphas_cumprod = torch.cumprod(1.0 - betas_of(scheduler_config), dim=0)
    if scheduler_config.get("rescale_betas_zero_snr", False):
        alphas_cumprod = rescale_zero_terminal_snr(alphas_cumprod)
    return NoiseSchedule(alphas_cumprod.float())
