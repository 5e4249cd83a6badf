"""Image and text encoders. Frozen ones stay outside the trained module: never in its parameters, its wrap, its EMA or
its checkpoints."""

from contextlib import AbstractContextManager, nullcontext
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
class Encoders:
    """Image and text encoders of a family. Weights stay fp32 so that exports are exact; precision is autocast's. Some
    autoencoders (SDXL's) overflow in fp16."""

    family: Family
    vae_precision: str = "fp32"
    text_encoder_precision: str = "fp32"
    is_text_trained: bool = False
    """Whether the text encoders are trained; the autoencoder is always frozen here."""

    def __post_init__(self) -> None:
        frozen = [self.family.vae] if self.is_text_trained else self.networks()
        for network in frozen:
            network.requires_grad_(False).eval()
        if self.is_text_trained:
            self.family.freeze_unread_text()

    def networks(self) -> list[nn.Module]:
        """All encoders."""
        return [self.family.vae, *self.family.text_encoders().values()]

    def to(self, device: torch.device) -> "Encoders":
        """Moves the encoders; the frozen ones are no children of the trained module, so nothing else moves them."""
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
        with autocast(pixels.device, self.vae_precision):
            posterior = self.family.vae.encode(pixels).latent_dist
        return self.family.scaled(posterior.mean.float() + posterior.std.float() * posterior_noise)

    def encode_text(self, batch: PixelBatch) -> Conditioning:
        """The conditioning of a batch, in the family's own way."""
        gradients: AbstractContextManager[object] = nullcontext() if self.is_text_trained else torch.no_grad()
        with gradients, autocast(batch.pixels.device, self.text_encoder_precision):
            return self.family.encode(batch)
