"""Tiny networks and tokenizers with random weights, for reports and tests; nothing is downloaded."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import diffusers
import numpy as np
import torch
import webdataset
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    StableDiffusionPipeline,
    UNet2DConditionModel,
)
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Digits, Sequence, Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    Gemma2Config,
    Gemma2Model,
    PreTrainedTokenizerFast,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)

WIDTH, T5_WIDTH, CHANNELS = 16, 32, 8


def tiny_tokenizer() -> CLIPTokenizer:
    """A CLIP tokenizer that knows single characters and the words of this module; 16 tokens at most."""
    characters = [chr(c) for c in range(33, 127)]
    alphabet = characters + [f"{c}</w>" for c in characters]
    vocabulary = {token: i for i, token in enumerate(["<|startoftext|>", "<|endoftext|>", *alphabet])}
    return CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=16)


def tiny_text_encoder(
    vocabulary_size: int, width: int = 16, layers: int = 1, *, has_projection: bool = False
) -> CLIPTextModel | CLIPTextModelWithProjection:
    """A CLIP text encoder; its projection, where it has one, is as wide as its states."""
    return (CLIPTextModelWithProjection if has_projection else CLIPTextModel)(
        CLIPTextConfig(
            vocab_size=vocabulary_size,
            hidden_size=width,
            intermediate_size=2 * width,
            projection_dim=width,
            num_hidden_layers=layers,
            num_attention_heads=2,
            max_position_embeddings=16,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=1,
        )
    )


def tiny_vae(
    latent_channels: int = 4, scaling_factor: float = 0.7, shift_factor: float | None = None, **settings: Any
) -> AutoencoderKL:
    """Downscales by 2."""
    return AutoencoderKL(
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=latent_channels,
        norm_num_groups=4,
        sample_size=16,
        scaling_factor=scaling_factor,
        shift_factor=shift_factor,
        **settings,
    )


UNET_PARAMS: dict[str, Any] = {
    "sample_size": 8,
    "in_channels": 4,
    "out_channels": 4,
    "block_out_channels": [8, 16],
    "layers_per_block": 1,
    "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
    "cross_attention_dim": 16,
    "attention_head_dim": 4,
    "norm_num_groups": 4,
}


SMALLER_UNET: dict[str, Any] = {
    **UNET_PARAMS,
    "block_out_channels": [8],
    "down_block_types": ["DownBlock2D"],
    "up_block_types": ["UpBlock2D"],
}
"""Sees the text in its middle only. What a save, an export and a step cost goes with the number of parameters."""


def tiny_pipeline(
    seed: int = 0, unet: Mapping[str, Any] = MappingProxyType(UNET_PARAMS), **scheduler: Any
) -> StableDiffusionPipeline:
    """A Stable Diffusion pipeline of random weights; 16 x 16 pixel pictures."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizer = tiny_tokenizer()
        return StableDiffusionPipeline(
            vae=tiny_vae(),
            text_encoder=tiny_text_encoder(len(tokenizer)),
            tokenizer=tokenizer,
            unet=UNet2DConditionModel(**unet),
            scheduler=DDIMScheduler(
                beta_start=0.00085,
                beta_end=0.012,
                beta_schedule="scaled_linear",
                clip_sample=False,
                steps_offset=1,
                **scheduler,
            ),
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        )


def save_tiny_pipeline(folder: Path, seed: int = 0, **settings: Any) -> Path:
    """`tiny_pipeline` as a diffusers folder."""
    tiny_pipeline(seed, **settings).save_pretrained(folder)
    return folder


def clip(vocabulary_size: int, *, has_projection: bool) -> CLIPTextModel | CLIPTextModelWithProjection:
    """Two layers, so that the penultimate states are not the embeddings."""
    return tiny_text_encoder(vocabulary_size, WIDTH, layers=2, has_projection=has_projection)


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
    return tiny_vae(latent_channels, scaling_factor=1.5, shift_factor=0.06)


def flux() -> DiffusionPipeline:
    """A FLUX pipeline with one block of each kind."""
    words, pieces = tiny_tokenizer(), t5_tokenizer()
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


