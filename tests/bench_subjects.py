"""What `bench_step.py` trains: networks of random weights, and batches in memory."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from diffusers import UNet2DConditionModel
from torch import nn

from scripts.bench_peers import SCHEDULE, SD2_UNET, autoencoder, clip
from sd_training.config.schema import ModelConfig, ObjectiveConfig, PartConfig
from sd_training.diffusion import Objective
from sd_training.models.execution import compile_blocks, recompute_activations
from sd_training.models.families.unets import StableDiffusion
from sd_training.models.schedulers import load_schedulers
from sd_training.types import PixelBatch

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
