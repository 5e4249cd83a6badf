"""What benchmarks train: networks of random weights, batches in memory, pipeline folders."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from diffusers import AutoencoderKL, DDPMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from sd_training.config.schema import ModelConfig, ObjectiveConfig, PartConfig
from sd_training.diffusion import Objective
from sd_training.models.execution import compile_blocks, recompute_activations
from sd_training.models.families.unets import StableDiffusion
from sd_training.models.schedulers import load_schedulers
from sd_training.types import PixelBatch

SCHEDULE = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "num_train_timesteps": 1000}
SD2_UNET = {
    **{"sample_size": 64, "cross_attention_dim": 1024, "attention_head_dim": (5, 10, 20, 20)},
    "use_linear_projection": True,
}
VARIANTS = ("compiled", "compiled_full", "channels_last", "recompute")
"""Ways to run the denoiser that can be compared."""


@dataclass(frozen=True)
class Subject:
    """What is trained: networks and batches."""

    unet: nn.Module
    family: StableDiffusion
    batches: list[PixelBatch]
    precision: str
    device: torch.device


def plain_objective(subject: Subject) -> Objective:
    """ε, every timestep alike."""
    return subject.family.schedulers.objective.to(subject.device)


def make_subject(model: str, batch: int, resolution: int, precision: str) -> Subject:
    """Random networks of the quickstart's or Stable Diffusion 2's size, and four random batches."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    if model == "quickstart":
        config = yaml.safe_load((Path(__file__).parents[1] / "configs" / "quickstart_unet.yaml").read_text())
        unet = UNet2DConditionModel(**config["model"]["unet"]["params"])
        text_width, tokens, levels = 32, 8, 2
    else:
        unet = UNet2DConditionModel(**SD2_UNET)
        text_width, tokens, levels = 1024, 77, 4
    vae = autoencoder((16,) * levels, 1, 8)
    text_encoder = clip(100, text_width, 2 * text_width, layers=2, tokens=tokens)
    noise = ModelConfig(noise_scheduler_training=PartConfig(target="DDPMScheduler", params=SCHEDULE))
    schedulers = load_schedulers(noise, ObjectiveConfig(), has_unet=True)
    family = StableDiffusion({"unet": unet, "vae": vae, "text_encoder": text_encoder}, schedulers)
    for network in (unet, vae, text_encoder):
        network.to(device)
    for network in (vae, text_encoder):
        network.requires_grad_(False).eval()
    side = resolution // 2 ** (levels - 1)
    batches = [random_batch(batch, resolution, side, tokens) for _ in range(4)]
    return Subject(unet, family, batches, precision, device)


def autoencoder(widths: tuple[int, ...], depth: int, groups: int) -> AutoencoderKL:
    """Downscales by 2 between levels."""
    down, up = ("DownEncoderBlock2D",) * len(widths), ("UpDecoderBlock2D",) * len(widths)
    sizes = {"block_out_channels": widths, "layers_per_block": depth, "norm_num_groups": groups}
    return AutoencoderKL(down_block_types=down, up_block_types=up, **sizes)


def clip(vocabulary: int, width: int, inner: int, *, layers: int, tokens: int, heads: int = 4) -> CLIPTextModel:
    """A text encoder."""
    sizes = {"hidden_size": width, "intermediate_size": inner, "max_position_embeddings": tokens}
    depth = {"num_hidden_layers": layers, "num_attention_heads": heads}
    ends = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    return CLIPTextModel(CLIPTextConfig(vocab_size=vocabulary, **sizes, **depth, **ends))


def random_batch(batch: int, resolution: int, side: int, tokens: int) -> PixelBatch:
    """A batch as the loader delivers it."""
    unused: dict[str, Any] = dict.fromkeys(("offset_noise", "input_noise", "mask"), torch.empty(batch, 0))
    sizes = dict.fromkeys(("original_size", "crop_top_left", "target_size"), torch.zeros(batch, 2, dtype=torch.int64))
    return PixelBatch(
        pixels=torch.randint(0, 256, (batch, 3, resolution, resolution), dtype=torch.uint8),
        tokens={"text_encoder": torch.randint(0, 100, (batch, tokens))},
        token_masks={"text_encoder": torch.ones(batch, tokens, dtype=torch.bool)},
        dropped={},
        posterior_noise=torch.randn(batch, 4, side, side),
        noise=torch.randn(batch, 4, side, side),
        timestep_draw=torch.rand(batch),
        **{**unused, **sizes},
        positions=torch.arange(batch),
        sample_ids=torch.arange(batch),
    )


def variant_of(subject: Subject, variant: str) -> StableDiffusion:
    """A family of its own, its denoiser prepared as `variant` says: VARIANTS joined by "+", or "" for none."""
    family = subject.family
    vae = copy.deepcopy(family.vae)
    own = StableDiffusion({**family.parts, "unet": copy.deepcopy(subject.unet), "vae": vae}, family.schedulers)
    wanted = variant.split("+")
    if "channels_last" in wanted:
        own.denoiser.to(memory_format=torch.channels_last)
        vae.to(memory_format=torch.channels_last)
    if "recompute" in wanted:
        recompute_activations(own.blocks())
    if "compiled" in wanted:
        compile_blocks(own.blocks(), num_sizes=1)
    if "compiled_full" in wanted:
        compile_blocks([own.denoiser], num_sizes=1)
    return own


def save_pipeline(folder: Path, size: str) -> Path:
    """A Stable Diffusion pipeline of random weights, whose tokenizer knows single characters.

    Args:
        folder: to write.
        size: "sd2", Stable Diffusion 2's networks; or "tiny", some 3 M parameters.
    """
    torch.manual_seed(0)
    is_tiny = size == "tiny"
    widths, depth, groups = ((16, 16, 32, 32), 1, 8) if is_tiny else ((128, 256, 512, 512), 2, 32)
    width, layers, heads = (64, 2, 4) if is_tiny else (1024, 23, 16)
    characters = [chr(code) for code in range(33, 127)]
    words = ["<|startoftext|>", "<|endoftext|>", *characters, *(f"{c}</w>" for c in characters)]
    tokenizer = CLIPTokenizer(vocab={word: i for i, word in enumerate(words)}, merges=[], model_max_length=77)
    tiny_unet = {
        **{"sample_size": 8, "cross_attention_dim": width, "attention_head_dim": 4, "block_out_channels": (32, 64)},
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    }
    StableDiffusionPipeline(
        vae=autoencoder(widths, depth, groups),
        unet=UNet2DConditionModel(**(tiny_unet if is_tiny else SD2_UNET)),
        text_encoder=clip(len(words), width, 4 * width, layers=layers, tokens=77, heads=heads),
        tokenizer=tokenizer,
        scheduler=DDPMScheduler(**SCHEDULE),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    ).save_pretrained(folder)
    return folder
