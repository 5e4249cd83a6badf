"""What flows from disk to loss. Shape letters: B samples, C latent channels, H W pixels, h w latent cells,
L text tokens, D text width."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass(frozen=True)
class LatentGrid:
    """How an autoencoder maps pictures to latents."""

    channels: int
    """C."""
    downscale: int
    """Pixels per latent cell along one side."""

    def shape(self, height: int, width: int) -> tuple[int, int, int]:
        """(C, h, w) of the latents of a picture [pixels]."""
        return self.channels, height // self.downscale, width // self.downscale


@dataclass
class PixelBatch:
    """A micro-batch as the loader delivers it.

    Every random number that training needs is drawn by the loader from a generator keyed by the sample's position in
    the global order, so it does not depend on ranks, workers, micro-batch size or device (design contract 3).
    """

    pixels: Tensor
    """[B, 3, H, W] uint8 in 0..255; the module scales it to [-1, 1] on the device."""
    tokens: Tensor
    """[B, L] int64 caption tokens, of the empty caption where conditioning was dropped; L is 0 without tokenizer."""
    posterior_noise: Tensor
    """[B, C, h, w] float32 standard normal: the draw from the autoencoder's posterior."""
    noise: Tensor
    """[B, C, h, w] float32 standard normal: the noise of the forward process. Empty (B, 0) for autoencoder training."""
    timestep_draw: Tensor
    """[B] float32, uniform in [0, 1)."""
    original_size: Tensor
    """[B, 2] int64 height and width of the upright image file [pixels]."""
    crop_top_left: Tensor
    """[B, 2] int64 top and left edge of the cut in the resized image, as the (perhaps mirrored) picture shows it."""
    target_size: Tensor
    """[B, 2] int64 height and width of the picture."""
    positions: Tensor
    """[B] int64 position of each sample in the global order of the run."""
    sample_ids: Tensor
    """[B] int64 index of each sample in the data set's index; further data sets are counted on."""

    def to(self, device: torch.device) -> "PixelBatch":
        """The same batch on `device`; copies from pinned memory do not wait for the host."""
        return PixelBatch(**{f.name: getattr(self, f.name).to(device, non_blocking=True) for f in fields(self)})

    def pin_memory(self) -> "PixelBatch":
        """The same batch in page-locked memory; torch's DataLoader calls this."""
        return PixelBatch(**{f.name: getattr(self, f.name).pin_memory() for f in fields(self)})


@dataclass
class Conditioning:
    """What the denoiser is told about the picture."""

    text_states: Tensor
    """[B, L, D] hidden states of the text encoder."""


@dataclass
class NoisedBatch:
    """One draw of the objective: what the denoiser sees, what it should answer, what the answer weighs."""

    noised_latents: Tensor
    """[B, C, h, w]."""
    timesteps: Tensor
    """[B] int64 in 0..T-1."""
    target: Tensor
    """[B, C, h, w]."""
    weight: Tensor
    """[B] float32."""
