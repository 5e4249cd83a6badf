"""Families with a transformer: Stable Diffusion 3 and 3.5 (Esser et al. 2024, arXiv:2403.03206, figure 2), PixArt-Σ
(Chen et al. 2024, arXiv:2403.04692), and FLUX.1 (Black Forest Labs 2024; as diffusers' `FluxPipeline` runs it).

Lengths of T5's captions are the defaults of the pipelines.
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from diffusers import FluxPipeline, PixArtSigmaPipeline, StableDiffusion3Pipeline
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn.functional import pad

from sd_training.models.family import Family, run_text_encoder
from sd_training.models.mmdit_rope import from_patches, to_patches
from sd_training.types import Conditioning, NoisedBatch, PixelBatch, TextOutput

_CLIPS = ("text_encoder", "text_encoder_2")
_MLP = (("ff.net.0.proj",), "ff.net.2")
_TEXT_MLP = (("ff_context.net.0.proj",), "ff_context.net.2")
PIPELINE_TIMESTEPS = 1000
"""The pipelines of FLUX, FLUX.2, Z-Image and Qwen-Image divide timesteps by this with every scheduler."""
DISTILLED_GUIDANCE = 1.0
"""Guidance input of a guidance-distilled transformer in training: none."""


class StableDiffusion3(Family):
    """Both CLIPs side by side, then T5 behind them; pooled text of both CLIPs."""

    name = "sd3"
    pipeline_class = StableDiffusion3Pipeline
    pipeline_options: ClassVar[Mapping[str, Any]] = {"text_encoder_3": None, "tokenizer_3": None}  # may be left out
    block_classes = ("JointTransformerBlock",)
    tensor_attention = ("attn", "attn2")
    tensor_mlps = (_MLP, _TEXT_MLP)
    text_lengths: ClassVar[Mapping[str, int]] = {"text_encoder_3": 256}
    classes: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(_CLIPS, "CLIPTextModelWithProjection"),
        "text_encoder_3": "T5EncoderModel",
        "tokenizer_3": "T5TokenizerFast",
    }
    free_text = ("text_encoder_3",)

    def encode_text(self, name: str, tokens: Tensor, mask: Tensor) -> TextOutput:
        """As `StableDiffusion3Pipeline.encode_prompt`."""
        if name not in _CLIPS:
            return TextOutput(run_text_encoder(self.parts[name], tokens)[0])
        output = self.parts[name](tokens, output_hidden_states=True)
        return TextOutput(output.hidden_states[-2], output[0])

    def condition(self, texts: Mapping[str, TextOutput], batch: PixelBatch) -> Conditioning:
        """As `Family.condition`."""
        clips = [texts[name] for name in _CLIPS]
        clip = torch.cat([text.states for text in clips], dim=-1)
        clip = pad(clip, (0, self.denoiser.config.joint_attention_dim - clip.shape[-1]))
        if "text_encoder_3" in texts:
            t5 = texts["text_encoder_3"].states
        else:  # the pipeline puts zeros there
            t5 = clip.new_zeros(len(clip), self.text_lengths["text_encoder_3"], clip.shape[-1])
        return Conditioning([torch.cat([clip, t5], dim=1)], pooled=torch.cat([text.pooled for text in clips], dim=-1))

    def inputs(self, conditioning: Conditioning) -> dict[str, Any]:
        """As `Family.inputs`."""
        return {"pooled_projections": conditioning.pooled}

    def text_shapes(self) -> tuple[list[tuple[int, int]], int]:
        """As `Family.text_shapes`. Both CLIPs are padded to the width of T5, or without it to the denoiser's."""
        clips, t5 = [self.parts[name].config for name in _CLIPS], self.parts.get("text_encoder_3")
        width = self.denoiser.config.joint_attention_dim if t5 is None else t5.config.hidden_size
        length = clips[0].max_position_embeddings + self.text_lengths["text_encoder_3"]
        return [(length, max(width, sum(c.hidden_size for c in clips)))], sum(c.projection_dim for c in clips)


