"""FLUX.1-class transformers: packed latents, T5 states, pooled CLIP text (Black Forest Labs 2024; as diffusers'
`FluxPipeline` runs them).
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from diffusers import FluxPipeline
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ParallelStyle

from sd_training.models.family import FLOW_ONLY, Family
from sd_training.types import Conditioning, NoisedBatch, PixelBatch

T5_TOKENS = 512
"""Default of the pipeline."""
PATCH = 2
"""Latent cells along one side of a packed token."""
PIPELINE_TIMESTEPS = 1000
"""The pipeline divides timesteps by this, whatever its scheduler."""
DISTILLED_GUIDANCE = 1.0
"""Guidance input of a guidance-distilled transformer in training: none."""


class Flux(Family):
    """Rectified flow on tokens of 2 × 2 latent cells; positions are (0, row, column)."""

    name = "flux"
    pipeline_class = FluxPipeline
    denoiser_part = "transformer"
    block_classes = ("FluxTransformerBlock", "FluxSingleTransformerBlock")
    predictions = FLOW_ONLY
    tensor_attention = ("attn",)
    head_axis = 2
    tensor_mlps = ((("ff.net.0.proj",), "ff.net.2"), (("ff_context.net.0.proj",), "ff_context.net.2"))
    text_lengths: ClassVar[Mapping[str, int]] = {"text_encoder_2": T5_TOKENS}
    classes: ClassVar[Mapping[str, str]] = {
        "text_encoder": "CLIPTextModel",
        "text_encoder_2": "T5EncoderModel",
        "tokenizer_2": "T5TokenizerFast",
        "transformer": "FluxTransformer2DModel",
    }

    @property
    def patch_size(self) -> int:
        """As `Family.patch_size`; the network's own is that of packed latents."""
        return PATCH

    def encode(self, batch: PixelBatch) -> Conditioning:
        """As `FluxPipeline.encode_prompt`: no mask."""
        pooled = self.parts["text_encoder"](batch.tokens["text_encoder"]).pooler_output
        return Conditioning([self.parts["text_encoder_2"](batch.tokens["text_encoder_2"])[0]], pooled=pooled)

    def predict(self, denoiser: nn.Module, noised: NoisedBatch, conditioning: Conditioning) -> Tensor:
        """As `Family.predict`."""
        latents = noised.noised_latents
        guidance = latents.new_full((len(latents),), DISTILLED_GUIDANCE)
        answer: Tensor = denoiser(
            hidden_states=packed(latents),
            timestep=noised.timesteps / PIPELINE_TIMESTEPS,
            guidance=guidance if self.denoiser.config.guidance_embeds else None,
            pooled_projections=conditioning.pooled,
            encoder_hidden_states=conditioning.states[0],
            txt_ids=latents.new_zeros(conditioning.states[0].shape[1], 3),
            img_ids=positions(latents),
        ).sample
        return unpacked(answer, *latents.shape[-2:])

    def tensor_plan(self, block: nn.Module, size: int) -> dict[str, ParallelStyle]:
        """As `Family.tensor_plan`. Blocks of one stream are left whole: one matrix reads attention and MLP together."""
        return super().tensor_plan(block, size) if type(block).__name__ == "FluxTransformerBlock" else {}

    def text_shapes(self) -> tuple[list[tuple[int, int]], int]:
        """As `Family.text_shapes`."""
        return [(T5_TOKENS, self.denoiser.config.joint_attention_dim)], self.denoiser.config.pooled_projection_dim

    def needed_settings(self) -> dict[str, Any]:
        """As `Family.needed_settings`; every axis of the positions has its part of a head."""
        return {
            "in_channels": self.vae.config.latent_channels * PATCH**2,
            "joint_attention_dim": self.parts["text_encoder_2"].config.d_model,
            "pooled_projection_dim": self.parts["text_encoder"].config.hidden_size,
            "attention_head_dim": sum(self.denoiser.config.axes_dims_rope),
        }


def packed(latents: Tensor) -> Tensor:
    """[B, C, h, w] → [B, hw/4, 4C]."""
    return torch.nn.functional.pixel_unshuffle(latents, PATCH).flatten(2).transpose(1, 2)


def unpacked(tokens: Tensor, height: int, width: int) -> Tensor:
    """[B, hw/4, 4C] → [B, C, h, w]; `height` and `width` in latent cells."""
    grid = tokens.transpose(1, 2).unflatten(2, (height // PATCH, width // PATCH))
    return torch.nn.functional.pixel_shuffle(grid, PATCH)


def positions(latents: Tensor) -> Tensor:
    """[hw/4, 3]: 0, row and column of every token."""
    counts = (1, latents.shape[-2] // PATCH, latents.shape[-1] // PATCH)
    axes = [torch.arange(count, device=latents.device, dtype=torch.float32) for count in counts]
    return torch.cartesian_prod(*axes)
