"""Latent diffusion: encode → objective → denoiser → loss, and nothing else."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from sd_training.diffusion.loss_weighting import LevelUncertainty
from sd_training.diffusion.objective import Objective
from sd_training.models.encoders import Encoders
from sd_training.training.base_module import PART, Optimization, TrainedModule
from sd_training.types import Conditioning, PixelBatch


class DiffusionModule(TrainedModule):
    """Trains the denoiser of a family, and its text encoders where asked, on latents of a frozen autoencoder.

    Args:
        encoders: image and text encoders with their family; frozen ones are deliberately no child modules.
        objective: the prediction target, noise schedule, timestep density, weighting and loss.
    """

    def __init__(
        self,
        encoders: Encoders,
        objective: Objective,
        optimization: Optimization,
        *,
        has_gradient_scaler: bool = False,
    ) -> None:
        network: nn.Module = encoders.family.denoiser
        if encoders.is_text_trained:
            network = nn.ModuleDict({PART: network, **encoders.family.text_encoders()})
        super().__init__(network, optimization, has_gradient_scaler=has_gradient_scaler)
        self.encoders = encoders
        self.objective = objective
        has_uncertainty = objective.config.loss_weighting.name == "learned_uncertainty"
        self.uncertainty = LevelUncertainty(optimization.seed) if has_uncertainty else None

    @property
    def denoiser(self) -> nn.Module:
        """The trained denoiser, which is the network or, beside trained text encoders, a part of it."""
        if isinstance(self.network, nn.ModuleDict):
            return self.network[PART]
        return self.network

    def named_trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        """As `TrainedModule.named_trained`; a trained text encoder and the uncertainty are parts of their own."""
        named = self.network.named_parameters() if self.encoders.is_text_trained else super().named_trained()
        yield from named
        if self.uncertainty is not None:
            yield from ((f"uncertainty.{name}", p) for name, p in self.uncertainty.named_parameters())

    def resume_requirements(self) -> dict[str, Any]:
        """As `TrainedModule.resume_requirements`, with the prediction type and what is trained beside the denoiser."""
        return super().resume_requirements() | {
            "objective.prediction_type": self.objective.prediction_type,
            "objective.rescale_betas_zero_snr": bool(self.objective.config.rescale_betas_zero_snr),
            "objective.loss_weighting.name=learned_uncertainty": self.uncertainty is not None,
            "model.train_text_encoder": self.encoders.is_text_trained,
        }

    def on_fit_start(self) -> None:
        """The module's own device is the CPU where FSDP2 offloads weights."""
        self.move_frozen_to(self.trainer.strategy.root_device)

    def move_frozen_to(self, device: torch.device) -> None:
        """Encoders, and the tables of the objective."""
        self.encoders.to(device)
        self.objective = self.objective.to(device)

    def training_step(self, batch: PixelBatch, batch_index: int) -> Tensor:
        """Mean loss of a micro-batch (Rombach et al. 2022, arXiv:2112.10752, eq. 3)."""
        losses, timesteps = self.sample_losses(batch, self.trainer.global_step)
        return self.finish_micro_batch(batch, losses, timesteps)

    def sample_losses(self, batch: PixelBatch, step: int) -> tuple[Tensor, Tensor]:
        """As `TrainedModule.sample_losses`."""
        latents, conditioning = self._encoded(batch)
        noised = self.objective.draw(latents, batch, step=step)
        prediction = self.encoders.family.predict(self.denoiser, noised, conditioning)
        uncertainty = None if self.uncertainty is None else self.uncertainty(noised.signal, noised.sigma)
        return self.objective.loss(prediction, noised, uncertainty), noised.timesteps

    def held_out_losses(self, batch: PixelBatch, quantiles: Sequence[float]) -> tuple[Tensor, Tensor]:
        """As `TrainedModule.held_out_losses`. Images and captions are encoded once, and the noise of a sample is the
        same at all levels. Input perturbation and learned uncertainty belong to training and are disabled."""
        latents, conditioning = self._encoded(batch)
        config, losses, timesteps = replace(self.objective.config, input_perturbation=0.0), [], []
        objective = replace(self.objective, config=config)
        for quantile in quantiles:
            draws = replace(batch, timestep_draw=torch.full_like(batch.timestep_draw, quantile))
            noised = objective.draw(latents, draws)
            prediction = self.encoders.family.predict(self.denoiser, noised, conditioning)
            losses.append(objective.loss(prediction, noised))
            timesteps.append(noised.timesteps.float())
        return torch.stack(losses), torch.stack(timesteps)

    def _encoded(self, batch: PixelBatch) -> tuple[Tensor, Conditioning]:
        latents = self.encoders.encode_pixels(self._pixels(batch), batch.posterior_noise)
        return latents, self.encoders.encode_text(batch)
