"""Stable Diffusion 3 and 3.5: an MMDiT on 16-channel latents, CLIP-L, CLIP-G and perhaps T5 (Esser et al. 2024,
arXiv:2403.03206, figure 2).
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from diffusers import StableDiffusion3Pipeline
from torch import Tensor, nn
from torch.nn.functional import pad

from sd_training.models.family import FLOW_ONLY, Family
from sd_training.types import Conditioning, NoisedBatch, PixelBatch

T5_TOKENS = 256
"""Default of the pipeline."""
_CLIPS = ("text_encoder", "text_encoder_2")


class StableDiffusion3(Family):
    """Both CLIPs side by side, then T5 behind them; pooled text of both CLIPs."""

    name = "sd3"
    pipeline_class = StableDiffusion3Pipeline
    pipeline_options: ClassVar[Mapping[str, Any]] = {"text_encoder_3": None, "tokenizer_3": None}  # may be left out
    denoiser_part = "transformer"
    block_classes = ("JointTransformerBlock",)
    predictions = FLOW_ONLY
    tensor_attention = ("attn", "attn2")
    tensor_mlps = ((("ff.net.0.proj",), "ff.net.2"), (("ff_context.net.0.proj",), "ff_context.net.2"))
    classes: ClassVar[Mapping[str, str]] = {
        "text_encoder": "CLIPTextModelWithProjection",
        "text_encoder_2": "CLIPTextModelWithProjection",
        "text_encoder_3": "T5EncoderModel",
    }
    text_lengths: ClassVar[Mapping[str, int]] = {"text_encoder_3": T5_TOKENS}

    def encode(self, batch: PixelBatch) -> Conditioning:
        """As `StableDiffusion3Pipeline.encode_prompt`."""
        states, pooled = [], []
        for name in _CLIPS:
            output = self.parts[name](batch.tokens[name], output_hidden_states=True)
            states.append(output.hidden_states[-2])
            pooled.append(output[0])
        clip = torch.cat(states, dim=-1)
        clip = pad(clip, (0, self.denoiser.config.joint_attention_dim - clip.shape[-1]))
        if self.parts.get("text_encoder_3") is None:  # the pipeline puts zeros there
            t5 = clip.new_zeros(len(clip), T5_TOKENS, clip.shape[-1])
        else:
            t5 = self.parts["text_encoder_3"](batch.tokens["text_encoder_3"])[0]
        return Conditioning([torch.cat([clip, t5], dim=1)], pooled=torch.cat(pooled, dim=-1))

    def predict(self, denoiser: nn.Module, noised: NoisedBatch, conditioning: Conditioning) -> Tensor:
        """As `Family.predict`."""
        answer: Tensor = denoiser(
            hidden_states=noised.noised_latents,
            timestep=noised.timesteps,
            encoder_hidden_states=conditioning.states[0],
            pooled_projections=conditioning.pooled,
        ).sample
        return answer

    def text_shapes(self) -> tuple[list[tuple[int, int]], int]:
        """As `Family.text_shapes`."""
        config = self.denoiser.config
        length = self.parts["text_encoder"].config.max_position_embeddings + T5_TOKENS
        return [(length, config.joint_attention_dim)], config.pooled_projection_dim

    def needed_settings(self) -> dict[str, Any]:
        """As `Family.needed_settings`. Both CLIPs are padded to the width of T5, or without it to the denoiser's."""
        clips, t5 = [self.parts[name].config for name in _CLIPS], self.parts.get("text_encoder_3")
        channels, config = self.vae.config.latent_channels, self.denoiser.config
        width = config.joint_attention_dim if t5 is None else t5.config.d_model
        return {
            "in_channels": channels,
            "out_channels": channels,
            "pooled_projection_dim": sum(clip.projection_dim for clip in clips),
            "joint_attention_dim": max(width, sum(clip.hidden_size for clip in clips)),
        }