def sana() -> DiffusionPipeline:
    """A Sana pipeline; its tokenizer begins a text, as Gemma's, and knows the words that tests ask for."""
    known = ["<pad>", "<eos>", "<bos>", "<unk>", "a", "picture", "red", "green", "blue", "square", *map(str, range(10))]
    words = Tokenizer(WordLevel({word: number for number, word in enumerate(known)}, unk_token="<unk>"))
    words.pre_tokenizer = Sequence([Whitespace(), Digits(individual_digits=True)])
    words.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    autoencoder: dict[str, Any] = {"latent_channels": 4, "scaling_factor": 0.7}
    for half in ("encoder", "decoder"):
        autoencoder |= {
            f"{half}_block_out_channels": (8, 8),
            f"{half}_layers_per_block": (1, 1),
            f"{half}_qkv_multiscales": ((), ()),
        }
    return diffusers.SanaPipeline(
        vae=diffusers.AutoencoderDC(**autoencoder),
        text_encoder=Gemma2Model(
            Gemma2Config(
                vocab_size=len(known),
                hidden_size=WIDTH,
                intermediate_size=2 * WIDTH,
                num_hidden_layers=1,
                num_attention_heads=2,
                num_key_value_heads=1,
                head_dim=8,
                max_position_embeddings=1024,
            )
        ),
        tokenizer=PreTrainedTokenizerFast(
            tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>", unk_token="<unk>"
        ),
        transformer=diffusers.SanaTransformer2DModel(
            in_channels=4,
            out_channels=4,
            num_attention_heads=2,
            attention_head_dim=8,
            num_layers=2,
            num_cross_attention_heads=2,
            cross_attention_head_dim=8,
            cross_attention_dim=16,
            caption_channels=WIDTH,
            sample_size=8,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
    )


def chat_words() -> CLIPTokenizer:
    """`tiny_tokenizer` with a chat template, in which a model that may not think has thought already, as Qwen 3's."""
    words = tiny_tokenizer()
    words.model_max_length = 512
    words.chat_template = (
        "{% for message in messages %}<{{ message.role }}>{{ message.content }}</>{% endfor %}"
        "{% if add_generation_prompt %}<a>{% if not enable_thinking %}<t></t>{% endif %}{% endif %}"
    )
    return words


def z_image() -> DiffusionPipeline:
    """A Z-Image pipeline with one block of each kind."""
    words = chat_words()
    sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2}
    return diffusers.ZImagePipeline(
        vae=vae(CHANNELS),
        text_encoder=Qwen3Model(Qwen3Config(vocab_size=len(words), num_key_value_heads=1, head_dim=8, **sizes)),
        tokenizer=words,
        transformer=diffusers.ZImageTransformer2DModel(
            in_channels=CHANNELS,
            dim=32,
            n_layers=1,
            n_refiner_layers=1,
            n_heads=2,
            n_kv_heads=2,
            cap_feat_dim=WIDTH,
            axes_dims=[4, 6, 6],
            axes_lens=[1024, 32, 32],
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
    )


def qwen_image() -> DiffusionPipeline:
    """A Qwen-Image pipeline, whose encoder has eyes that nothing is shown to."""
    words = tiny_tokenizer()
    words.model_max_length = 1024
    sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2}
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    text = {"vocab_size": len(words), "num_key_value_heads": 1, "rope_parameters": rope, **sizes}
    eyes = {"depth": 1, "hidden_size": WIDTH, "intermediate_size": WIDTH, "num_heads": 2, "out_hidden_size": WIDTH}
    return diffusers.QwenImagePipeline(
        vae=diffusers.AutoencoderKLQwenImage(
            base_dim=8,
            z_dim=4,
            dim_mult=[1, 1],
            num_res_blocks=1,
            temperal_downsample=[False],
            latents_mean=[0.1, -0.1, 0.0, 0.2],
            latents_std=[1.2, 1.0, 0.8, 1.0],
        ),
        text_encoder=Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=eyes)),
        tokenizer=words,
        transformer=diffusers.QwenImageTransformer2DModel(
            in_channels=16,
            out_channels=4,
            num_layers=2,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=WIDTH,
            axes_dims_rope=(4, 6, 6),
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, max_shift=0.9),
    )


def flux2() -> DiffusionPipeline:
    """A FLUX.2 [klein] pipeline with one block of each kind, and a text encoder with one layer behind those that are
    read."""
    words = chat_words()
    sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 28, "num_attention_heads": 2}
    text = Qwen3Config(vocab_size=len(words), num_key_value_heads=1, head_dim=8, tie_word_embeddings=True, **sizes)
    autoencoder = diffusers.AutoencoderKLFlux2(
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
        sample_size=16,
    )
    autoencoder.bn.running_mean.copy_(torch.linspace(-0.5, 0.5, 16))
    autoencoder.bn.running_var.copy_(torch.linspace(0.3, 3.0, 16))
    return diffusers.Flux2KleinPipeline(
        vae=autoencoder,
        text_encoder=Qwen3ForCausalLM(text),
        tokenizer=words,
        transformer=diffusers.Flux2Transformer2DModel(
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=3 * WIDTH,
            timestep_guidance_channels=16,
            axes_dims_rope=(4, 4, 4, 4),
            guidance_embeds=False,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
    )


def save_picture_shards(folder: Path) -> Path:
    """Two shards of 16 captioned pictures, 40 x 32 pixels, each another one."""
    folder.mkdir(parents=True)
    chance = np.random.default_rng(0)
    for shard in range(2):
        with webdataset.TarWriter(str(folder / f"{shard:03d}.tar")) as sink:
            for i in range(16 * shard, 16 * (shard + 1)):
                pixels = chance.integers(0, 255, (4, 4, 3), dtype=np.uint8)
                picture = Image.fromarray(pixels).resize((40, 32), Image.Resampling.BICUBIC)
                sink.write({"__key__": f"{i:06d}", "png": picture, "txt": f"picture {i}"})
    return folder
