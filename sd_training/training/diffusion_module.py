"""Latent diffusion: encode → objective → denoiser → loss, and nothing else."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from sd_training.diffusion.loss_weighting import LevelUncertainty
from sd_training.diffusion.objective import Objective
from sd_training.models.execution import autocast
from sd_training.models.family import Family
from sd_training.optim.optimizers import Optimization
from sd_training.training.base_module import PART, TrainedModule
from sd_training.types import Conditioning, PixelBatch


class DiffusionModule(TrainedModule):
    """Trains the denoiser of a family, and its text encoders where asked, on latents of a frozen autoencoder.

    Weights stay fp32, so that exports are exact; precisions are autocast's.

    Args:
        family: networks and tokenizers; the frozen ones are deliberately no child modules, so they are never wrapped,
            averaged or checkpointed.
        objective: the prediction target, noise schedule, timestep density, weighting and loss.
        vae_precision, text_precision: of autoencoder and text encoders.
        is_text_trained: whether the text encoders are trained; the autoencoder is always frozen here.
    """

    def __init__(
        self,
        family: Family,
        objective: Objective,
        optimization: Optimization,
        *,
        vae_precision: str = "fp32",
        text_precision: str = "fp32",
        is_text_trained: bool = False,
    ) -> None:
        text_encoders = family.text_encoders()
        for network in [family.vae, *([] if is_text_trained else text_encoders.values())]:
            network.requires_grad_(False).eval()
        if is_text_trained:
            family.freeze_unread_text()
        network = family.denoiser
        super().__init__(nn.ModuleDict({PART: network, **text_encoders}) if is_text_trained else network, optimization)
        self.family, self.objective, self.is_text_trained = family, objective, is_text_trained
        self.vae_precision, self.text_precision = vae_precision, text_precision
        has_uncertainty = objective.config.loss_weighting.name == "learned_uncertainty"
        self.uncertainty = LevelUncertainty(optimization.seed) if has_uncertainty else None

    def named_trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        """As `TrainedModule.named_trained`; a trained text encoder and the uncertainty are parts of their own."""
        named = self.network.named_parameters() if self.is_text_trained else super().named_trained()
        yield from named
        if self.uncertainty is not None:
            yield from ((f"uncertainty.{name}", p) for name, p in self.uncertainty.named_parameters())

    def resume_requirements(self) -> dict[str, Any]:
        """As `TrainedModule.resume_requirements`, with the prediction type and what is trained beside the denoiser."""
        return super().resume_requirements() | {
            "objective.prediction_type": self.objective.prediction_type,
            "objective.rescale_betas_zero_snr": bool(self.objective.config.rescale_betas_zero_snr),
            "objective.loss_weighting.name=learned_uncertainty": self.uncertainty is not None,
            "model.train_text_encoder": self.is_text_trained,
        }

    def on_fit_start(self) -> None:
        """The module's own device is the CPU where FSDP2 offloads weights."""
        self.move_frozen_to(self.trainer.strategy.root_device)

    def move_frozen_to(self, device: torch.device) -> None:
        """Encoders, and the tables of the objective."""
        for network in (self.family.vae, *self.family.text_encoders().values()):
            network.to(device)
        self.objective = self.objective.to(device)

    def sample_losses(self, batch: PixelBatch, step: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """As `TrainedModule.sample_losses` (Rombach et al. 2022, arXiv:2112.10752, eq. 3)."""
        latents, conditioning = self._encoded(batch)
        noised = self.objective.draw(latents, batch, step=step)
        prediction = self.family.predict(self.family.denoiser, noised, conditioning)
        uncertainty = None if self.uncertainty is None else self.uncertainty(noised.signal, noised.sigma)
        return self.objective.loss(prediction, noised, uncertainty), noised.timesteps, {}

    def held_out_losses(self, batch: PixelBatch, quantiles: Sequence[float]) -> tuple[Tensor, Tensor]:
        """As `TrainedModule.held_out_losses`. Images and captions are encoded once, and the noise of a sample is the
        same at all levels. Input perturbation and learned uncertainty belong to training and are disabled."""
        latents, conditioning = self._encoded(batch)
        objective = replace(self.objective, config=self.objective.config.replace(input_perturbation=0.0))
        losses, timesteps = [], []
        for quantile in quantiles:
            draws = replace(batch, timestep_draw=torch.full_like(batch.timestep_draw, quantile))
            noised = objective.draw(latents, draws)
            prediction = self.family.predict(self.family.denoiser, noised, conditioning)
            losses.append(objective.loss(prediction, noised))
            timesteps.append(noised.timesteps.float())
        return torch.stack(losses), torch.stack(timesteps)

    def _encoded(self, batch: PixelBatch) -> tuple[Tensor, Conditioning]:
        latents = self.family.encode_pixels(self._pixels(batch), batch.posterior_noise, self.vae_precision)
        gradients = torch.set_grad_enabled(self.is_text_trained and torch.is_grad_enabled())
        with gradients, autocast(batch.pixels.device, self.text_precision):
            return latents, self.family.encode(batch)
