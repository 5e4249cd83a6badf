"""Draws pictures from a pipeline folder, with torchrun on every device, and resumes where it was interrupted.

    python scripts/generate_examples.py --pipeline runs/x/current_pipeline --prompts prompts.txt --out pictures
    torchrun --nproc_per_node 8 scripts/generate_examples.py --pipeline ... --prompts captions.csv --out pictures

Picture i of a call (counted over prompts, then over the pictures of a prompt) is drawn from seed + i. The same call
again draws only what is missing, and refuses to mix in pictures that were made in another way (`metadata.jsonl`).
`grid.png` is written at the end.
"""

import argparse
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sd_training.cli import set_passive_wait, share_cores
from sd_training.log import quiet_libraries

set_passive_wait()
quiet_libraries()

import diffusers
import torch
import transformers
from tqdm import tqdm

from sd_training.cli import run_cli
from sd_training.config.value_types import path_argument
from sd_training.errors import ConfigError, DataError
from sd_training.export.draw import SAMPLERS, draw_images, make_sampler
from sd_training.export.pictures import Picture, begin_folder, is_drawn, read_captions, save_picture, write_grid
from sd_training.export.pipeline import fingerprint, folder_problems, load_pipeline, read_index

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--pipeline", type=Path, required=True, help="pipeline folder in diffusers layout")
    prompts = parser.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompts", type=Path, help=".txt, one per line; or .csv with caption or prompt, maybe uid")
    prompts.add_argument("--prompt", action="append", help="a prompt; may be given several times")
    parser.add_argument("--out", type=path_argument, required=True, help="folder of the pictures")
    parser.add_argument("--scheduler", help="sampler, default is the pipeline's own; one of " + ", ".join(SAMPLERS))
    parser.add_argument("--guidance-scale", type=float, default=7.5, help="1 is off (default 7.5)")
    parser.add_argument("--steps", type=int, default=50, help="denoising steps (default 50)")
    parser.add_argument("--height", type=int, help="[pixels], default is the pipeline's own")
    parser.add_argument("--width", type=int, help="[pixels], default is the pipeline's own")
    parser.add_argument("--seed", type=int, default=0, help="picture i is drawn from seed + i (default 0)")
    parser.add_argument("--images-per-prompt", type=int, default=1, help="default 1")
    parser.add_argument("--batch-size", type=int, default=8, help="pictures drawn at once per process (default 8)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the weights (default float32)")
    parser.add_argument("--device", default="auto", help="auto (a GPU, else MPS, else CPU), cpu, cuda, mps, cuda:1")
    return parser.parse_args(argv)


def check_numbers(args: argparse.Namespace) -> None:
    """Raises ConfigError with every number that is out of range."""
    counts = ("steps", "height", "width", "images_per_prompt", "batch_size")
    small = [name for name in counts if getattr(args, name) is not None and getattr(args, name) < 1]
    problems = [f"--{name.replace('_', '-')}: {getattr(args, name)} must be 1 or more" for name in small]
    sizes = [(name, getattr(args, name) or 0) for name in ("height", "width")]
    problems += [f"--{name}: {size} is not a multiple of 8" for name, size in sizes if size % 8]
    if not 1 <= args.guidance_scale < float("inf"):
        problems.append(f"--guidance-scale: {args.guidance_scale} must be 1 (off) or more")
    if not 0 <= args.seed < 2**62:
        problems.append(f"--seed: {args.seed} must be 0 or more")
    if problems:
        raise ConfigError(problems)


def read_prompts(args: argparse.Namespace) -> list[tuple[str, str]]:
    """(file stem, prompt) pairs. Raises DataError when there are none, or one is empty."""
    if args.prompts is None:
        pairs = [(f"{i:06d}", prompt) for i, prompt in enumerate(args.prompt)]
    elif args.prompts.suffix.lower() == ".csv":
        pairs = read_captions(args.prompts, caption_columns=("caption", "prompt"), needs_uid=False)
    else:
        try:
            lines = [line.strip() for line in args.prompts.read_text(encoding="utf-8-sig").split("\n")]
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"--prompts: {args.prompts} cannot be read as text ({error})") from error
        pairs = [(f"{i:06d}", line) for i, line in enumerate(line for line in lines if line)]
    if not pairs:
        raise DataError(f"--prompts: {args.prompts} has no prompts")
    if empty := [stem for stem, prompt in pairs if not prompt.strip()]:
        raise DataError(f"{args.prompts or '--prompt'}: prompt {empty[0]} is empty")
    return pairs