class PixArtSigma(Family):
    """T5 states with their mask. Of a transformer with learned variance the mean is trained."""

    name = "pixart"
    pipeline_class = PixArtSigmaPipeline
    block_classes = ("BasicTransformerBlock",)
    predictions = ("epsilon", "v_prediction", "sample", "edm")
    text_width = "caption_channels"
    text_lengths: ClassVar[Mapping[str, int]] = {"text_encoder": 300}
    has_lowercase_text = has_text_mask = True
    tensor_attention = ("attn1", "attn2")
    tensor_mlps = (_MLP,)
    classes: ClassVar[Mapping[str, str]] = {
        "text_encoder": "T5EncoderModel",
        "tokenizer": "T5TokenizerFast",
        "transformer": "PixArtTransformer2DModel",
    }
    free_text = ("text_encoder",)

    def encode_text(self, name: str, tokens: Tensor, mask: Tensor) -> TextOutput:
        """As `PixArtSigmaPipeline.encode_prompt`."""
        return TextOutput(run_text_encoder(self.parts[name], tokens, attention_mask=mask)[0])

    def predict(self, denoiser: nn.Module, noised: NoisedBatch, conditioning: Conditioning) -> Tensor:
        """As `Family.predict`."""
        return super().predict(denoiser, noised, conditioning)[:, : noised.noised_latents.shape[1]]

    def inputs(self, conditioning: Conditioning) -> dict[str, Any]:
        """As `Family.inputs`."""
        no_sizes = {"resolution": None, "aspect_ratio": None}
        return {"encoder_attention_mask": conditioning.masks[0], "added_cond_kwargs": no_sizes}

    def needed_settings(self) -> dict[str, Any]:
        """As `Family.needed_settings`. Learned variance doubles the output; the sizes of PixArt-α are not given."""
        needed = super().needed_settings()
        if self.denoiser.config.out_channels == 2 * needed["in_channels"]:
            del needed["out_channels"]
        return {**needed, **({"use_additional_conditions": False} if self.denoiser.use_additional_conditions else {})}


class TokenFamily(Family):
    """Families whose pipeline cuts latents into tokens before they come to the denoiser."""

    sets_noise_levels = True

    @abstractmethod
    def token_inputs(self, latents: Tensor, conditioning: Conditioning, rows: int, columns: int) -> dict[str, Any]:
        """Arguments of the denoiser beside tokens, time and text states: positions above all.

        Args:
            latents: [B, C, h, w].
            rows, columns: of tokens.
        """

    def predict(self, denoiser: nn.Module, noised: NoisedBatch, conditioning: Conditioning) -> Tensor:
        """As `Family.predict`."""
        latents, side = noised.noised_latents, self.patch_size
        rows, columns = (length // side for length in latents.shape[-2:])
        answer = denoiser(
            hidden_states=to_patches(latents, side),
            timestep=noised.timesteps / PIPELINE_TIMESTEPS,
            encoder_hidden_states=conditioning.states[0],
            **self.token_inputs(latents, conditioning, rows, columns),
        ).sample
        return from_patches(answer, rows, side)


class Flux(TokenFamily):
    """Rectified flow on tokens of 2 × 2 latent cells; positions are (0, row, column)."""

    name = "flux"
    pipeline_class = FluxPipeline
    block_classes = ("FluxTransformerBlock", "FluxSingleTransformerBlock")
    packing = 2
    tensor_attention = ("attn",)
    head_axis = 2
    tensor_mlps = (_MLP, _TEXT_MLP)
    text_lengths: ClassVar[Mapping[str, int]] = {"text_encoder_2": 512}
    classes: ClassVar[Mapping[str, str]] = {
        "text_encoder": "CLIPTextModel",
        "text_encoder_2": "T5EncoderModel",
        "tokenizer_2": "T5TokenizerFast",
        "transformer": "FluxTransformer2DModel",
    }
    free_text = ("text_encoder_2",)

    def encode_text(self, name: str, tokens: Tensor, mask: Tensor) -> TextOutput:
        """As `FluxPipeline.encode_prompt`: no mask."""
        output = run_text_encoder(self.parts[name], tokens)
        return TextOutput(pooled=output.pooler_output) if name == "text_encoder" else TextOutput(output[0])

    def condition(self, texts: Mapping[str, TextOutput], batch: PixelBatch) -> Conditioning:
        """As `Family.condition`."""
        return Conditioning([texts["text_encoder_2"].states], pooled=texts["text_encoder"].pooled)

    def token_inputs(self, latents: Tensor, conditioning: Conditioning, rows: int, columns: int) -> dict[str, Any]:
        """As `TokenFamily.token_inputs`."""
        axes = [torch.arange(count, device=latents.device, dtype=torch.float32) for count in (1, rows, columns)]
        guidance = latents.new_full((len(latents),), DISTILLED_GUIDANCE)
        return {
            "guidance": guidance if self.denoiser.config.guidance_embeds else None,
            "pooled_projections": conditioning.pooled,
            "txt_ids": latents.new_zeros(conditioning.states[0].shape[1], 3),
            "img_ids": torch.cartesian_prod(*axes),
        }

    def tensor_plan(self, block: nn.Module, size: int) -> dict[str, ParallelStyle]:
        """As `Family.tensor_plan`. Blocks of one stream are left whole: one matrix reads attention and MLP together."""
        return super().tensor_plan(block, size) if type(block).__name__ == "FluxTransformerBlock" else {}

    def text_shapes(self) -> tuple[list[tuple[int, int]], int]:
        """As `Family.text_shapes`."""
        clip, t5 = (encoder.config for encoder in self.text_encoders().values())
        return [(self.text_lengths["text_encoder_2"], t5.hidden_size)], clip.hidden_size

    def needed_settings(self) -> dict[str, Any]:
        """As `Family.needed_settings`; every axis of the positions has its part of a head."""
        return {**super().needed_settings(), "attention_head_dim": sum(self.denoiser.config.axes_dims_rope)}
