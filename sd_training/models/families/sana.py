"""Sana (Xie et al. 2024, arXiv:2410.10629): linear attention over the latents of an autoencoder that downscales by 32
and has no posterior, and captions behind an instruction to a decoder (section 2.3), as diffusers' `SanaPipeline` does.
"""

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from diffusers import SanaPipeline
from torch import Tensor, nn

from sd_training.data.samples.captions import Tokenizer
from sd_training.models.family import Family, run_text_encoder
from sd_training.types import Conditioning, NoisedBatch, PixelBatch, TextOutput

_DEFAULTS = inspect.signature(SanaPipeline.__call__).parameters
INSTRUCTION = "\n".join(_DEFAULTS["complex_human_instruction"].default)
LENGTH = int(_DEFAULTS["max_sequence_length"].default)
"""Tokens of a caption that the denoiser gets."""


class Sana(Family):
    """Rectified flow; states of Gemma 2 with their mask. The null text is the empty caption without the instruction."""

    name = "sana"
    pipeline_class = SanaPipeline
    block_classes = ("SanaTransformerBlock",)
    text_width = "caption_channels"
    tile_setting = "tile_sample_min_height"
    has_text_mask = True
    num_text_tokens = LENGTH
    classes: ClassVar[Mapping[str, str]] = {
        "vae": "AutoencoderDC",
        "text_encoder": "Gemma2Model",
        "tokenizer": "AutoTokenizer",
        "transformer": "SanaTransformer2DModel",
    }
    free_text = ("text_encoder",)

    def tokenizers(self) -> dict[str, Tokenizer]:
        """As `Family.tokenizers`, behind the instruction: its last token and its first one count among `LENGTH`."""
        own = self.parts["tokenizer"]
        length = len(own.encode(INSTRUCTION)) + LENGTH - 2
        return {"text_encoder": Tokenizer(own, length, is_lowercase=True, prefix=INSTRUCTION, is_empty_bare=True)}

    def posterior(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """As `Family.posterior`; a picture has one code."""
        latents = self.vae.encode(pixels).latent
        return latents, torch.zeros_like(latents)

    def encode_text(self, name: str, tokens: Tensor, mask: Tensor) -> TextOutput:
        """As `SanaPipeline.encode_prompt`."""
        return TextOutput(behind_instruction(run_text_encoder(self.parts[name], tokens, attention_mask=mask)[0]))

    def condition(self, texts: Mapping[str, TextOutput], batch: PixelBatch) -> Conditioning:
        """As `Family.condition`."""
        return Conditioning([texts["text_encoder"].states], [behind_instruction(batch.token_masks["text_encoder"])])

    def predict(self, denoiser: nn.Module, noised: NoisedBatch, conditioning: Conditioning) -> Tensor:
        """As `Family.predict`, with the transformer's scale of time."""
        times = noised.timesteps * self.denoiser.config.timestep_scale
        return super().predict(denoiser, replace(noised, timesteps=times), conditioning)

    def inputs(self, conditioning: Conditioning) -> dict[str, Any]:
        """As `Family.inputs`."""
        return {"encoder_attention_mask": conditioning.masks[0]}

    def needed_settings(self) -> dict[str, Any]:
        """As `Family.needed_settings`. Captions are projected to the width of the image tokens; a distilled model,
        which is told its guidance, has a pipeline of its own."""
        config = self.denoiser.config
        width = config.num_attention_heads * config.attention_head_dim
        return {**super().needed_settings(), "cross_attention_dim": width, "guidance_embeds": False}


def behind_instruction(rows: Tensor) -> Tensor:
    """[B, LENGTH, …] the first of [B, L, …] tokens, which begins every text, and the last ones."""
    return torch.cat((rows[:, :1], rows[:, 1 - LENGTH :]), dim=1)
