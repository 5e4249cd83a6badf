"""Speed of this trainer beside diffusers' own examples/text_to_image/train_text_to_image.py, in alternation.

    python scripts/bench_peers.py --diffusers-script PATH                 # a tiny pipeline at 64 px, for a CPU
    python scripts/bench_peers.py --diffusers-script PATH --pretrained models/sd2 --resolution 512 --batch 16 --cached

PATH is a copy of their script, of the release of diffusers that is installed. It needs packages that this trainer does
not: pip install accelerate datasets torchvision. A package index without torchvision's build for the installed torch
serves none of them.

Both programs are started once and train the same pipeline on the same pictures, with AdamW, gradient clipping and an
average of the weights, each from its first step on: diffusers' script with its defaults, this trainer with those that
give the same work. They take turns of `--steps` optimizer steps while the other one waits inside its optimizer step. A
ratio is that of two neighbouring turns, so that a busy machine slows both alike.
"""

import argparse
import json
import multiprocessing
import os
import runpy
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from sd_training.cli import check_counts, run_cli
from sd_training.errors import ConfigError, DataError

_PACKAGES = ("accelerate", "datasets", "torchvision")
_FOR_EVER = 10**7
"""Optimizer steps: both programs are ended."""
SCHEDULE = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "num_train_timesteps": 1000}
SD2_UNET = {
    **{"sample_size": 64, "cross_attention_dim": 1024, "attention_head_dim": (5, 10, 20, 20)},
    "use_linear_projection": True,
}


def run_program(words: Sequence[str], log: Path, steps: int, turns: Connection) -> None:
    """Runs a Python program in this process. It sends the seconds of every `steps` optimizer steps, by the clock and of
    CPU time without loader processes, and waits for an answer before it goes on.

    Args:
        words: file, and its arguments.
        log: gets the output.
        steps: of a turn.
        turns: to whoever gives the turns.
    """
    os.setsid()
    multiprocessing.set_start_method(None, force=True)  # the program's loader starts as it does without this process
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    done, start_s, start_cpu_s = 0, time.perf_counter(), time.process_time()

    def after_step(*_: Any) -> None:
        nonlocal done, start_s, start_cpu_s
        done += 1
        if done % steps == 0:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            turns.send((time.perf_counter() - start_s, time.process_time() - start_cpu_s))
            turns.recv()
            start_s, start_cpu_s = time.perf_counter(), time.process_time()

    register_optimizer_step_post_hook(after_step)
    sys.argv = list(words)
    sys.path.insert(0, str(Path(words[0]).parent))
    runpy.run_path(words[0], run_name="__main__")


