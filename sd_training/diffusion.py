"""The training objective, written once: noise schedule × prediction type × timestep density × loss weighting × loss.

Every random number comes with the batch, drawn per sample by the loader, so all of this is a pure function: a density
never touches a generator. x_t = α x_0 + σ ε; time is what `levels` of a noise schedule takes, in [0, 1] from clean to
pure noise, or ln σ.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from sd_training.config.schema import LossConfig, LossWeightingConfig, ObjectiveConfig, PredictionType
from sd_training.errors import ConfigError
from sd_training.types import Draws, NoisedBatch

_OPEN = 2.0**-25
"""Draws are kept this far from 0 and 1, where normal quantiles are infinite."""
_TINY = 1e-12
_SMALLEST_SIGMA = 1e-3
"""Below, σ⁻² would be larger than on diffusers' grid of a thousand steps."""

# Noise schedules of the forward process q(x_t | x_0) = N(α x_0, σ² I) (Ho et al. 2020, arXiv:2006.11239, eq. 4, with
# α = √ᾱ_t and σ = √(1 - ᾱ_t)).


class Levels(NamedTuple):
    """Noise levels of a micro-batch, x_t = α x_0 + σ ε."""

    signal: Tensor
    """[B] α."""
    noise: Tensor
    """[B] σ."""
    model_time: Tensor
    """[B] time input of the denoiser: int64 timestep, 1000 σ of flow models, or ¼ ln σ of EDM."""


@dataclass(frozen=True)
class DiscreteSchedule:
    """Variance-preserving: α = √ᾱ_t, σ = √(1 - ᾱ_t) at T timesteps; time in [0, 1) is t / T."""

    alphas_cumprod: Tensor
    """[T] float32, ᾱ_t."""

    @property
    def num_timesteps(self) -> int:
        """T: the timestep of the noisiest level is T - 1; of other schedules T. The sampler's `num_train_timesteps`."""
        return self.alphas_cumprod.shape[0]

    def levels(self, time: Tensor) -> Levels:
        """Levels at `time` [B] as the timestep density gives it."""
        timesteps = (time * self.num_timesteps).long().clamp_(max=self.num_timesteps - 1)
        alpha_bar = self.alphas_cumprod[timesteps]
        return Levels(alpha_bar.sqrt(), (1.0 - alpha_bar).sqrt(), timesteps)


@dataclass(frozen=True)
class FlowSchedule:
    """Rectified flow: α = 1 - σ, time = σ in [0, 1] (Liu et al. 2022, arXiv:2209.03003, eq. 1)."""

    num_timesteps: int = 1000

    def levels(self, time: Tensor) -> Levels:
        """As `DiscreteSchedule.levels`."""
        return Levels(1.0 - time, time, time * self.num_timesteps)


@dataclass(frozen=True)
class SigmaSchedule:
    """Variance-exploding: α = 1; time is ln σ (Karras et al. 2022, arXiv:2206.00364, section 5)."""

    num_timesteps: int = 1000

    def levels(self, time: Tensor) -> Levels:
        """As `DiscreteSchedule.levels`."""
        return Levels(torch.ones_like(time), time.exp(), time / 4)


NoiseSchedule: TypeAlias = DiscreteSchedule | FlowSchedule | SigmaSchedule
"""Which noise levels there are."""


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


# Prediction types.


def noised(latents: Tensor, noise: Tensor, signal: Tensor, sigma: Tensor) -> Tensor:
    """x_t = α x_0 + σ ε (Ho et al. 2020, arXiv:2006.11239, eq. 4)."""
    return signal * latents + sigma * noise


def input_scale(prediction_type: PredictionType, sigma: Tensor, sigma_data: float) -> Tensor | float:
    """c_in, what x_t is multiplied by before the denoiser sees it: 1 / √(σ² + σ_data²) for EDM (Karras et al. 2022,
    arXiv:2206.00364, table 1)."""
    return (sigma.square() + sigma_data**2).rsqrt() if prediction_type == "edm" else 1.0


