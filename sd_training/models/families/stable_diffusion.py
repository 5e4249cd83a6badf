"""The Stable Diffusion 1.x / 2.x family: AutoencoderKL, one CLIP text encoder, a UNet2DConditionModel."""

from collections.abc import Mapping
from typing import Any, ClassVar

from diffusers import StableDiffusionPipeline
from torch import Tensor, nn

from sd_training.models.family import Family
from sd_training.types import Conditioning, NoisedBatch, PixelBatch


class StableDiffusion(Family):
    """Cross-attention to the last hidden states of CLIP (Rombach et al. 2022, arXiv:2112.10752)."""

    name = "stable_diffusion"
    pipeline_class = StableDiffusionPipeline
    pipeline_options: ClassVar[Mapping[str, Any]] = {
        "safety_checker": None,
        "feature_extractor": None,
        "requires_safety_checker": False,
    }
    denoiser_part = "unet"
    block_classes = ("BasicTransformerBlock", "ResnetBlock2D")
    classes: ClassVar[Mapping[str, str]] = {"text_encoder": "CLIPTextModel"}

    def encode(self, batch: PixelBatch) -> Conditioning:
        """Last hidden states, as `StableDiffusionPipeline` uses them."""
        return Conditioning([self.parts["text_encoder"](batch.tokens["text_encoder"]).last_hidden_state])

    def predict(self, denoiser: nn.Module, noised: NoisedBatch, conditioning: Conditioning) -> Tensor:
        """As `Family.predict`."""
        answer: Tensor = denoiser(noised.noised_latents, noised.timesteps, conditioning.states[0]).sample
        return answer

    def text_shapes(self) -> tuple[list[tuple[int, int]], int]:
        """As `Family.text_shapes`."""
        config = self.parts["text_encoder"].config
        return [(config.max_position_embeddings, config.hidden_size)], 0

    def needed_settings(self) -> dict[str, Any]:
        """As `Family.needed_settings`; nothing but text and time is embedded."""
        channels, width = self.vae.config.latent_channels, self.parts["text_encoder"].config.hidden_size
        needed = {"in_channels": channels, "out_channels": channels, "cross_attention_dim": width}
        return {**needed, "addition_embed_type": None, "class_embed_type": None, "num_class_embeds": None}
