"""PixArt-Σ: a DiT with cross-attention to T5 (Chen et al. 2024, arXiv:2403.04692)."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from diffusers import PixArtSigmaPipeline
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ParallelStyle

from sd_training.models.family import Family, attention_plan, mlp_plan
from sd_training.types import Conditioning, NoisedBatch, PixelBatch

T5_TOKENS = 300
"""What the pipeline gives T5 unless asked for more or fewer."""


class PixArtSigma(Family):
    """T5 states with their mask. Of a transformer with learned variance the mean is trained."""

    name = "pixart"
    denoiser_part = "transformer"
    block_classes = ("BasicTransformerBlock",)
    predictions = ("epsilon", "v_prediction", "sample", "edm")
    text_classes: ClassVar[Mapping[str, str]] = {"text_encoder": "T5EncoderModel"}
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

    def pipeline(self) -> PixArtSigmaPipeline:
        """As `Family.pipeline`."""
        return PixArtSigmaPipeline(**self.parts, scheduler=self.schedulers.sampler)

    def blank_conditioning(self, count: int, device: torch.device) -> Conditioning:
        """As `Family.blank_conditioning`."""
        width = self.parts["text_encoder"].config.d_model
        return Conditioning(
            [torch.zeros(count, T5_TOKENS, width, device=device)],
            masks=[torch.ones(count, T5_TOKENS, dtype=torch.bool, device=device)],
        )

    def fit_problems(self) -> list[str]:
        """As `Family.fit_problems`."""
        config, width = self.denoiser.config, self.parts["text_encoder"].config.d_model
        problems = self._width_problem("caption_channels", config.caption_channels, width, "the text encoder is")
        if self.denoiser.use_additional_conditions:
            problems.append("model.transformer.params.use_additional_conditions: PixArt-Σ has none; set it to false")
        latents = self.vae.config.latent_channels
        if config.out_channels not in (None, latents, 2 * latents):
            problems.append(
                f"model.transformer.params.out_channels: {config.out_channels}, but must be {latents} (the latent "
                f"channels of the autoencoder) or {2 * latents} (with learned variance)"
            )
        return self._channel_problems(out_key=None) + problems + self._vocabulary_problems()