def target_of(
    prediction_type: PredictionType, latents: Tensor, noise: Tensor, signal: Tensor, sigma: Tensor, sigma_data: float
) -> Tensor:
    """The target of the denoiser, given x_t = α x_0 + σ ε.

    Args:
        latents, noise: [B, C, h, w] x_0 and ε.
        signal, sigma: [B, 1, 1, 1] α and σ.
        sigma_data: standard deviation of x_0, which EDM alone reads.
    """
    match prediction_type:
        case "epsilon":
            return noise
        case "v_prediction":  # α ε - σ x_0 (Salimans & Ho 2022, arXiv:2202.00512, section 4)
            return signal * noise - sigma * latents
        case "sample":
            return latents
        case "flow_prediction":  # dx_t/dσ of the straight path (Liu et al. 2022, arXiv:2209.03003, eq. 1)
            return noise - latents
        case "edm":  # (x_0 - c_skip x_t) / c_out (Karras et al. 2022, arXiv:2206.00364, eq. 7 and table 1)
            # The same, without the difference of two nearly equal numbers at small σ.
            return (sigma / sigma_data * latents - sigma_data * noise) * (sigma.square() + sigma_data**2).rsqrt()


# Timestep densities, how often each noise level is trained: uniform draws u in [0, 1) → time, each the inverse of a
# distribution function.


def _normal_quantile(draw: Tensor) -> Tensor:
    return torch.special.ndtri(draw.clamp(_OPEN, 1.0 - _OPEN))


def logit_normal(draw: Tensor, mean: float, std: float) -> Tensor:
    """sigmoid(m + s Φ⁻¹(u)) (Esser et al. 2024, arXiv:2403.03206, section 3.1)."""
    return torch.sigmoid(mean + std * _normal_quantile(draw))


def log_normal(draw: Tensor, mean: float, std: float) -> Tensor:
    """ln σ = P_mean + P_std Φ⁻¹(u) (Karras et al. 2022, arXiv:2206.00364, table 1)."""
    return mean + std * _normal_quantile(draw)


def mode(draw: Tensor, scale: float) -> Tensor:
    """1 - u - s (cos²(πu/2) - 1 + u) (Esser et al. 2024, section 3.1)."""
    return 1.0 - draw - scale * ((math.pi / 2 * draw).cos().square() - 1.0 + draw)


def cosmap(draw: Tensor) -> Tensor:
    """1 - 1 / (tan(πu/2) + 1) (Esser et al. 2024, section 3.1)."""
    return 1.0 - 1.0 / ((math.pi / 2 * draw).tan() + 1.0)


def shifted(time: Tensor, factor: float) -> Tensor:
    """aσ / (1 + (a - 1)σ) (Esser et al. 2024, eq. 23)."""
    return factor * time / (1.0 + (factor - 1.0) * time)


def shift_for_tokens(num_tokens: int, base_tokens: int, max_tokens: int, base_shift: float, max_shift: float) -> float:
    """a = e^μ with μ linear in the image tokens, as FLUX and diffusers' `calculate_shift`."""
    slope = (max_shift - base_shift) / (max_tokens - base_tokens)
    return math.exp(base_shift + slope * (num_tokens - base_tokens))


# Loss weights per noise level. Most weightings are published for one prediction type. All of them are functions of the
# noise level that multiply the squared error of x_0; here they are written as w·σ², which is finite everywhere, and
# turned into a weight of the error of the denoiser's output. With a = α² and s = σ²: SNR = a / s.


def _per_target(prediction_type: PredictionType, a: Tensor, s: Tensor, sigma_data: float) -> Tensor:
    """(squared error of x_0) / (squared error of the output) / σ²."""
    match prediction_type:
        case "epsilon":  # x_0 = (x_t - σε) / α
            return 1.0 / a
        case "v_prediction" | "flow_prediction":  # x_0 = αx_t - σv with α² + σ² = 1; x_0 = x_t - σv with α + σ = 1
            return torch.ones_like(s)
        case "sample":
            return 1.0 / s
        case "edm":  # c_out²
            return sigma_data**2 / (s + sigma_data**2)


def min_snr(a: Tensor, s: Tensor, gamma: float) -> Tensor:
    """min(SNR, γ)·σ² (Hang et al. 2023, arXiv:2303.09556, eq. 8)."""
    return torch.minimum(a, gamma * s)


