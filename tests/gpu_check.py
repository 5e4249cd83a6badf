"""What `gpu_check.sh` does: real runs of train.py, one after the other, and a line for each.

A run is ended as soon as it has logged enough; images/s are those of its log without the first row.
"""

import csv
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

from sd_training.log import quiet_libraries

quiet_libraries()

import numpy as np
import torch
import webdataset
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from PIL import Image
from transformers import CLIPTextConfig, CLIPTextModel

from sd_training.build.flops import forward_flops
from sd_training.cli import run_cli
from sd_training.config.load import load_config
from sd_training.errors import UserError
from sd_training.models.families import load_family
from tests.tiny_parts import tiny_text_encoder, tiny_tokenizer, tiny_vae

VARIANTS: Mapping[str, tuple[str, ...]] = {
    "fp32": ("model.mixed_precision=no",),
    "bf16": (),
    "fp16": ("model.mixed_precision=fp16",),
    "bf16 + channels first": ("trainer.channels_last=false",),
    "bf16 + compiled blocks": ("trainer.compile=blocks",),
    "bf16 + xformers": ("model.xformers=true",),
    "bf16 + recomputation": ("model.gradient_checkpointing=true",),
    "bf16 + no EMA": ("model.use_ema=false",),
    "bf16 + fsdp": ("distributed.strategy=fsdp",),
    "bf16 + deepspeed_2": ("distributed.strategy=deepspeed_2",),
    "bf16 + deepspeed_2 + offload": ("distributed.strategy=deepspeed_2", "distributed.offload_optimizer=true"),
    "fp16 + deepspeed_2 + offload": (
        "model.mixed_precision=fp16",
        "distributed.strategy=deepspeed_2",
        "distributed.offload_optimizer=true",
    ),
}
PEAK_TFLOPS = {"A100": 312.0, "H100": 989.0, "H200": 989.0, "L40S": 362.0, "RTX 4090": 165.0, "V100": 125.0}
"""Dense bf16 (V100: fp16) peak of the vendor's data sheets, by part of the device's name."""
_LEVELS = {"block_out_channels": (128, 256, 512, 512), "layers_per_block": 2}
_TIMEOUT_S = 900


@dataclass(frozen=True)
class Size:
    """What is trained."""

    resolution: int
    batch: int


def make_pipeline(folder: Path, is_tiny: bool) -> None:
    """Stable Diffusion 2's networks with random weights; the words are those of a tiny tokenizer."""
    torch.manual_seed(0)
    words = tiny_tokenizer()
    if is_tiny:
        unet = UNet2DConditionModel(
            sample_size=8,
            block_out_channels=(32, 32),
            cross_attention_dim=16,
            attention_head_dim=4,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        )
        vae, text = tiny_vae(), tiny_text_encoder(len(words))
    else:
        unet = UNet2DConditionModel(
            sample_size=64, cross_attention_dim=1024, attention_head_dim=(5, 10, 20, 20), use_linear_projection=True
        )
        vae = AutoencoderKL(
            **_LEVELS, down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4
        )
        words.model_max_length = 77
        text = CLIPTextModel(
            CLIPTextConfig(
                vocab_size=len(words),
                hidden_size=1024,
                intermediate_size=4096,
                num_hidden_layers=23,
                num_attention_heads=16,
                max_position_embeddings=77,
                bos_token_id=0,
                eos_token_id=1,
                pad_token_id=1,
            )
        )
    schedule = DDIMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False)
    StableDiffusionPipeline(
        vae=vae, unet=unet, text_encoder=text, tokenizer=words, scheduler=schedule, safety_checker=None,
        feature_extractor=None, requires_safety_checker=False,
    ).save_pretrained(folder)  # fmt: skip


def make_shards(folder: Path, resolution: int, count: int = 512) -> None:
    """Noisy pictures, so that JPEG decoding costs what it costs."""
    folder.mkdir(parents=True)
    chance = np.random.default_rng(0)
    with webdataset.TarWriter(str(folder / "000.tar")) as sink:
        for i in range(count):
            coarse = Image.fromarray(chance.integers(0, 255, (64, 64, 3), dtype=np.uint8))
            sink.write({"__key__": f"{i:06d}", "jpg": coarse.resize((resolution, resolution)), "txt": f"picture {i}"})


