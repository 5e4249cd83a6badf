"""The training objective, written once: noise schedule × prediction type × timestep density × loss weighting × loss.

Every random number comes with the batch, drawn per sample by the loader, so all of this is a pure function.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from sd_training.config.schema import LossConfig, ObjectiveConfig, PredictionType, TimestepDensityConfig
from sd_training.diffusion import timestep_density as density
from sd_training.diffusion.loss_weighting import loss_weights
from sd_training.diffusion.noise_schedule import FlowSchedule, NoiseSchedule
from sd_training.types import Draws, NoisedBatch


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


@dataclass(frozen=True)
class Objective:
    """What a denoiser is trained on, as `make_objective` makes it."""

    schedule: NoiseSchedule
    prediction_type: PredictionType
    config: ObjectiveConfig
    """Density, weighting, loss and noise, with nothing left to a preset."""
    sigma_data: float
    """Standard deviation of the latents; EDM reads it."""
    static_shift: float
    """a of the timestep shift of the training noise scheduler; flow models may use it."""
    latents_per_token: int
    """Latent cells in one image token of the denoiser, for a shift by tokens."""
    beta_quantiles: Tensor | None

    def to(self, device: torch.device) -> "Objective":
        """The same objective with its tables on `device`."""
        quantiles = None if self.beta_quantiles is None else self.beta_quantiles.to(device)
        return replace(self, schedule=self.schedule.to(device), beta_quantiles=quantiles)

    def draw(self, latents: Tensor, draws: Draws, step: int = 0) -> NoisedBatch:
        """One training example per sample.

        Args:
            latents: [B, C, h, w] scaled latents x_0.
            draws: the batch's random numbers.
            step: optimizer steps completed, for what decays.
        """
        levels = self.schedule.levels(self.times(draws.timestep_draw, latents[0, 0].numel()))
        signal, sigma = (_like(level, latents) for level in (levels.signal, levels.noise))
        noise = self._offset(draws, signal, sigma)
        noisy = noised(latents, self._perturbed(noise, draws, step), signal, sigma)
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
        config = self.config.timestep_density
        time = self._density(config, draw)
        if config.name != "log_normal":
            time = config.low + (config.high - config.low) * time
        if isinstance(self.schedule, FlowSchedule):
            time = density.shifted(time, self.shift(num_latents // self.latents_per_token))
        return time

    def shift(self, num_tokens: int) -> float:
        """a of the timestep shift of a flow model, for pictures of so many image tokens; 1 is none."""
        own = self.config.shift
        if own.mode == "tokens":
            return density.shift_for_tokens(num_tokens, own.base_tokens, own.max_tokens, own.base_shift, own.max_shift)
        return self.static_shift if own.mode == "scheduler" else own.value

    def _density(self, config: TimestepDensityConfig, draw: Tensor) -> Tensor:
        mean, std = config.mean or 0.0, config.std or 1.0
        match config.name:
            case "logit_normal":
                return density.logit_normal(draw, mean, std)
            case "log_normal":
                return density.log_normal(draw, mean, std)
            case "mode":
                return density.mode(draw, config.mode_scale)
            case "cosmap":
                return density.cosmap(draw)
            case "beta":
                assert self.beta_quantiles is not None, "make_objective makes them"
                return density.from_quantiles(draw, self.beta_quantiles)
            case _:
                return density.biased(draw, *bias_range(config), config.bias_multiplier)

    def _offset(self, draws: Draws, signal: Tensor, sigma: Tensor) -> Tensor:
        """ε + s·η (Guttenberg 2023), η of one number per channel."""
        strength = self.config.offset_noise or 0.0
        if not strength:
            return draws.noise
        share = sigma / (signal.square() + sigma.square()).sqrt()
        scale = strength * share if self.config.offset_noise_by_level else strength
        return draws.noise + scale * draws.offset_noise[:, :, None, None]

    def _perturbed(self, noise: Tensor, draws: Draws, step: int) -> Tensor:
        """ε + γξ (Ning et al. 2023, arXiv:2301.11706)."""
        gamma, last = self.config.input_perturbation, self.config.input_perturbation_steps
        if last is not None:
            gamma *= max(0.0, 1.0 - step / last)
        return noise + gamma * draws.input_noise if gamma else noise

    def loss(self, prediction: Tensor, batch: NoisedBatch, uncertainty: Tensor | None = None) -> Tensor:
        """[B] weighted mean error of each sample, in float32 (Ho et al. 2020, arXiv:2006.11239, eq. 14).

        Args:
            prediction: [B, C, h, w] the denoiser's output.
            batch: its input and target.
            uncertainty: [B] u(σ) of `learned_uncertainty`: e / exp(u) + u (Karras et al. 2024, arXiv:2312.02696,
                eq. 21).
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
        loss = batch.weight * error.flatten(1).mean(dim=1)
        return loss if uncertainty is None else loss / uncertainty.exp() + uncertainty


def make_objective(
    config: ObjectiveConfig, schedule: NoiseSchedule, *, static_shift: float = 1.0, latents_per_token: int = 1
) -> Objective:
    """The objective of a config with nothing left to a preset; arguments as the fields of `Objective`."""
    own, sigma_data, prediction = config.timestep_density, config.sigma_data or 1.0, config.prediction_type or "epsilon"
    quantiles = density.beta_quantiles(own.alpha, own.beta) if own.name == "beta" else None
    return Objective(schedule, prediction, config, sigma_data, static_shift, latents_per_token, quantiles)


def bias_range(config: TimestepDensityConfig) -> tuple[float, float]:
    """The part of the noise levels that `bias` means."""
    portion, (low, high) = config.bias_portion, config.bias_range
    ranges = {"later": (1.0 - portion, 1.0), "earlier": (0.0, portion), "range": (low, high)}
    return ranges.get(config.bias, (0.0, 1.0))


def latent_mask(mask: Tensor, latents: Tensor) -> Tensor:
    """[B, 1, h, w] in [0, 1]: the mean over the pixels of each latent cell, from [B, 1, H, W] uint8."""
    height, width = latents.shape[-2:]
    return adaptive_avg_pool2d(mask.float() / 255.0, (height, width))


def _like(value: Tensor, samples: Tensor) -> Tensor:
    """[B] → [B, 1, 1, 1]."""
    return value.view(-1, *[1] * (samples.dim() - 1))
