"""Families with a UNet: Stable Diffusion 1.x and 2.x (Rombach et al. 2022, arXiv:2112.10752), and Stable Diffusion XL:
two text encoders, a pooled caption, and the numbers of the picture's history (Podell et al. 2023, arXiv:2307.01952,
section 2.2)."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from diffusers import StableDiffusionPipeline, StableDiffusionXLPipeline
from torch import Tensor

from sd_training.config.schema import FamilyName
from sd_training.models.family import NULL_IS_ZEROS, SIZE_NUMBERS, Family, run_text_encoder
from sd_training.types import Conditioning, PixelBatch, TextOutput

_NO_CHECKER = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}


class StableDiffusion(Family):
    """Cross-attention to the last hidden states of CLIP, or of another text encoder."""

    name: ClassVar[FamilyName] = "stable_diffusion"
    pipeline_class = StableDiffusionPipeline
    pipeline_options: ClassVar[Mapping[str, Any]] = _NO_CHECKER
    denoiser_part = "unet"
    predictions = ("epsilon", "v_prediction", "sample", "flow_prediction", "edm")
    block_classes = ("BasicTransformerBlock", "ResnetBlock2D")
    text_width = "cross_attention_dim"
    tensor_attention = ("attn1", "attn2")
    tensor_mlps = ((("ff.net.0.proj",), "ff.net.2"),)
    levels_differ = True
    absent_settings: ClassVar[tuple[str, ...]] = ("addition_embed_type", "class_embed_type", "num_class_embeds")
    """Settings for conditioning that the family has not."""
    classes: ClassVar[Mapping[str, str]] = {"text_encoder": "CLIPTextModel"}
    free_text: ClassVar[tuple[str, ...]] = ("text_encoder",)

    def encode_text(self, name: str, tokens: Tensor, mask: Tensor) -> TextOutput:
        """Last hidden states, as `StableDiffusionPipeline` uses them."""
        encoder = self.parts[name]
        is_masked = encoder.config.to_dict().get("use_attention_mask")  # a setting that only this pipeline reads
        output = run_text_encoder(encoder, tokens, attention_mask=mask.long() if is_masked else None)
        return TextOutput(output.last_hidden_state)

    def fit_problems(self) -> list[str]:
        """As `Family.fit_problems`."""
        problems = super().fit_problems()
        for key in self.absent_settings:
            if (given := self.denoiser.config.get(key)) is not None:
                problems.append(f"model.unet.params.{key}: {given!r}, but {self.name} has none")
        return problems


class StableDiffusionXL(StableDiffusion):
    """Penultimate states of both encoders side by side; pooled text of the second."""

    name = "sdxl"
    pipeline_class = StableDiffusionXLPipeline
    pipeline_options: ClassVar[Mapping[str, Any]] = {"add_watermarker": False}
    has_size_numbers = has_zero_text = True
    absent_settings = StableDiffusion.absent_settings[1:]
    classes: ClassVar[Mapping[str, str]] = {**StableDiffusion.classes, "text_encoder_2": "CLIPTextModelWithProjection"}

    def __init__(self, *args: Any) -> None:
        """The embedding of a NaN is zero, which is the null of SDXL's own training (sgm's `ucg_rate`): every number,
        zero included, has an embedding that means something."""
        super().__init__(*args)
        if getattr(self.denoiser, "add_time_proj", None) is not None:  # missing in a UNet that does not fit
            self.denoiser.add_time_proj.register_forward_hook(lambda _, __, embedded: embedded.nan_to_num(0.0))

    def encode_text(self, name: str, tokens: Tensor, mask: Tensor) -> TextOutput:
        """As `StableDiffusionXLPipeline.encode_prompt`."""
        output = run_text_encoder(self.parts[name], tokens, output_hidden_states=True)
        states = output.hidden_states[-2]
        return TextOutput(states, output[0]) if name == "text_encoder_2" else TextOutput(states)

    def condition(self, texts: Mapping[str, TextOutput], batch: PixelBatch) -> Conditioning:
        """As `Family.condition`."""
        states, is_zero = [], bool(self.settings.get(NULL_IS_ZEROS))
        for name, text in texts.items():
            zeroed = batch.dropped[name] & is_zero
            states.append(text.states.masked_fill(zeroed[:, None, None], 0.0))
        pooled = text.pooled.masked_fill(zeroed[:, None], 0.0)  # of the second encoder
        return Conditioning([torch.cat(states, dim=-1)], pooled=pooled, size_numbers=size_numbers(batch))

    def freeze_unread(self) -> None:
        """Of the first encoder: behind the penultimate states."""
        encoder = self.parts["text_encoder"]
        unread = (f"encoder.layers.{encoder.config.num_hidden_layers - 1}.", "final_layer_norm")
        for name, parameter in encoder.named_parameters():
            if any(part in name for part in unread):
                parameter.requires_grad_(False)

    def inputs(self, conditioning: Conditioning) -> dict[str, Any]:
        """As `Family.inputs`."""
        return {"added_cond_kwargs": {"text_embeds": conditioning.pooled, "time_ids": conditioning.size_numbers}}

    def text_shapes(self) -> tuple[list[tuple[int, int]], int]:
        """As `Family.text_shapes`."""
        first, second = (encoder.config for encoder in self.text_encoders().values())
        length = self.tokenizers()["text_encoder_2"].length
        return [(length, first.hidden_size + second.hidden_size)], second.projection_dim

    def fit_problems(self) -> list[str]:
        """As `Family.fit_problems`; the states of both text encoders are side by side."""
        if problems := super().fit_problems():
            return problems
        first, second = (own.length for own in self.tokenizers().values())
        other = f"model.tokenizer: {first} tokens per caption (model_max_length), but text_encoder_2 has {second}"
        return [] if first == second else [other]

    def needed_settings(self) -> dict[str, Any]:
        """As `Family.needed_settings`."""
        embedded = SIZE_NUMBERS * (self.denoiser.config.addition_time_embed_dim or 0) + self.text_shapes()[1]
        own = {"addition_embed_type": "text_time", "projection_class_embeddings_input_dim": embedded}
        return {**super().needed_settings(), **own}


def size_numbers(batch: PixelBatch) -> Tensor:
    """[B, 6] float32, NaN where a number is dropped."""
    original = batch.original_size.float().masked_fill(batch.dropped["size"][:, None], torch.nan)
    crop = batch.crop_top_left.float().masked_fill(batch.dropped["crop"][:, None], torch.nan)
    return torch.cat([original, crop, batch.target_size.float()], dim=1)