def arguments(folder: Path, name: str, size: Size) -> list[str]:
    """Options that all runs share; bf16 where nothing else is said."""
    return [
        f"experiment.log_dir={folder / 'runs'}",
        f"experiment.name={name}",
        "experiment.num_examples_to_see=100000000",
        "experiment.save_every=1000000",
        f"model.pretrained={folder / 'pipeline'}",
        "model.use_ema=true",
        f"dataset.params.path={folder / 'shards'}",
        f"dataset.params.resolution={size.resolution}",
        f"system.batch_size={size.batch}",
        f"system.workers={max(2, min(12, (os.cpu_count() or 2) - 2))}",
        "trainer.devices=1",
        "logging.every=10",
        "logging.progress_bar=false",
    ]


def rows_of(run: Path) -> list[dict[str, str]]:
    """What a run has logged so far."""
    path = run / "metrics.csv"
    if not path.exists():
        return []
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))


def measure(folder: Path, number: int, options: tuple[str, ...], size: Size, rows: int) -> str:
    """Starts a run, waits for its rows, ends it; what to print of it."""
    name, log = f"variant_{number}", folder / f"variant_{number}.log"
    words = [sys.executable, "train.py", *arguments(folder, name, size), *options]
    run, deadline_s = folder / "runs" / name, time.monotonic() + _TIMEOUT_S
    shutil.rmtree(run, ignore_errors=True)  # rows of an earlier call are not this one's
    with log.open("w") as stream:
        process = subprocess.Popen(words, cwd=ROOT, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            while process.poll() is None and len(rows_of(run)) < rows and time.monotonic() < deadline_s:
                time.sleep(1)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    logged = rows_of(run)
    if len(logged) < rows:
        errors = [line for line in log.read_text(errors="replace").splitlines() if "rror" in line]
        return f"failed after {len(logged)} rows: {errors[-1][:200] if errors else 'no error in the log'}; see {log}"
    speed = statistics.median(float(row["images_per_s"]) for row in logged[1:])
    memory = logged[-1]["device_memory_gib"]
    return (
        f"{speed:.1f} images/s | {memory or '-'} GiB | {utilisation(folder, size, speed)} | loss {logged[-1]['loss']}"
    )


def utilisation(folder: Path, size: Size, images_per_s: float) -> str:
    """Model FLOPs of the denoiser's forward and backward pass over the device's peak; the encoders are not counted."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    peak = next((tflops for name, tflops in PEAK_TFLOPS.items() if name in device), None)
    if peak is None:
        return "MFU -"
    words = arguments(folder, "flops", size)
    config = load_config(words)
    family = load_family(config.model, config.objective, config.conditioning, seed=0, meta=True)
    flops = 3 * forward_flops(family, size.resolution, size.resolution)
    return f"MFU {100 * images_per_s * flops / (peak * 1e12):.1f} %"


def main() -> None:
    """Make what is needed, run the variants, print."""
    given = dict(word.partition("=")[::2] for word in sys.argv[1:])
    if unknown := given.keys() - {"batch", "rows", "only", "folder", "size"}:
        raise UserError(f"{sorted(unknown)[0]}: is no option; options are batch, rows, only, folder, size=tiny")
    is_tiny = given.get("size") == "tiny"
    if not is_tiny and not torch.cuda.is_available():
        raise UserError("no GPU is visible here; size=tiny runs the same on the CPU, with a tiny network")
    size = Size(32, int(given.get("batch", "8"))) if is_tiny else Size(512, int(given.get("batch", "64")))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a run that is under way is ended
    folder = Path(given.get("folder", ROOT / "build" / "gpu_check")).resolve() / f"{size.resolution}px"
    if not (folder / "pipeline" / "model_index.json").exists():
        make_pipeline(folder / "pipeline", is_tiny)
    if not (folder / "shards").exists():
        make_shards(folder / "shards", size.resolution)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"{device}, torch {torch.__version__}, {size.resolution} px, batch {size.batch}", flush=True)
    wanted = given["only"].split(",") if "only" in given else None
    for number, (name, options) in enumerate(VARIANTS.items()):
        if wanted is None or any(word.strip() in name for word in wanted):
            print(f"{name} | {measure(folder, number, options, size, int(given.get('rows', '4')))}", flush=True)


if __name__ == "__main__":
    run_cli(main)
