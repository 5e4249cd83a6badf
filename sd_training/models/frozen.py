"""Frozen encoders, kept outside the trained module: never in its parameters, its wrap, its EMA or its checkpoints."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sd_training.models.family import Family
from sd_training.types import Conditioning, PixelBatch

AUTOCAST_DTYPE = {"fp32": None, "no": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Autocast to `precision` on `device`; fp32 also switches an outer autocast off."""
    dtype = AUTOCAST_DTYPE[precision]
    return torch.autocast(device.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None)


@dataclass
class FrozenEncoders:
    """Image and text encoders of a family. Weights stay fp32 so that exports are exact; precision is autocast's."""

    family: Family
    vae_precision: str = "fp32"
    text_encoder_precision: str = "fp32"

    def __post_init__(self) -> None:
        for network in self.networks():
            network.requires_grad_(False).eval()

    def networks(self) -> list[nn.Module]:
        """All encoders."""
        return [self.family.vae, *self.family.text_encoders().values()]

    def to(self, device: torch.device) -> "FrozenEncoders":
        """Puts the encoders on `device`; they are no children of the trained module, so nothing else does."""
        for network in self.networks():
            network.to(device)
        return self

    @torch.no_grad()
    def encode_pixels(self, pixels: Tensor, posterior_noise: Tensor) -> Tensor:
        """Scaled latents [B, C, h, w] in fp32, one draw from the autoencoder's posterior.

        Args:
            pixels: [B, 3, H, W] in [-1, 1].
            posterior_noise: [B, C, h, w] standard normal.
        """
        vae = self.family.vae
        with autocast(pixels.device, self.vae_precision):
            posterior = vae.encode(pixels).latent_dist
        latents = posterior.mean.float() + posterior.std.float() * posterior_noise
        return (latents - (vae.config.shift_factor or 0.0)) * vae.config.scaling_factor

    @torch.no_grad()
    def encode_text(self, batch: PixelBatch) -> Conditioning:
        """The conditioning of a batch, in the family's own way."""
        with autocast(batch.pixels.device, self.text_encoder_precision):
            return self.family.encode(batch)
