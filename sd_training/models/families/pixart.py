"""PixArt-Σ: a DiT with cross-attention to T5 (Chen et al. 2024, arXiv:2403.04692)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import torch
from diffusers import PixArtSigmaPipeline
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ParallelStyle

from sd_training.models.family import Family, attention_plan, mlp_plan
from sd_training.types import Conditioning, NoisedBatch, PixelBatch

T5_TOKENS = 300
"""Default of the pipeline."""


class PixArtSigma(Family):
    """T5 states with their mask. Of a transformer with learned variance the mean is trained."""

    name = "pixart"
    pipeline_class = PixArtSigmaPipeline
    denoiser_part = "transformer"
    block_classes = ("BasicTransformerBlock",)
    predictions = ("epsilon", "v_prediction", "sample", "edm")
    text_lengths: ClassVar[Mapping[str, int]] = {"text_encoder": T5_TOKENS}
    has_lowercase_text = True
    classes: ClassVar[Mapping[str, str]] = {
        "text_encoder": "T5EncoderModel",
        "tokenizer": "T5TokenizerFast",
        "transformer": "PixArtTransformer2DModel",
    }

    def encode(self, batch: PixelBatch) -> Conditioning:
        """As `PixArtSigmaPipeline.encode_prompt`."""
        mask = batch.token_masks["text_encoder"]
        states: Tensor = self.parts["text_encoder"](batch.tokens["text_encoder"], attention_mask=mask)[0]
        return Conditioning([states], masks=[mask])

    def predict(self, denoiser: nn.Module, noised: NoisedBatch, conditioning: Conditioning) -> Tensor:
        """As `Family.predict`."""
        answer: Tensor = denoiser(
            noised.noised_latents,
            timestep=noised.timesteps,
            encoder_hidden_states=conditioning.states[0],
            encoder_attention_mask=conditioning.masks[0],
            added_cond_kwargs={"resolution": None, "aspect_ratio": None},
        ).sample
        return answer[:, : noised.noised_latents.shape[1]]

    def tensor_plan(self, block: nn.Module, size: int) -> dict[str, ParallelStyle]:
        """As `Family.tensor_plan`."""
        attention = attention_plan(block, ("attn1", "attn2"), size, head_axis=1)
        return attention | mlp_plan(block, ("ff.net.0.proj",), ("ff.net.2",))

    def text_shape(self) -> tuple[int, int, int]:
        """As `Family.text_shape`."""
        return T5_TOKENS, self.parts["text_encoder"].config.d_model, 0

    def blank_conditioning(self, count: int, device: torch.device) -> Conditioning:
        """With masks."""
        masks: list[Tensor | None] = [torch.ones(count, T5_TOKENS, dtype=torch.bool, device=device)]
        return replace(super().blank_conditioning(count, device), masks=masks)

    def fit_problems(self) -> list[str]:
        """As `Family.fit_problems`."""
        width, latents, out = self.text_shape()[1], self.vae.config.latent_channels, self.denoiser.config.out_channels
        problems = self._channel_problems(out_key=None)
        problems += self._width_problem("caption_channels", width, "the text encoder is")
        if self.denoiser.use_additional_conditions:
            problems.append("model.transformer.params.use_additional_conditions: PixArt-Σ has none; set it to false")
        if out not in (None, latents, 2 * latents):
            problems.append(
                f"model.transformer.params.out_channels: {out}, but must be {latents} (the latent channels of the "
                f"autoencoder) or {2 * latents} (with learned variance)"
            )
        return problems + self._vocabulary_problems()
