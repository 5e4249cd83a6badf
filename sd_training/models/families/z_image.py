"""Z-Image (Cai et al. 2025, arXiv:2511.22699): one stream of image and caption tokens, as diffusers' `ZImagePipeline`
runs it."""

import inspect
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from diffusers import ZImagePipeline
from torch import Tensor, nn

from sd_training.data.samples.captions import Tokenizer
from sd_training.models.families.dits import PIPELINE_TIMESTEPS
from sd_training.models.family import Family, chat_tokenizer, run_text_encoder
from sd_training.types import Conditioning, NoisedBatch, PixelBatch, TextOutput

LENGTH = int(inspect.signature(ZImagePipeline.__call__).parameters["max_sequence_length"].default)
"""Tokens of a caption with the words of the chat around it."""


class ZImage(Family):
    """Rectified flow, with time that runs from noise to picture; penultimate states of Qwen 3, as many as a caption
    has tokens."""

    name = "z_image"
    pipeline_class = ZImagePipeline
    block_classes = ("ZImageTransformerBlock",)
    text_width = "cap_feat_dim"
    sets_noise_levels = True
    has_fixed_text = False
    classes: ClassVar[Mapping[str, str]] = {
        "text_encoder": "Qwen3Model",
        "tokenizer": "AutoTokenizer",
        "transformer": "ZImageTransformer2DModel",
    }
    free_text = ("text_encoder",)

    def tokenizers(self) -> dict[str, Tokenizer]:
        """As `Family.tokenizers`."""
        return {"text_encoder": chat_tokenizer(self.parts["tokenizer"], LENGTH, enable_thinking=True)}

    @property
    def patch_size(self) -> int:
        """As `Family.patch_size`: what the pipeline leaves to the transformer."""
        return int(self.denoiser.config.all_patch_size[0])

    def encode_text(self, name: str, tokens: Tensor, mask: Tensor) -> TextOutput:
        """As `ZImagePipeline.encode_prompt`."""
        options = {"attention_mask": mask, "output_hidden_states": True}
        return TextOutput(run_text_encoder(self.parts[name], tokens, **options).hidden_states[-2])

    def condition(self, texts: Mapping[str, TextOutput], batch: PixelBatch) -> Conditioning:
        """As `Family.condition`."""
        return Conditioning([texts["text_encoder"].states], [batch.token_masks["text_encoder"]])

    def predict(self, denoiser: nn.Module, noised: NoisedBatch, conditioning: Conditioning) -> Tensor:
        """As `Family.predict`. The transformer takes lists of pictures and captions; their lengths are shapes, for
        which the host waits once per call. Its answer points from noise to picture."""
        states, latents = conditioning.states[0], noised.noised_latents
        answer = denoiser(
            list(latents[:, :, None]),  # pictures are films of one frame
            1 - noised.timesteps / PIPELINE_TIMESTEPS,
            [rows[:count] for rows, count in zip(states, _lengths(states, conditioning.masks[0]), strict=True)],
        ).sample
        if not latents.is_cuda:  # a table of positions without values, made while counting, would stay
            self.denoiser.rope_embedder.freqs_cis = None
        return -torch.stack(answer)[:, :, 0]

    def needed_settings(self) -> dict[str, Any]:
        """As `Family.needed_settings`. Conditioning on images has another pipeline."""
        return {**super().needed_settings(), "siglip_feat_dim": None}


def _lengths(states: Tensor, mask: Tensor | None) -> list[int]:
    """Tokens of each caption; of blank ones the first has all and the others fewer, so that attention has a mask, as it
    has of most batches."""
    if mask is None:
        return [states.shape[1] - (LENGTH // 2 if row else 0) for row in range(len(states))]
    return [int(count) for count in mask.sum(1).tolist()]