def soft_min_snr(a: Tensor, s: Tensor, gamma: float) -> Tensor:
    """SNR γ / (SNR + γ)·σ² (Crowson et al. 2024, arXiv:2401.11605)."""
    return a * gamma * s / (a + gamma * s)


def p2(a: Tensor, s: Tensor, gamma: float, k: float) -> Tensor:
    """SNR / (k + SNR)^γ·σ² (Choi et al. 2022, arXiv:2204.00227, section 4)."""
    return a * (s / (k * s + a)) ** gamma


def debiased(a: Tensor, s: Tensor) -> Tensor:
    """√SNR·σ², which is 1 / √SNR for ε (Yu et al. 2023, arXiv:2310.08442)."""
    return (a * s).sqrt()


def edm(s: Tensor, sigma_data: float) -> Tensor:
    """(σ² + σ_data²) / (σ σ_data)²·σ² (Karras et al. 2022, arXiv:2206.00364, table 1)."""
    return (s + sigma_data**2) / sigma_data**2


def loss_weights(
    config: LossWeightingConfig, prediction_type: PredictionType, signal: Tensor, sigma: Tensor, sigma_data: float
) -> Tensor:
    """[B] float32 weights of the squared error of the denoiser's output.

    Args:
        signal: [B] α.
        sigma: [B] σ.
    """
    a, s = signal.double().square(), sigma.double().square()
    if prediction_type == "epsilon":
        a = a.clamp(min=_TINY)  # the limit at SNR 0, instead of 0 / 0
    elif prediction_type == "sample":
        s = s.clamp(min=_TINY)
    match config.name:
        case None | "constant":
            return torch.ones_like(sigma, dtype=torch.float32)
        case "sigma_sqrt":  # Esser et al. 2024 (arXiv:2403.03206, section 3.1), as a weight of the flow velocity
            return s.clamp(min=_SMALLEST_SIGMA**2).reciprocal().float()
        case "cosmap":  # the same, as a weight instead of a density
            return (2.0 / (math.pi * (1.0 - 2.0 * sigma.double() + 2.0 * s))).float()
        case "min_snr":
            weight = min_snr(a, s, config.gamma)
        case "soft_min_snr":
            weight = soft_min_snr(a, s, config.gamma)
        case "p2":
            weight = p2(a, s, config.p2_gamma, config.p2_k)
        case "debiased":
            weight = debiased(a, s)
        case "edm":
            weight = edm(s, sigma_data)
    return (weight * _per_target(prediction_type, a, s, sigma_data)).float()


# Losses.


def pseudo_huber(error: Tensor, delta: Tensor | float) -> Tensor:
    """2δ (√(e² + δ²) - δ): e² for small errors, 2δ|e| for large ones (Khrapov et al. 2024, arXiv:2403.16728)."""
    square = error.square()
    return 2.0 * delta * square / ((square + delta**2).sqrt() + delta)


def huber_delta(config: LossConfig, signal: Tensor, sigma: Tensor, time: Tensor) -> Tensor | float:
    """δ of each sample (arXiv:2403.16728, section 4).

    Args:
        signal, sigma: [B] α and σ.
        time: [B] noise level in [0, 1].
    """
    match config.huber_schedule:
        case "constant":
            return config.huber_delta
        case "snr":
            return (1.0 - config.huber_delta) / (1.0 + sigma / signal.clamp(min=1e-6)).square() + config.huber_delta
        case "exponential":
            return config.huber_delta**time


def latent_mask(mask: Tensor, latents: Tensor) -> Tensor:
    """[B, 1, h, w] in [0, 1]: the mean over the pixels of each latent cell, from [B, 1, H, W] uint8."""
    height, width = latents.shape[-2:]
    return adaptive_avg_pool2d(mask.float() / 255.0, (height, width))


def _like(value: Tensor, samples: Tensor) -> Tensor:
    """[B] → [B, 1, 1, 1]."""
    return value.view(-1, *[1] * (samples.dim() - 1))