def check_pipeline(args: argparse.Namespace) -> str:
    """Name of the sampler to be used. Raises UserError when this pipeline cannot draw what is asked."""
    if problems := folder_problems(args.pipeline):
        raise DataError("\n".join(problems))
    name = read_index(args.pipeline)["_class_name"]
    kind = getattr(diffusers, name, None)
    asked = {"prompt", "generator", "height", "width", "num_inference_steps", "guidance_scale"}
    takes = set(inspect.signature(kind.__call__).parameters) if kind is not None else set()
    if asked - takes or "image" in takes:
        raise DataError(f"{args.pipeline}: {name} does not draw pictures from text alone")
    config = json.loads((args.pipeline / "scheduler" / "scheduler_config.json").read_text(encoding="utf-8"))
    if args.steps > (longest := config.get("num_train_timesteps", args.steps)):
        raise ConfigError(f"--steps: {args.steps} is more than the {longest} timesteps of the model")
    if args.scheduler is None:
        return str(config["_class_name"])
    return type(make_sampler(config, args.scheduler, name)).__name__


def plan_pictures(args: argparse.Namespace, pairs: Sequence[tuple[str, str]], sampler: str) -> list[Picture]:
    """Every picture of this call, in order. Raises DataError when a uid takes the name of the grid."""
    count, weights = args.images_per_prompt, fingerprint(args.pipeline)
    files = [f"{stem}_{k}.png" if count > 1 else f"{stem}.png" for stem, _ in pairs for k in range(count)]
    if "grid.png" in files:
        raise DataError(f"{args.prompts}: the uid 'grid' is taken by the picture grid.png; rename it")
    settings = (sampler, args.guidance_scale, args.steps, args.height, args.width, args.dtype, weights)
    return [Picture(file, pairs[i // count][1], args.seed + i, *settings) for i, file in enumerate(files)]


def choose_device(device: str) -> str:
    """The device of this process; of several processes on a machine each takes its own GPU.

    Raises:
        ConfigError: this machine does not have it.
    """
    gpus = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    mps = ["mps"] if torch.backends.mps.is_available() else []
    if device == "auto":
        device = "cuda" if gpus else "mps" if mps else "cpu"
    if device == "cuda" and gpus:
        return gpus[int(os.environ.get("LOCAL_RANK", 0)) % len(gpus)]
    if device not in ("cpu", *mps, *gpus):
        raise ConfigError(f"--device {device}: this machine has {', '.join(['cpu', *mps, *gpus])}")
    return device


def draw_share(args: argparse.Namespace, mine: Sequence[Picture], device: str, done: Callable[[], Any]) -> None:
    """Draws and saves what is missing of `mine` on one device; `done` is called after each picture."""
    missing = [picture for picture in mine if not is_drawn(args.out, picture.file)]
    if not missing:
        return
    for library in (diffusers, transformers):
        library.utils.logging.disable_progress_bar()
    pipeline = load_pipeline(args.pipeline, DTYPES[args.dtype]).to(device)
    if args.scheduler is not None:
        pipeline.scheduler = make_sampler(pipeline.scheduler.config, args.scheduler, type(pipeline).__name__)
    images = draw_images(
        pipeline,
        [picture.prompt for picture in missing],
        [picture.seed for picture in missing],
        height=args.height,
        width=args.width,
        num_inference_steps=args.steps,
        guidance_scale=args.guidance_scale,
        batch_size=args.batch_size,
    )
    try:
        for picture, image in zip(missing, images, strict=True):
            save_picture(args.out, picture, image)
            done()
    except torch.OutOfMemoryError:
        raise ConfigError(f"--batch-size: {args.batch_size} pictures at once do not fit into {device}") from None


@contextmanager
def launched_group() -> Iterator[tuple[int, int]]:
    """(rank, processes) as torchrun set them; on leaving, every process waits for the slowest one."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world == 1:
        yield rank, world
        return
    torch.distributed.init_process_group("gloo", timeout=timedelta(days=7))
    try:
        yield rank, world
        torch.distributed.barrier()
    finally:
        torch.distributed.destroy_process_group()


def run(args: argparse.Namespace, pictures: list[Picture]) -> None:
    """Draws this process's share of the pictures."""
    with launched_group() as (rank, world):
        device, mine = choose_device(args.device), pictures[rank::world]
        missing = sum(not is_drawn(args.out, picture.file) for picture in mine)
        if device == "cpu":
            share_cores(int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
        with tqdm(total=missing, unit="images", desc="drawing", disable=rank > 0) as bar:
            draw_share(args, mine, device, bar.update)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command."""
    args = parse_arguments(argv)
    check_numbers(args)
    pictures = plan_pictures(args, read_prompts(args), check_pipeline(args))
    choose_device(args.device)
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out: {args.out} cannot be made ({error.strerror})") from error
    is_first = os.environ.get("RANK", "0") == "0"
    if is_first:  # the others wait for it before they draw
        begin_folder(args.out, pictures)
    try:
        run(args, pictures)
    finally:  # also after Ctrl-C
        if is_first:
            there = write_grid(args.out, pictures, args.images_per_prompt if args.images_per_prompt > 1 else None)
            print(f"{there} of {len(pictures)} pictures, metadata.jsonl, grid.png: {args.out}", file=sys.stderr)


if __name__ == "__main__":
    run_cli(main)
