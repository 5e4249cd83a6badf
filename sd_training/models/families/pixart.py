"""PixArt-Σ: a DiT with cross-attention to T5 (Chen et al. 2024, arXiv:2403.04692)."""

from collections.abc import Mapping
from typing import Any, ClassVar

from diffusers import PixArtSigmaPipeline
from torch import Tensor, nn

from sd_training.models.family import Family
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
    tensor_attention = ("attn1", "attn2")
    tensor_mlps = ((("ff.net.0.proj",), "ff.net.2"),)
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

    def text_shapes(self) -> tuple[list[tuple[int, int]], int]:
        """As `Family.text_shapes`."""
        return [(T5_TOKENS, self.parts["text_encoder"].config.d_model)], 0

    def needed_settings(self) -> dict[str, Any]:
        """As `Family.needed_settings`; learned variance doubles the output."""
        channels, config = self.vae.config.latent_channels, self.denoiser.config
        needed = {"in_channels": channels, "caption_channels": self.parts["text_encoder"].config.d_model}
        if config.out_channels not in (None, 2 * channels):
            needed["out_channels"] = channels
        return needed

    def fit_problems(self) -> list[str]:
        """As `Family.fit_problems`."""
        problems = super().fit_problems()
        if self.denoiser.use_additional_conditions:
            problems.append("model.transformer.params.use_additional_conditions: PixArt-Σ has none; set it to false")
        return problems
