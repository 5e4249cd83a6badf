"""A tiny pipeline of random weights of every model family. A new family is a line of PIPELINES."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import DDIMScheduler, DiffusionPipeline, FlowMatchEulerDiscreteScheduler

from sd_training.models.families.mmdit import MMDiTRopePipeline
from sd_training.models.mmdit_rope import MMDiTRope
from tests import makers
from tests.tiny_parts import (
    CHANNELS,
    T5_WIDTH,
    WIDTH,
    clip,
    flux,
    flux2,
    qwen_image,
    sana,
    t5,
    t5_tokenizer,
    tiny_tokenizer,
    tiny_vae,
    vae,
    z_image,
)


def discrete(**settings: Any) -> DDIMScheduler:
    return DDIMScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False, steps_offset=1, **settings
    )


def sdxl() -> DiffusionPipeline:
    words = tiny_tokenizer()
    return diffusers.StableDiffusionXLPipeline(
        vae=tiny_vae(),
        text_encoder=clip(len(words), has_projection=False),
        tokenizer=words,
        text_encoder_2=clip(len(words), has_projection=True),
        tokenizer_2=tiny_tokenizer(),
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
    words, pieces = tiny_tokenizer(), t5_tokenizer()
    return diffusers.StableDiffusion3Pipeline(
        vae=vae(CHANNELS),
        text_encoder=clip(len(words), has_projection=True),
        tokenizer=words,
        text_encoder_2=clip(len(words), has_projection=True),
        tokenizer_2=tiny_tokenizer(),
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
        vae=tiny_vae(),
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


def mmdit_rope() -> DiffusionPipeline:
    words, pieces = tiny_tokenizer(), t5_tokenizer()
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
    "sana": sana,
    "z_image": z_image,
    "qwen_image": qwen_image,
    "flux2": flux2,
}


def drawn_size(name: str) -> tuple[int, int]:
    """Height and width [pixels] that the pipeline of a family takes; Sana's only multiples of 32."""
    return (64, 32) if name == "sana" else (24, 16)


def save_pipeline(name: str, folder: Path, seed: int = 0) -> Path:
    """The named pipeline as a diffusers folder."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        PIPELINES[name]().save_pretrained(folder)
    return folder
