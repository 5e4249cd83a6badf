"""A tiny pipeline of random weights of every model family. A new family is a line of PIPELINES."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import AutoencoderKL, DDIMScheduler, DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from transformers import (
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)

from sd_training.models.mmdit_pipeline import MMDiTRopePipeline
from sd_training.models.mmdit_rope import MMDiTRope
from tests import makers

WIDTH, T5_WIDTH, CHANNELS = 16, 32, 8


def clip(vocabulary_size: int, *, has_projection: bool) -> Any:
    """Two layers, so that the penultimate states are not the embeddings."""
    return makers.tiny_text_encoder(vocabulary_size, WIDTH, layers=2, has_projection=has_projection)


def t5_tokenizer() -> T5Tokenizer:
    """Knows single characters."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    pieces += [(chr(code), -3.0) for code in range(33, 127)]
    return T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=512)


def t5(vocabulary_size: int) -> T5EncoderModel:
    """One layer."""
    return T5EncoderModel(
        T5Config(vocab_size=vocabulary_size, d_model=T5_WIDTH, d_ff=32, d_kv=8, num_layers=1, num_heads=2)
    )


def vae(latent_channels: int) -> AutoencoderKL:
    """With a shift, as SD3's and FLUX's."""
    return makers.tiny_vae(latent_channels, scaling_factor=1.5, shift_factor=0.06)


def discrete(**settings: Any) -> DDIMScheduler:
    return DDIMScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False, steps_offset=1, **settings
    )


def sdxl() -> DiffusionPipeline:
    words = makers.tiny_tokenizer()
    return diffusers.StableDiffusionXLPipeline(
        vae=makers.tiny_vae(),
        text_encoder=clip(len(words), has_projection=False),
        tokenizer=words,
        text_encoder_2=clip(len(words), has_projection=True),
        tokenizer_2=makers.tiny_tokenizer(),
        unet=diffusers.UNet2DConditionModel(
            **{
                **makers.UNET_PARAMS,
                "cross_attention_dim": 2 * WIDTH,
                "addition_embed_type": "text_time",
                "addition_time_embed_dim": 8,
                "projection_class_embeddings_input_dim": WIDTH + 6 * 8,
            }
        ),
        scheduler=discrete(),
        add_watermarker=False,
    )


def sd3(*, has_t5: bool = True) -> DiffusionPipeline:
    words, pieces = makers.tiny_tokenizer(), t5_tokenizer()
    return diffusers.StableDiffusion3Pipeline(
        vae=vae(CHANNELS),
        text_encoder=clip(len(words), has_projection=True),
        tokenizer=words,
        text_encoder_2=clip(len(words), has_projection=True),
        tokenizer_2=makers.tiny_tokenizer(),
        text_encoder_3=t5(len(pieces)) if has_t5 else None,
        tokenizer_3=pieces if has_t5 else None,
        transformer=diffusers.SD3Transformer2DModel(
            sample_size=8,
            patch_size=2,
            in_channels=CHANNELS,
            out_channels=CHANNELS,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=2,
            joint_attention_dim=T5_WIDTH,
            caption_projection_dim=16,
            pooled_projection_dim=2 * WIDTH,
            pos_embed_max_size=16,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
    )


def pixart() -> DiffusionPipeline:
    pieces = t5_tokenizer()
    return diffusers.PixArtSigmaPipeline(
        vae=makers.tiny_vae(),
        text_encoder=t5(len(pieces)),
        tokenizer=pieces,
        transformer=diffusers.PixArtTransformer2DModel(
            num_attention_heads=2,
            attention_head_dim=8,
            in_channels=4,
            out_channels=8,
            num_layers=2,
            cross_attention_dim=16,
            sample_size=8,
            patch_size=2,
            caption_channels=T5_WIDTH,
            use_additional_conditions=False,
        ),
        scheduler=discrete(),
    )


def flux() -> DiffusionPipeline:
    words, pieces = makers.tiny_tokenizer(), t5_tokenizer()
    return diffusers.FluxPipeline(
        vae=vae(CHANNELS),
        text_encoder=clip(len(words), has_projection=False),
        tokenizer=words,
        text_encoder_2=t5(len(pieces)),
        tokenizer_2=pieces,
        transformer=diffusers.FluxTransformer2DModel(
            patch_size=1,
            in_channels=4 * CHANNELS,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=T5_WIDTH,
            pooled_projection_dim=WIDTH,
            axes_dims_rope=(4, 4, 8),
            guidance_embeds=True,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(),
    )


def mmdit_rope() -> DiffusionPipeline:
    words, pieces = makers.tiny_tokenizer(), t5_tokenizer()
    return MMDiTRopePipeline(
        vae=vae(CHANNELS),
        transformer=MMDiTRope(
            in_channels=CHANNELS,
            num_layers=2,
            num_attention_heads=2,
            attention_head_dim=8,
            text_dims=[T5_WIDTH],
            pooled_dim=WIDTH,
            rope_base_size=4,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(),
        text_encoder=t5(len(pieces)),
        tokenizer=pieces,
        text_encoder_2=clip(len(words), has_projection=True),
        tokenizer_2=words,
        text_options={
            "text_encoder": {"max_tokens": 24},
            "text_encoder_2": {"layer": None, "pooling": "projection", "max_tokens": 16, "use_mask": False},
        },
    )


PIPELINES: Mapping[str, Callable[[], DiffusionPipeline]] = {
    "stable_diffusion": makers.tiny_pipeline,
    "sdxl": sdxl,
    "sd3": sd3,
    "sd3_without_t5": lambda: sd3(has_t5=False),
    "pixart": pixart,
    "flux": flux,
    "mmdit_rope": mmdit_rope,
}


def save_pipeline(name: str, folder: Path, seed: int = 0) -> Path:
    """The named pipeline as a diffusers folder."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        PIPELINES[name]().save_pretrained(folder)
    return folder
