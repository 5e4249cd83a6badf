"""Frozen encoders, kept outside the trained module: never in its parameters, its wrap, its EMA or its checkpoints."""

from dataclasses import dataclass

import torch
from diffusers import AutoencoderKL
from torch import Tensor
from transformers import CLIPTextModel

from sd_training.types import Conditioning

AUTOCAST_DTYPE = {"fp32": None, "no": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Autocast to `precision` on `device`; fp32 also switches an outer autocast off."""
    dtype = AUTOCAST_DTYPE[precision]
    return torch.autocast(device.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None)


@dataclass
class FrozenEncoders:
    """Image and text encoder. Weights stay fp32 so that exports are exact; precision is autocast's."""

    vae: AutoencoderKL
    text_encoder: CLIPTextModel
    vae_precision: str = "fp32"
    text_encoder_precision: str = "fp32"

    def __post_init__(self) -> None:
        for network in (self.vae, self.text_encoder):
            network.requires_grad_(False).eval()

    def to(self, device: torch.device) -> "FrozenEncoders":
        """Puts both encoders on `device`; they are no children of the trained module, so nothing else does."""
        self.vae.to(device)
        self.text_encoder.to(device)
        return self

    @torch.no_grad()
    def encode_pixels(self, pixels: Tensor, posterior_noise: Tensor) -> Tensor:
        """Scaled latents [B, C, h, w] in fp32, one draw from the autoencoder's posterior.

        Args:
            pixels: [B, 3, H, W] in [-1, 1].
            posterior_noise: [B, C, h, w] standard normal.
        """
        with autocast(pixels.device, self.vae_precision):
            posterior = self.vae.encode(pixels).latent_dist
        latents = posterior.mean.float() + posterior.std.float() * posterior_noise
        return (latents - (self.vae.config.shift_factor or 0.0)) * self.vae.config.scaling_factor

    @torch.no_grad()
    def encode_text(self, tokens: Tensor) -> Conditioning:
        """Last hidden states [B, L, D] of the text encoder, as StableDiffusionPipeline uses them.

        Args:
            tokens: [B, L] int64.
        """
        with autocast(tokens.device, self.text_encoder_precision):
            return Conditioning(text_states=self.text_encoder(tokens).last_hidden_state)
