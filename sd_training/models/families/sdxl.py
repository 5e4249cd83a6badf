"""Stable Diffusion XL: two text encoders, a pooled caption, and the numbers of the picture's history (Podell et al.
2023, arXiv:2307.01952, section 2.2).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from diffusers import StableDiffusionXLPipeline
from torch import Tensor, nn

from sd_training.models.family import Family
from sd_training.models.schedulers import Schedulers
from sd_training.types import Conditioning, NoisedBatch, PixelBatch

NUMBERS = 6
"""Original height and width, crop top and left, target height and width."""


class StableDiffusionXL(Family):
    """Penultimate states of both encoders side by side; pooled text of the second."""

    name = "sdxl"
    pipeline_class = StableDiffusionXLPipeline
    denoiser_part = "unet"
    block_classes = ("BasicTransformerBlock", "ResnetBlock2D")
    may_null_be_zeros = True
    has_micro_conditioning = True
    may_train_text = True
    classes: ClassVar[Mapping[str, str]] = {
        "text_encoder": "CLIPTextModel",
        "text_encoder_2": "CLIPTextModelWithProjection",
    }

    def __init__(self, parts: dict[str, Any], schedulers: Schedulers, null_is_zeros: bool = False) -> None:
        super().__init__(parts, schedulers, null_is_zeros)
        zero_dropped_numbers(self.denoiser)

    def encode(self, batch: PixelBatch) -> Conditioning:
        """As `StableDiffusionXLPipeline.encode_prompt`."""
        states, pooled = [], None
        for name, encoder in self.text_encoders().items():
            output = encoder(batch.tokens[name], output_hidden_states=True)
            states.append(self._kept(output.hidden_states[-2], batch.dropped[name]))
            pooled = self._kept(output[0], batch.dropped[name])  # the second encoder's, which comes last
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

    def _kept(self, states: Tensor, dropped: Tensor) -> Tensor:
        """Zeros where the null text is zeros, as the pipeline makes them with `force_zeros_for_empty_prompt`."""
        if not self.null_is_zeros:
            return states
        return states.masked_fill(dropped.view(-1, *[1] * (states.dim() - 1)), 0.0)

    def predict(self, denoiser: nn.Module, noised: NoisedBatch, conditioning: Conditioning) -> Tensor:
        """As `Family.predict`."""
        added = {"text_embeds": conditioning.pooled, "time_ids": conditioning.size_numbers}
        answer: Tensor = denoiser(
            noised.noised_latents, noised.timesteps, conditioning.states[0], added_cond_kwargs=added
        ).sample
        return answer

    def pipeline_options(self) -> dict[str, Any]:
        """What a dropped caption is; no watermark."""
        return {"force_zeros_for_empty_prompt": self.null_is_zeros, "add_watermarker": False}

    def text_shape(self) -> tuple[int, int, int]:
        """As `Family.text_shape`."""
        first, second = (encoder.config for encoder in self.text_encoders().values())
        return first.max_position_embeddings, first.hidden_size + second.hidden_size, second.projection_dim

    def blank_conditioning(self, count: int, device: torch.device) -> Conditioning:
        """With the size numbers."""
        return replace(
            super().blank_conditioning(count, device), size_numbers=torch.zeros(count, NUMBERS, device=device)
        )

    def fit_problems(self) -> list[str]:
        """As `Family.fit_problems`."""
        _, width, pooled = self.text_shape()
        config = self.denoiser.config
        problems = self._channel_problems() + self._width_problem("cross_attention_dim", width, "both encoders are")
        if config.addition_embed_type != "text_time":
            problems.append(
                f"model.unet.params.addition_embed_type: {config.addition_embed_type!r}, but sdxl needs 'text_time'"
            )
        else:
            embedded = NUMBERS * config.addition_time_embed_dim + pooled
            key = "projection_class_embeddings_input_dim"
            problems += self._width_problem(key, embedded, "pooled text and six numbers are")
        return problems + self._vocabulary_problems()


def size_numbers(batch: PixelBatch) -> Tensor:
    """[B, 6] float32, NaN where a number is dropped."""
    original = _dropped(batch.original_size, batch.dropped["size"])
    crop = _dropped(batch.crop_top_left, batch.dropped["crop"])
    return torch.cat([original, crop, batch.target_size.float()], dim=1)


def _dropped(numbers: Tensor, dropped: Tensor) -> Tensor:
    return numbers.float().masked_fill(dropped[:, None], torch.nan)


def zero_dropped_numbers(unet: nn.Module) -> None:
    """Makes the embedding of a NaN zero, which is the null of SDXL's own training (sgm's `ucg_rate`): every number,
    zero included, has an embedding that means something."""
    projection = getattr(unet, "add_time_proj", None)
    if projection is not None:
        projection.register_forward_hook(_without_nan)


def _without_nan(_: nn.Module, __: Sequence[Any], embedded: Tensor) -> Tensor:
    return embedded.nan_to_num(0.0)
