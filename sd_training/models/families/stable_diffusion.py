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
    denoiser_part = "unet"
    block_classes = ("BasicTransformerBlock", "ResnetBlock2D")
    may_train_text = True
    classes: ClassVar[Mapping[str, str]] = {"text_encoder": "CLIPTextModel"}

    def encode(self, batch: PixelBatch) -> Conditioning:
        """Last hidden states, as `StableDiffusionPipeline` uses them."""
        return Conditioning([self.parts["text_encoder"](batch.tokens["text_encoder"]).last_hidden_state])

    def predict(self, denoiser: nn.Module, noised: NoisedBatch, conditioning: Conditioning) -> Tensor:
        """As `Family.predict`."""
        answer: Tensor = denoiser(noised.noised_latents, noised.timesteps, conditioning.states[0]).sample
        return answer

    def pipeline_options(self) -> dict[str, Any]:
        """No safety checker."""
        return {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}

    def text_shape(self) -> tuple[int, int, int]:
        """As `Family.text_shape`."""
        config = self.parts["text_encoder"].config
        return config.max_position_embeddings, config.hidden_size, 0

    def fit_problems(self) -> list[str]:
        """As `Family.fit_problems`."""
        width = self.parts["text_encoder"].config.hidden_size
        problems = self._channel_problems() + self._width_problem("cross_attention_dim", width, "the text encoder is")
        for key in ("addition_embed_type", "class_embed_type", "num_class_embeds"):
            if (given := self.denoiser.config.get(key)) is not None:
                problems.append(f"model.unet.params.{key}: {given!r}, but stable_diffusion has none")
        return problems + self._vocabulary_problems()
