"""Autoencoder training in its simple form: L1 reconstruction and a KL term (Rombach et al. 2022, arXiv:2112.10752,
section 3.1, without the adversarial and perceptual terms)."""

from collections.abc import Sequence

import torch
from diffusers import AutoencoderKL
from torch import Tensor

from sd_training.optim.optimizers import Optimization
from sd_training.training.base_module import TrainedModule
from sd_training.types import PixelBatch

_STATISTICS_DECAY = 0.99


class AutoencoderModule(TrainedModule):
    """Trains an AutoencoderKL and measures the spread of its latents.

    Args:
        vae: the autoencoder.
        kl_weight: weight of the KL term; both terms are means per pixel value.
    """

    latent_moments: Tensor
    """[3] running mean, running mean square and weight of the latents."""

    def __init__(self, vae: AutoencoderKL, kl_weight: float, optimization: Optimization) -> None:
        super().__init__(vae, optimization)
        self.network: AutoencoderKL = self.network
        self.kl_weight = kl_weight
        self.register_buffer("latent_moments", torch.zeros(3))

    def _measure(self, latents: Tensor) -> None:
        """Mean and mean square of the latents, as they change with the weights. A batch whose latents are not finite is
        left out: its step is skipped, and the average would never recover."""
        now = torch.stack((latents.mean(), latents.square().mean(), latents.new_ones(())))
        self.latent_moments.lerp_(torch.where(now.isfinite().all(), now, self.latent_moments), 1.0 - _STATISTICS_DECAY)

    def sample_losses(self, batch: PixelBatch, step: int) -> tuple[Tensor, None, dict[str, Tensor]]:
        """As `TrainedModule.sample_losses`; nothing depends on the step."""
        l1, kl, latents = self._errors(batch)
        self._measure(latents.detach().float())
        return l1 + self.kl_weight * kl, None, {"l1": l1.mean(), "kl": kl.mean()}

    def held_out_losses(self, batch: PixelBatch, quantiles: Sequence[float]) -> tuple[Tensor, None]:
        """As `TrainedModule.held_out_losses`; without noise levels, all of them are one."""
        l1, kl, _ = self._errors(batch)
        return (l1 + self.kl_weight * kl).expand(len(quantiles), -1), None

    def _errors(self, batch: PixelBatch) -> tuple[Tensor, Tensor, Tensor]:
        """[B] L1, [B] KL per pixel value, and the latents."""
        pixels = self._pixels(batch)
        posterior = self.network.encode(pixels).latent_dist
        latents = posterior.mean + posterior.std * batch.posterior_noise
        reconstruction = self.network.decode(latents).sample
        l1 = (reconstruction.float() - pixels).abs().mean(dim=(1, 2, 3))
        # kl() sums over a sample's latents; per pixel value it keeps its meaning at any resolution.
        return l1, posterior.kl().float() / pixels[0].numel(), latents

    @torch.no_grad()
    def latent_statistics(self) -> tuple[float, float] | None:
        """Mean and standard deviation of the latents; None before the first batch whose latents are finite.

        Collective: averages the moments of all ranks.
        """
        moments = self.latent_moments.clone()
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(moments)
        total, total_square, weight = moments.tolist()
        if weight == 0:
            return None
        mean = total / weight
        return mean, max(total_square / weight - mean**2, 1e-12) ** 0.5