class Contestant:
    """A program in a process of its own."""

    def __init__(self, name: str, words: Sequence[str], folder: Path, steps: int) -> None:
        self.name, self.log, self.seconds = name, folder / f"{name}.log", list[tuple[float, float]]()
        context = multiprocessing.get_context("spawn")
        self.turns, theirs = context.Pipe()
        self.process = context.Process(target=run_program, args=(words, self.log, steps, theirs))
        self.process.start()
        theirs.close()

    def turn(self) -> None:
        """Lets it make its steps. Raises DataError, with the end of its output, if it does not."""
        try:
            if self.seconds:
                self.turns.send(None)
            self.seconds.append(self.turns.recv())
        except (EOFError, OSError):
            self.process.join()
            end = "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])
            raise DataError(f"{self.name} ended with status {self.process.exitcode}:\n{end}") from None

    def end(self) -> None:
        """Ends it with its loader processes."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid or 0, signal.SIGKILL)
        self.process.join()


def make_pictures(folder: Path, resolution: int, count: int) -> None:
    """JPEGs a quarter larger than they are trained at, and `metadata.jsonl`, which both programs read."""
    import numpy as np
    from PIL import Image

    folder.mkdir()
    chance, side = np.random.default_rng(0), resolution * 5 // 4
    with (folder / "metadata.jsonl").open("w") as table:
        for number in range(count):
            coarse = Image.fromarray(chance.integers(0, 255, (16, 16, 3), dtype=np.uint8))
            coarse.resize((side, side), Image.Resampling.BICUBIC).save(folder / f"{number:06d}.jpg", quality=90)
            table.write(json.dumps({"file_name": f"{number:06d}.jpg", "text": f"picture number {number}"}) + "\n")


def command_lines(arguments: argparse.Namespace, pipeline: Path, folder: Path) -> dict[str, list[str]]:
    """Program → its file and arguments, for the same work."""
    theirs: Mapping[str, Any] = {
        "pretrained_model_name_or_path": pipeline,
        "train_data_dir": folder / "pictures",
        "cache_dir": folder / "cache",
        "output_dir": folder / "diffusers",
        "resolution": arguments.resolution,
        "train_batch_size": arguments.batch,
        "dataloader_num_workers": arguments.workers,
        "mixed_precision": arguments.precision,
        "max_train_steps": _FOR_EVER,
        "checkpointing_steps": _FOR_EVER,
        "lr_warmup_steps": 0,
    }
    ours: Mapping[str, Any] = {
        "experiment.log_dir": folder,
        "experiment.name": "sd_training",
        "experiment.num_examples_to_see": _FOR_EVER * arguments.batch,
        "experiment.save_every": _FOR_EVER,
        "model.pretrained": pipeline,
        "model.mixed_precision": arguments.precision,
        "model.use_ema": "true",
        "optimizer.max_grad_norm": 1.0,
        "conditioning.dropout_prob": 0,
        "dataset.type": "Table",
        "dataset.params.path": folder / "pictures" / "metadata.jsonl",
        "dataset.params.resolution": arguments.resolution,
        "dataset.params.index_dir": folder / "index",
        "system.batch_size": arguments.batch,
        "system.workers": arguments.workers,
        "trainer.devices": 1,
        "wandb.mode": "disabled",
        "logging.progress_bar": "false",
    }
    own_words = [f"{key}={value}" for key, value in ours.items()]
    their_words = [word for key, value in theirs.items() for word in (f"--{key}", str(value))]
    return {
        "sd_training": [str(ROOT / "train.py"), *own_words, *arguments.overrides],
        "diffusers": [str(arguments.diffusers_script), *their_words, "--center_crop", "--use_ema"],
    }


def compete(
    lines: Mapping[str, Sequence[str]], folder: Path, steps: int, num_turns: int
) -> Mapping[str, list[tuple[float, float]]]:
    """Seconds and CPU seconds of every turn by program; the first turn, with start and warm-up, is not kept."""
    contestants = list[Contestant]()
    try:
        for name, words in lines.items():
            contestants.append(Contestant(name, words, folder, steps))
            contestants[-1].turn()
        for _ in range(num_turns):
            for contestant in contestants:
                contestant.turn()
    finally:
        for contestant in contestants:
            contestant.end()
    return {contestant.name: contestant.seconds[1:] for contestant in contestants}


def save_pipeline(folder: Path, size: str) -> Path:
    """A Stable Diffusion pipeline of random weights, whose tokenizer knows single characters.

    Args:
        folder: to write.
        size: "sd2", Stable Diffusion 2's networks; or "tiny", some 3 M parameters.
    """
    import torch
    from diffusers import DDPMScheduler, StableDiffusionPipeline, UNet2DConditionModel
    from transformers import CLIPTokenizer

    torch.manual_seed(0)
    is_tiny = size == "tiny"
    # The tiny encoder does 31 % of a step's floating-point operations at 64 px, as Stable Diffusion 2's does at 512 px.
    widths, depth, groups = ((16, 32, 32, 32), 1, 8) if is_tiny else ((128, 256, 512, 512), 2, 32)
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


def autoencoder(widths: tuple[int, ...], depth: int, groups: int) -> Any:
    """An AutoencoderKL that downscales by 2 between levels."""
    from diffusers import AutoencoderKL

    down, up = ("DownEncoderBlock2D",) * len(widths), ("UpDecoderBlock2D",) * len(widths)
    sizes = {"block_out_channels": widths, "layers_per_block": depth, "norm_num_groups": groups}
    return AutoencoderKL(down_block_types=down, up_block_types=up, **sizes)


def clip(vocabulary: int, width: int, inner: int, *, layers: int, tokens: int, heads: int = 4) -> Any:
    """A CLIPTextModel."""
    from transformers import CLIPTextConfig, CLIPTextModel

    sizes = {"hidden_size": width, "intermediate_size": inner, "max_position_embeddings": tokens}
    depth = {"num_hidden_layers": layers, "num_attention_heads": heads}
    ends = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    return CLIPTextModel(CLIPTextConfig(vocab_size=vocabulary, **sizes, **depth, **ends))


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line.

    Raises:
        ConfigError: the script is missing, or a package that it needs, or a number is below 1.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--diffusers-script", type=Path, required=True, help="their train_text_to_image.py")
    parser.add_argument("--pretrained", type=Path, help="pipeline folder (default: a tiny one, made for it)")
    parser.add_argument("--resolution", type=int, default=64, help="pixels")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--workers", type=int, default=1, help="loader processes of each program")
    parser.add_argument("--precision", choices=("no", "fp16", "bf16"), default="no")
    parser.add_argument("--cached", action="store_true", help="this trainer reads a cache of latents and text states")
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps of a turn")
    parser.add_argument("--turns", type=int, default=12, help="turns of each program")
    parser.add_argument("overrides", nargs="*", metavar="a.b.c=value", help="options of this trainer")
    arguments = parser.parse_intermixed_args(argv)
    check_counts(arguments, "resolution", "batch", "workers", "steps", "turns")
    if not arguments.diffusers_script.is_file():
        raise ConfigError(
            f"--diffusers-script: {arguments.diffusers_script} is no file; it is in diffusers' repository"
        )
    if missing := [name for name in _PACKAGES if find_spec(name) is None]:
        raise ConfigError(f"--diffusers-script: it needs packages that are missing; pip install {' '.join(missing)}")
    return arguments


def main() -> None:
    """Alternate, then print speeds and ratios."""
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory() as name:
        folder, pipeline = Path(name), arguments.pretrained
        if pipeline is None:
            pipeline = save_pipeline(folder / "pipeline", "tiny")
        # As many as are trained on: their loader starts its processes anew for every epoch.
        count = arguments.batch * arguments.steps * (arguments.turns + 3)
        make_pictures(folder / "pictures", arguments.resolution, count)
        lines = command_lines(arguments, pipeline.resolve(), folder)
        if arguments.cached:
            from scripts.cache_latents import main as make_cache

            make_cache([*lines["sd_training"][1:], f"out={folder / 'latents'}"])
            lines["sd_training"].append(f"dataset.cache.path={folder / 'latents'}")
        seconds = compete(lines, folder, arguments.steps, arguments.turns)
    images = arguments.batch * arguments.steps
    for program, turns in seconds.items():
        middle, cpu = (statistics.median(values) for values in zip(*turns, strict=True))
        step_ms, cpu_ms = (value / arguments.steps * 1e3 for value in (middle, cpu))
        print(
            f"{program:12s} {images / middle:9.1f} images/s  {step_ms:8.2f} ms per step, {cpu_ms:8.2f} ms of CPU time"
        )
    for kind, name in enumerate(("speed", "CPU time")):
        ratios = [other[kind] / own[kind] for own, other in zip(*seconds.values(), strict=True)]
        print(
            f"sd_training over diffusers, {name}: {statistics.median(ratios):.3f}, median of {len(ratios)} "
            f"neighbouring turns (lowest {min(ratios):.3f}, highest {max(ratios):.3f})"
        )


if __name__ == "__main__":
    run_cli(main)
