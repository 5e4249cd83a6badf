"""Stable Diffusion XL: two text encoders, a pooled caption, and the numbers of the picture's history (Podell et al.
2023, arXiv:2307.01952, section 2.2).
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from diffusers import StableDiffusionXLPipeline
from torch import Tensor, nn

from sd_training.config.schema import ConditioningConfig, ModelConfig
from sd_training.models.family import SIZE_NUMBERS, Family
from sd_training.models.schedulers import Schedulers
from sd_training.types import Conditioning, NoisedBatch, PixelBatch

_NULL_IS_ZEROS = "force_zeros_for_empty_prompt"


class StableDiffusionXL(Family):
    """Penultimate states of both encoders side by side; pooled text of the second."""

    name = "sdxl"
    pipeline_class = StableDiffusionXLPipeline
    pipeline_options: ClassVar[Mapping[str, Any]] = {"add_watermarker": False}
    denoiser_part = "unet"
    block_classes = ("BasicTransformerBlock", "ResnetBlock2D")
    has_size_numbers = True
    classes: ClassVar[Mapping[str, str]] = {
        "text_encoder": "CLIPTextModel",
        "text_encoder_2": "CLIPTextModelWithProjection",
    }

    def __init__(
        self, parts: Mapping[str, Any], schedulers: Schedulers, settings: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(parts, schedulers, settings)
        if getattr(self.denoiser, "add_time_proj", None) is not None:  # missing in a UNet that does not fit
            self.denoiser.add_time_proj.register_forward_hook(_without_nan)

    @classmethod
    def settings_of(
        cls, model: ModelConfig, conditioning: ConditioningConfig, index: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Whether a dropped caption is zeros instead of the encoded empty caption."""
        given = conditioning.null_text
        return {_NULL_IS_ZEROS: bool(index.get(_NULL_IS_ZEROS, False)) if given is None else given == "zeros"}

    def encode(self, batch: PixelBatch) -> Conditioning:
        """As `StableDiffusionXLPipeline.encode_prompt`."""
        states, pooled = [], torch.empty(0)
        for name, encoder in self.text_encoders().items():
            output, dropped = encoder(batch.tokens[name], output_hidden_states=True), batch.dropped[name]
            state, pooled = output.hidden_states[-2], output[0]  # pooled: the second encoder's, which comes last
            if self.settings.get(_NULL_IS_ZEROS):
                state = state.masked_fill(dropped[:, None, None], 0.0)
                pooled = pooled.masked_fill(dropped.view(-1, *[1] * (pooled.dim() - 1)), 0.0)
            states.append(state)
        return Conditioning([torch.cat(states, dim=-1)], pooled=pooled, size_numbers=size_numbers(batch))

    def freeze_unread_text(self) -> None:
        """Of the first encoder: behind the penultimate states."""
        encoder = self.parts["text_encoder"]
        unread = (f"encoder.layers.{encoder.config.num_hidden_layers - 1}.", "final_layer_norm")
        for name, parameter in encoder.named_parameters():
            if any(part in name for part in unread):
                parameter.requires_grad_(False)

    def scaled(self, latents: Tensor) -> Tensor:
        """Per channel where the autoencoder has such a scale, as Playground v2.5's does."""
        mean, std = self.vae.config.get("latents_mean"), self.vae.config.get("latents_std")
        if mean is None or std is None:
            return super().scaled(latents)
        mean, std = (latents.new_tensor(values).view(1, -1, 1, 1) for values in (mean, std))
        return (latents - mean) * self.vae.config.scaling_factor / std

    def predict(self, denoiser: nn.Module, noised: NoisedBatch, conditioning: Conditioning) -> Tensor:
        """As `Family.predict`."""
        added = {"text_embeds": conditioning.pooled, "time_ids": conditioning.size_numbers}
        answer: Tensor = denoiser(
            noised.noised_latents, noised.timesteps, conditioning.states[0], added_cond_kwargs=added
        ).sample
        return answer

    def text_shapes(self) -> tuple[list[tuple[int, int]], int]:
        """As `Family.text_shapes`."""
        first, second = (encoder.config for encoder in self.text_encoders().values())
        return [(first.max_position_embeddings, first.hidden_size + second.hidden_size)], second.projection_dim

    def needed_settings(self) -> dict[str, Any]:
        """As `Family.needed_settings`."""
        ((_, width),), pooled = self.text_shapes()
        channels, of_number = self.vae.config.latent_channels, self.denoiser.config.addition_time_embed_dim or 0
        return {
            "in_channels": channels,
            "out_channels": channels,
            "cross_attention_dim": width,
            "addition_embed_type": "text_time",
            "projection_class_embeddings_input_dim": SIZE_NUMBERS * of_number + pooled,
        }


def size_numbers(batch: PixelBatch) -> Tensor:
    """[B, 6] float32, NaN where a number is dropped."""
    original = batch.original_size.float().masked_fill(batch.dropped["size"][:, None], torch.nan)
    crop = batch.crop_top_left.float().masked_fill(batch.dropped["crop"][:, None], torch.nan)
    return torch.cat([original, crop, batch.target_size.float()], dim=1)


def _without_nan(_: nn.Module, __: Sequence[Any], embedded: Tensor) -> Tensor:
    """The embedding of a NaN is zero, which is the null of SDXL's own training (sgm's `ucg_rate`): every number, zero
    included, has an embedding that means something."""
    return embedded.nan_to_num(0.0)
