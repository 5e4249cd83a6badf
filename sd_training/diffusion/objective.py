"""The training objective, written once: noise schedule × prediction type × timestep density × loss weighting."""

from dataclasses import dataclass

import torch
from torch import Tensor

from sd_training.diffusion.loss_weighting import min_snr_weights
from sd_training.diffusion.noise_schedule import NoiseSchedule
from sd_training.diffusion.prediction import PredictionType, noised, target_of
from sd_training.diffusion.timestep_density import uniform_timesteps
from sd_training.types import NoisedBatch


@dataclass(frozen=True)
class Objective:
    """What a denoiser is trained on."""

    schedule: NoiseSchedule
    """ᾱ of every timestep."""
    prediction_type: PredictionType
    """What the denoiser answers."""
    weights: Tensor
    """[T] float32 weight of the squared error at each timestep."""

    @staticmethod
    def make(schedule: NoiseSchedule, prediction_type: PredictionType, snr_gamma: float | None) -> "Objective":
        """Compose the pieces; `snr_gamma` null weighs every timestep 1."""
        if snr_gamma is None:
            weights = torch.ones_like(schedule.alphas_cumprod)
        else:
            weights = min_snr_weights(schedule.snr, snr_gamma, prediction_type)
        return Objective(schedule, prediction_type, weights)

    def to(self, device: torch.device) -> "Objective":
        """The same objective with its tables on `device`."""
        return Objective(self.schedule.to(device), self.prediction_type, self.weights.to(device))

    def draw(self, latents: Tensor, noise: Tensor, timestep_draw: Tensor) -> NoisedBatch:
        """One training example per sample.

        Args:
            latents: [B, C, h, w] scaled latents x_0.
            noise: [B, C, h, w] standard normal ε.
            timestep_draw: [B] uniform in [0, 1).
        """
        timesteps = uniform_timesteps(timestep_draw, self.schedule.num_timesteps)
        levels = self.schedule.signal_and_noise_level(timesteps, like=latents)
        return NoisedBatch(
            noised_latents=noised(latents, noise, *levels),
            timesteps=timesteps,
            target=target_of(self.prediction_type, latents, noise, *levels),
            weight=self.weights[timesteps],
        )

    def loss(self, prediction: Tensor, batch: NoisedBatch) -> Tensor:
        """[B] weighted mean squared error of each sample, in float32 (Ho et al. 2020, eq. 14)."""
        error = (prediction.float() - batch.target.float()).square().flatten(1).mean(dim=1)
        return batch.weight * error