@dataclass(frozen=True)
class Objective:
    """What a denoiser is trained on."""

    config: ObjectiveConfig
    """Prediction type, density, weighting, loss and noise, with nothing left to a preset."""
    schedule: NoiseSchedule
    static_shift: float = 1.0
    """a of the timestep shift of the training noise scheduler; flow models may use it."""
    latents_per_token: int = 1
    """Latent cells in one image token of the denoiser, for a shift by tokens."""

    @property
    def prediction_type(self) -> PredictionType:
        """What the denoiser predicts."""
        return self.config.prediction_type or "epsilon"

    @property
    def sigma_data(self) -> float:
        """Standard deviation of the latents; EDM reads it."""
        return self.config.sigma_data or 1.0

    def to(self, device: torch.device) -> "Objective":
        """The same objective with its tables on `device`."""
        schedule = self.schedule
        if isinstance(schedule, DiscreteSchedule):
            schedule = DiscreteSchedule(schedule.alphas_cumprod.to(device))
        return replace(self, schedule=schedule)

    def draw(self, latents: Tensor, draws: Draws) -> NoisedBatch:
        """One training example per sample.

        Args:
            latents: [B, C, h, w] scaled latents x_0.
            draws: the batch's random numbers.
        """
        levels = self.schedule.levels(self.times(draws.timestep_draw, latents[0, 0].numel()))
        signal, sigma = (_like(level, latents) for level in (levels.signal, levels.noise))
        noise, gamma = self._offset(draws), self.config.input_perturbation
        seen = noise + gamma * draws.input_noise if gamma else noise  # ε + γξ (Ning et al. 2023, arXiv:2301.11706)
        noisy = noised(latents, seen, signal, sigma)
        return NoisedBatch(
            noised_latents=noisy * input_scale(self.prediction_type, sigma, self.sigma_data),
            timesteps=levels.model_time,
            target=target_of(self.prediction_type, latents, noise, signal, sigma, self.sigma_data),
            weight=loss_weights(
                self.config.loss_weighting, self.prediction_type, levels.signal, levels.noise, self.sigma_data
            ),
            signal=levels.signal,
            sigma=levels.noise,
            mask=latent_mask(draws.mask, latents) if self.config.masked_loss == "alpha" else None,
        )

    def times(self, draw: Tensor, num_latents: int) -> Tensor:
        """[B] times from uniform draws [B] in [0, 1), for pictures of `num_latents` latent cells."""
        own = self.config.timestep_density
        mean, std = own.mean or 0.0, own.std or 1.0
        match own.name:
            case "log_normal":
                return log_normal(draw, mean, std)
            case "logit_normal":
                time = logit_normal(draw, mean, std)
            case "mode":
                time = mode(draw, own.mode_scale)
            case "cosmap":
                time = cosmap(draw)
            case _:
                time = draw
        time = own.low + (own.high - own.low) * time
        if isinstance(self.schedule, FlowSchedule):
            time = shifted(time, self.shift(num_latents // self.latents_per_token))
        return time

    def shift(self, num_tokens: int) -> float:
        """a of the timestep shift of a flow model, for pictures of so many image tokens; 1 is none."""
        own = self.config.shift
        if own.mode == "tokens":
            return shift_for_tokens(num_tokens, own.base_tokens, own.max_tokens, own.base_shift, own.max_shift)
        return self.static_shift if own.mode == "scheduler" else own.value

    def _offset(self, draws: Draws) -> Tensor:
        """ε + s·η (Guttenberg 2023), η of one number per channel."""
        strength = self.config.offset_noise
        return draws.noise + strength * draws.offset_noise[:, :, None, None] if strength else draws.noise

    def loss(self, prediction: Tensor, batch: NoisedBatch) -> Tensor:
        """[B] weighted mean error of each sample, in float32 (Ho et al. 2020, arXiv:2006.11239, eq. 14).

        Args:
            prediction: [B, C, h, w] the denoiser's output.
            batch: its input and target.
        """
        error = prediction.float() - batch.target.float()
        if self.config.loss.name == "huber":
            time = batch.timesteps / self.schedule.num_timesteps
            if self.prediction_type == "edm":  # which has no end
                time = batch.sigma / (1.0 + batch.sigma)
            delta = huber_delta(self.config.loss, batch.signal, batch.sigma, time)
            error = pseudo_huber(error, _like(delta, error) if isinstance(delta, Tensor) else delta)
        else:
            error = error.square()
        if batch.mask is not None:
            error = batch.mask * error
        return batch.weight * error.flatten(1).mean(dim=1)
