"""Latent diffusion: encode → objective → denoiser → loss, and nothing else."""

from torch import Tensor

from sd_training.diffusion.objective import Objective
from sd_training.models.frozen import FrozenEncoders
from sd_training.training.base_module import Optimization, TrainedModule
from sd_training.types import PixelBatch


class DiffusionModule(TrainedModule):
    """Trains the denoiser of a family on the latents and conditioning of frozen encoders.

    Args:
        encoders: frozen image and text encoders with their family; deliberately not a child module.
        objective: what the denoiser is asked to answer.
    """

    def __init__(
        self,
        encoders: FrozenEncoders,
        objective: Objective,
        optimization: Optimization,
        *,
        has_gradient_scaler: bool = False,
    ) -> None:
        super().__init__(encoders.family.denoiser, optimization, has_gradient_scaler=has_gradient_scaler)
        self.encoders = encoders
        self.objective = objective

    def on_fit_start(self) -> None:
        """Bring what is no child module to the device."""
        self.encoders.to(self.device)
        self.objective = self.objective.to(self.device)

    def training_step(self, batch: PixelBatch, batch_index: int) -> Tensor:
        """Mean loss of a micro-batch (Rombach et al. 2022, arXiv:2112.10752, eq. 3)."""
        latents = self.encoders.encode_pixels(self._pixels(batch), batch.posterior_noise)
        conditioning = self.encoders.encode_text(batch)
        noised = self.objective.draw(latents, batch, step=self.trainer.global_step)
        prediction = self.encoders.family.predict(self.network, noised, conditioning)
        loss = self.objective.loss(prediction, noised).mean()
        self.remember(loss=loss)
        return loss
