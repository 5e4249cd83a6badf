"""The ideal denoiser of a Gaussian, in closed form, and the loop of a diffusers pipeline around it.

With x_0 ~ N(μ, s²): E[x_0 | x_t] = μ + α s² / (α² s² + σ²) (x_t - α μ), and every answer is linear in x_0 and ε.
"""

import inspect
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.stats import norm
from torch import Tensor

from tests.conformance import reference
from tests.conformance.reference import Setting

MEAN, STD = 0.4, 0.5
NUM_SAMPLES = 4000


def levels_at(setting: Setting, timestep: float) -> tuple[float, float]:
    """α and σ of what the denoiser is told."""
    if setting.prediction == "flow_prediction":
        return 1 - timestep / 1000, timestep / 1000
    if setting.prediction == "edm":
        return 1.0, float(np.exp(4 * timestep))
    table = reference.alpha_bar(setting.schedule)
    below = int(timestep)
    if below == timestep:
        return float(np.sqrt(table[below])), float(np.sqrt(1 - table[below]))
    # Some samplers ask between two steps, with σ/α linear in between; training never does.
    ratio = np.interp(timestep, [below, below + 1], np.sqrt(1 / table[below : below + 2] - 1))
    return float(1 / np.hypot(1, ratio)), float(ratio / np.hypot(1, ratio))


@dataclass(frozen=True)
class IdealDenoiser:
    """Answers in the training parameterisation."""

    setting: Setting

    def __call__(self, model_input: Tensor, timestep: float) -> Tensor:
        """The answer that has the least squared error."""
        alpha, sigma = levels_at(self.setting, timestep)
        noisy = model_input
        if self.setting.prediction == "edm":  # the denoiser sees c_in x_t
            noisy = model_input * float(np.hypot(sigma, self.setting.sigma_data))
        variance = (alpha * STD) ** 2 + sigma**2
        x0 = MEAN + alpha * STD**2 / variance * (noisy - alpha * MEAN)
        eps = sigma / variance * (noisy - alpha * MEAN)
        answer: Any = reference.target(self.setting.prediction, x0, eps, alpha, sigma, self.setting.sigma_data)  # type: ignore[arg-type]
        return torch.as_tensor(answer)


@dataclass(frozen=True)
class Moments:
    """Of samples."""

    mean: float
    std: float


def sample(sampler: Any, setting: Setting, num_steps: int, mu: float | None = None) -> Moments:
    """Runs the sampler as a pipeline does, from equally likely starting points, so that ODE samplers have no chance."""
    sampler.set_timesteps(num_steps, **({} if mu is None else {"mu": mu}))
    start = norm.ppf((np.arange(NUM_SAMPLES) + 0.5) / NUM_SAMPLES)
    latents = torch.tensor(start).view(-1, 1, 1, 1) * getattr(sampler, "init_noise_sigma", 1.0)
    latents = latents[torch.randperm(NUM_SAMPLES, generator=torch.Generator().manual_seed(3))]
    chance = {}
    if "generator" in inspect.signature(sampler.step).parameters:
        chance = {"generator": torch.Generator().manual_seed(4)}
    denoiser = IdealDenoiser(setting)
    for timestep in sampler.timesteps:
        answer = denoiser(scaled(sampler, latents, timestep), float(timestep))
        latents = sampler.step(answer, timestep, latents, **chance).prev_sample
    return Moments(float(latents.mean()), float(latents.std()))


def scaled(sampler: Any, latents: Tensor, timestep: Any) -> Tensor:
    """What the denoiser sees; pipelines of flow samplers proper do not scale."""
    if not hasattr(sampler, "scale_model_input"):
        return latents
    result: Tensor = sampler.scale_model_input(latents, timestep)
    return result


def exact(sampler: Any, setting: Setting, num_steps: int, mu: float | None = None) -> Moments:
    """What the probability-flow ODE makes of the sampler's start, which is not quite x_T: where some signal is left at
    the last step, samplers start from noise alone (Lin et al. 2023, section 3.1)."""
    sampler.set_timesteps(num_steps, **({} if mu is None else {"mu": mu}))
    timestep = sampler.timesteps[0]
    alpha, sigma = levels_at(setting, float(timestep))
    seen = scaled(sampler, torch.ones(1, 1, 1, 1).double() * getattr(sampler, "init_noise_sigma", 1.0), timestep)
    start_std = float(seen)
    if setting.prediction == "edm":
        start_std *= float(np.hypot(sigma, setting.sigma_data))
    marginal = float(np.sqrt((alpha * STD) ** 2 + sigma**2))
    return Moments(MEAN - STD * alpha * MEAN / marginal, STD * start_std / marginal)
