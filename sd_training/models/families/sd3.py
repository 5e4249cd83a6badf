"""Stable Diffusion 3 and 3.5: an MMDiT on 16-channel latents, CLIP-L, CLIP-G and perhaps T5 (Esser et al. 2024,
arXiv:2403.03206, figure 2).
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from diffusers import StableDiffusion3Pipeline
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn.functional import pad

from sd_training.models.family import FLOW_ONLY, Family, attention_plan, downscale_factor, mlp_plan
from sd_training.types import Conditioning, NoisedBatch, PixelBatch

T5_TOKENS = 256
"""Default of the pipeline."""


class StableDiffusion3(Family):
    """Both CLIPs side by side, then T5 behind them; pooled text of both CLIPs."""

    name = "sd3"
    pipeline_class = StableDiffusion3Pipeline
    denoiser_part = "transformer"
    block_classes = ("JointTransformerBlock",)
    predictions = FLOW_ONLY
    classes: ClassVar[Mapping[str, str]] = {
        "text_encoder": "CLIPTextModelWithProjection",
        "text_encoder_2": "CLIPTextModelWithProjection",
        "text_encoder_3": "T5EncoderModel",
    }
    text_lengths: ClassVar[Mapping[str, int]] = {"text_encoder_3": T5_TOKENS}

    def encode(self, batch: PixelBatch) -> Conditioning:
        """As `StableDiffusion3Pipeline.encode_prompt`."""
        states, pooled = [], []
        for name in ("text_encoder", "text_encoder_2"):
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

    def tensor_plan(self, block: nn.Module, size: int) -> dict[str, ParallelStyle]:
        """As `Family.tensor_plan`."""
        attention = attention_plan(block, ("attn", "attn2"), size, head_axis=1)
        return attention | mlp_plan(block, ("ff.net.0.proj", "ff_context.net.0.proj"), ("ff.net.2", "ff_context.net.2"))

    def pipeline_options(self) -> dict[str, Any]:
        """T5 may be left out."""
        return {"text_encoder_3": None, "tokenizer_3": None}

    def text_shape(self) -> tuple[int, int, int]:
        """As `Family.text_shape`."""
        config = self.denoiser.config
        length = self.parts["text_encoder"].config.max_position_embeddings + T5_TOKENS
        return length, config.joint_attention_dim, config.pooled_projection_dim

    def size_problems(self, sizes: Sequence[tuple[int, int]]) -> list[str]:
        """Also of pictures larger than the table of positions."""
        largest = self.denoiser.config.pos_embed_max_size * self.patch_size * downscale_factor(self.vae)
        side = max(max(size) for size in sizes)
        too_large = (
            f"dataset.params.resolution: {side} pixels, but pos_embed_max_size of the transformer allows {largest}"
        )
        return super().size_problems(sizes) + ([too_large] if side > largest else [])

    def fit_problems(self) -> list[str]:
        """As `Family.fit_problems`."""
        clips = [self.parts[name].config for name in ("text_encoder", "text_encoder_2")]
        wide, pooled = sum(clip.hidden_size for clip in clips), sum(clip.projection_dim for clip in clips)
        problems = self._channel_problems()
        problems += self._width_problem("pooled_projection_dim", pooled, "the pooled text of both CLIPs is")
        if self.denoiser.config.joint_attention_dim < wide:
            problems += self._width_problem("joint_attention_dim", wide, "both CLIPs are")
        if (t5 := self.parts.get("text_encoder_3")) is not None:
            problems += self._width_problem("joint_attention_dim", t5.config.d_model, "text_encoder_3 is")
        return problems + self._vocabulary_problems()
