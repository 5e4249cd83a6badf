"""Draws pictures from a pipeline folder, with torchrun on every device, and resumes where it was interrupted.

    python scripts/generate_examples.py --pipeline runs/x --prompts prompts.txt --out pictures
    torchrun --nproc_per_node 8 scripts/generate_examples.py --pipeline ... --prompts captions.csv --out pictures

Picture i of a call (counted over prompts, then over the pictures of a prompt) is drawn from seed + i. The same call
again draws only what is missing, and refuses to mix in pictures that were made in another way (`metadata.jsonl`).
`grid.png` is written at the end. docs/drawing.md has recipes: adapters, few-step models, ControlNets, image-to-image.
"""

import argparse
import hashlib
import inspect
import io
import json
import os
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sd_training.cli import prepare_cpu, set_passive_wait
from sd_training.log import quiet_libraries

set_passive_wait()
quiet_libraries()

import diffusers
import torch
import yaml
from diffusers.loaders.lora_base import LORA_WEIGHT_NAME_SAFE
from PIL import Image
from tqdm import tqdm

from scripts.download_diffusers import DTYPES
from sd_training.checkpoint.folder import replace_text
from sd_training.cli import run_cli
from sd_training.config.value_types import path_argument
from sd_training.data.samples.image import image_size
from sd_training.errors import ConfigError, DataError
from sd_training.export.additions import SAMPLERS, Additions, make_sampler
from sd_training.export.draw import Conditions, draw_images, is_picture, picture_grid, read_rows
from sd_training.export.pipeline import CURRENT, folder_problems, load_pipeline, part_names, read_index
from sd_training.models.families import FAMILIES

Rows: TypeAlias = Mapping[str, Mapping[str, str]]
"""File stem → `caption`, and what else the row of the .csv has."""
_STRENGTH = 0.8
_GRID_PICTURES = 100
_GRID_CELL = 256
_FILM_SIDE = 512
"""Of the pictures of a film [pixels]."""
_FRAME_MS, _LAST_FRAME_MS = 80, 2000
_PROBE_BYTES = 2**20


@dataclass(frozen=True)
class Picture:
    """What is drawn, and from what."""

    record: Mapping[str, Any]
    """The line of `metadata.jsonl`: everything that decides how the picture looks. Options that first came with
    negative prompts are left out where they are not used, so that older folders can be continued."""
    conditions: Conditions

    @property
    def file(self) -> str:
        """Name in the folder."""
        return str(self.record["file"])

    @property
    def film(self) -> str:
        """Name of its animation."""
        return self.file.removesuffix("png") + "gif"


def begin_folder(folder: Path, pictures: Sequence[Picture]) -> None:
    """Writes `metadata.jsonl`: a line for each of these pictures, whether it is drawn already or not, and then those of
    earlier calls.

    Raises:
        DataError: the folder has one of them, made in another way; nothing is written then.
    """
    path, lines = folder / "metadata.jsonl", {picture.file: picture.record for picture in pictures}
    try:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        before: dict[str, dict[str, Any]] = {record["file"]: record for record in map(json.loads, text.splitlines())}
    except (ValueError, TypeError, LookupError) as error:
        raise DataError(f"{path}: is not what this command writes ({error}); choose another --out") from error
    for file, wanted in lines.items():
        record = before.get(file, {})
        if record != wanted and is_picture(folder / file):
            changed = [key for key in {**wanted, **record} if record.get(key) != wanted.get(key)]
            differs = "; ".join(f"{key} {record.get(key)!r} instead of {wanted.get(key)!r}" for key in changed)
            raise DataError(
                f"{folder / file}: is there already, made with {differs}; choose another --out, or remove it"
            )
    lines |= {file: record for file, record in before.items() if file not in lines}
    replace_text(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines.values()))


def is_done(args: argparse.Namespace, picture: Picture) -> bool:
    """Whether the folder has the picture and, where it is asked for, its film."""
    return is_picture(args.out / picture.file) and (not args.gif or is_picture(args.out / picture.film))


def save_picture(folder: Path, file: str, image: Image.Image, **options: Any) -> None:
    """Writes an image; under its name there is a whole file or none."""
    partial = folder / f".{file}.partial"  # a fixed name: an interrupted one is overwritten next time
    try:
        image.save(partial, format=file.rpartition(".")[2], **options)
    except OSError as error:
        error.filename = error.filename or str(partial)  # a full disk does not say
        raise
    os.replace(partial, folder / file)


def write_grid(folder: Path, pictures: Sequence[Picture], columns: int | None = None) -> int:
    """Writes `grid.png` of the first 100 pictures that are there, each at most 256 pixels large.

    Args:
        folder: where the pictures are.
        pictures: of this call, in order.
        columns: of the grid; None makes it square.

    Returns:
        How many of `pictures` exist.
    """
    there = [folder / picture.file for picture in pictures if is_picture(folder / picture.file)]
    shown = [Image.open(path) for path in there[:_GRID_PICTURES]]
    for image in shown:
        image.thumbnail((_GRID_CELL, _GRID_CELL))  # reads the file and closes it
    if shown:
        save_picture(folder, "grid.png", picture_grid(shown, columns or max(1, round(len(shown) ** 0.5))))
    return len(there)


def fingerprint(place: Path) -> str:
    """16 hex digits that change when the weights or settings of a pipeline, part or file change.

    Large files count by their size and their last MiB: training moves every weight.
    """
    digest, folders, paths = hashlib.sha256(), [place], [place]
    if (place / "model_index.json").is_file():
        digest.update((place / "model_index.json").read_bytes())
        folders = [place / part for part in part_names(read_index(place))]
    if place.is_dir():
        paths = sorted(p for folder in folders for p in folder.iterdir() if p.suffix in {".json", ".safetensors"})
    for path in paths:
        size = path.stat().st_size
        digest.update(f"{path.relative_to(place).as_posix()} {size}\n".encode())
        with path.open("rb") as stream:
            stream.seek(max(0, size - _PROBE_BYTES))
            digest.update(stream.read())
    return digest.hexdigest()[:16]


def weighted(text: str) -> tuple[Path, float]:
    """PATH or PATH:WEIGHT."""
    path, _, weight = text.rpartition(":")
    is_number = path and re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", weight, re.IGNORECASE)
    return (Path(path), float(weight)) if is_number else (Path(text), 1.0)


def scheduler_param(text: str) -> tuple[str, Any]:
    """KEY=VALUE, a value of YAML."""
    key, sign, value = text.partition("=")
    try:
        if sign:
            return key, yaml.safe_load(value)
    except yaml.YAMLError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE with a value of YAML")


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--pipeline", type=Path, required=True, help="pipeline folder in diffusers layout, or folder of a run")
    prompts = parser.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompts", type=Path, help=".txt, one per line; or .csv with caption or prompt, maybe uid")
    prompts.add_argument("--prompt", action="append", help="a prompt; may be given several times")
    add("--out", type=path_argument, required=True, help="folder of the pictures")
    add("--negative-prompt", help="what guidance leads away from; also a column of the .csv")
    add("--scheduler", help="sampler, default is the pipeline's own; one of " + ", ".join(SAMPLERS))
    add("--scheduler-params", nargs="+", type=scheduler_param, default=[], metavar="KEY=VALUE", help="its parameters")
    add("--guidance-scale", type=float, default=7.5, help="1 is off (default 7.5)")
    add("--guidance-rescale", type=float, default=0.0, help="0 to 1, against overexposure (default 0)")
    add("--steps", type=int, default=50, help="denoising steps (default 50)")
    add("--denoiser", type=Path, metavar="FILE", help="weights of the UNet or transformer, .safetensors")
    add("--lora", type=weighted, action="append", default=[], metavar="PATH[:WEIGHT]", help="adapters; repeatable")
    add("--controlnet", type=weighted, action="append", default=[], metavar="FOLDER[:SCALE]", help="repeatable")
    add("--control-image", type=Path, action="append", default=[], help="of each ControlNet; or columns of the .csv")
    add("--init-image", type=Path, help="to begin with (image-to-image); or a column of the .csv")
    add("--strength", type=float, help=f"how much of an initial image is drawn anew (default {_STRENGTH})")
    add("--height", type=int, help="[pixels], default is the image's where there is one, else the pipeline's own")
    add("--width", type=int, help="[pixels], as --height")
    add("--seed", type=int, default=0, help="picture i is drawn from seed + i (default 0)")
    add("--images-per-prompt", type=int, default=1, help="default 1")
    add("--gif", action="store_true", help="write what each step takes for the finished picture, as an animation")
    add("--batch-size", type=int, default=8, help="pictures drawn at once per process (default 8)")
    add("--dtype", choices=DTYPES, default="float32", help="of the weights (default float32)")
    add("--device", default="auto", help="auto (a GPU, else MPS, else CPU), cpu, cuda, mps, cuda:1")
    args = parser.parse_args(argv)
    args.pipeline, args.scheduler_params = exported(args.pipeline), dict(args.scheduler_params)
    files = [exported(path) / LORA_WEIGHT_NAME_SAFE if path.is_dir() else path for path, _ in args.lora]
    args.lora = [(path, weight) for path, (_, weight) in zip(files, args.lora, strict=True)]
    return args


def exported(folder: Path) -> Path:
    """The export in the folder of a run; another folder itself."""
    return folder / CURRENT if (folder / CURRENT).is_dir() else folder


def check_options(args: argparse.Namespace) -> None:
    """Raises ConfigError with every number that is out of range, and every file that is not there."""
    counts = ("steps", "height", "width", "images_per_prompt", "batch_size")
    sizes = [(name, getattr(args, name) or 0) for name in ("height", "width")]
    checks = [
        *((name, "1 or more", getattr(args, name) is None or getattr(args, name) >= 1) for name in counts),
        *((name, "a multiple of 8", size % 8 == 0) for name, size in sizes),
        ("guidance_scale", "1 (off) or more", 1 <= args.guidance_scale < float("inf")),
        ("guidance_rescale", "from 0 to 1", 0 <= args.guidance_rescale <= 1),
        ("guidance_rescale", "0 with a guidance scale of 1", args.guidance_scale > 1 or not args.guidance_rescale),
        ("negative_prompt", "left out with a guidance scale of 1", args.guidance_scale > 1 or not args.negative_prompt),
        ("strength", "above 0 and at most 1", args.strength is None or 0 < args.strength <= 1),
        ("seed", "0 or more", 0 <= args.seed < 2**62),
    ]
    wrong = [(name, wanted) for name, wanted, is_right in checks if not is_right]
    problems = [f"--{name.replace('_', '-')}: {getattr(args, name)} must be {wanted}" for name, wanted in wrong]
    weights = [("--lora", path) for path, _ in args.lora] + [("--denoiser", args.denoiser)] * bool(args.denoiser)
    files = [(option, path) for option, path in weights if path.suffix != ".safetensors" or not path.is_file()]
    for option, path in files:
        hint = "scripts/convert_checkpoint.py makes one of other checkpoints"
        if path.name == LORA_WEIGHT_NAME_SAFE and path.parent.is_dir():
            hint = f"{path.parent} has no adapters; draw with --pipeline {path.parent}"
        elif ":" in path.name:
            hint = "a weight is a number, as in PATH:0.5"
        problems.append(f"{option}: {path} is no *.safetensors file; {hint}")
    folders = [path for path, _ in args.controlnet if not path.is_dir()]
    problems += [f"--controlnet: {path} is no folder in diffusers layout" for path in folders]
    if len(args.control_image) > len(args.controlnet):
        problems.append(f"--control-image: {len(args.control_image)} for {len(args.controlnet)} of --controlnet")
    if problems:
        raise ConfigError(problems)


def read_prompts(args: argparse.Namespace) -> Rows:
    """Every prompt. Raises DataError when there are none, or one is empty."""
    if args.prompts is not None and args.prompts.suffix.lower() == ".csv":
        rows = read_rows(args.prompts, caption_columns=("caption", "prompt"), needs_uid=False)
    else:
        try:
            lines = args.prompt or args.prompts.read_text(encoding="utf-8-sig").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"--prompts: {args.prompts} cannot be read as text ({error})") from error
        kept = [line.strip() for line in lines if line.strip() or args.prompt]
        rows = {f"{i:06d}": {"caption": line} for i, line in enumerate(kept)}
    if not rows:
        raise DataError(f"--prompts: {args.prompts} has no prompts")
    if empty := [stem for stem, row in rows.items() if not row["caption"].strip()]:
        raise DataError(f"{args.prompts or '--prompt'}: prompt {empty[0]} is empty")
    return rows


def read_conditions(args: argparse.Namespace, rows: Rows) -> list[Conditions]:
    """What the rows, or the options for all of them, have besides prompts.

    Raises:
        DataError: an image is missing, or is no image.
    """

    def beside(column: str, given: Path | None) -> list[Any]:
        paths = [args.prompts.parent / row[column] if row.get(column) else given for row in rows.values()]
        for path in {path for path in paths if path is not None}:
            if not path.is_file() or image_size(io.BytesIO(path.read_bytes())) == (0, 0):
                raise DataError(f"{column}: {path} is not there, or is no JPEG, PNG or WebP file")
        if None in paths and (any(paths) or column != "init_image"):
            option = column[:13].replace("_", "-")
            raise DataError(f"{column}: {paths.count(None)} of {len(paths)} prompts have none; give --{option}")
        return paths

    has_negatives = args.negative_prompt is not None or any(row.get("negative_prompt") for row in rows.values())
    names = ["control_image", *(f"control_image_{i}" for i in range(2, len(args.controlnet) + 1))]
    given = zip(args.controlnet, names, [*args.control_image, *[None] * len(names)], strict=False)
    negatives = [(row.get("negative_prompt") or args.negative_prompt or "") for row in rows.values()]
    controls = list(zip(*(beside(name, path) for _, name, path in given), strict=True)) or [()] * len(rows)
    own = zip(negatives, beside("init_image", args.init_image), controls, strict=True)
    return [Conditions(negative if has_negatives else None, init, images) for negative, init, images in own]


def pipeline_options(args: argparse.Namespace, additions: Additions) -> dict[str, Any]:
    """Arguments of the pipeline that not every one takes, and that are the same for all pictures."""
    options = additions.options()
    if args.guidance_rescale:
        options["guidance_rescale"] = args.guidance_rescale
    if additions.has_init_images:
        options["strength"] = args.strength or _STRENGTH
        if options["strength"] * args.steps < 1:
            raise ConfigError(f"--strength: {options['strength']} of {args.steps} steps is none; raise one of them")
    elif args.strength is not None:
        raise ConfigError("--strength: is only read with --init-image, or a column init_image; remove it")
    return options


def check_pipeline(args: argparse.Namespace, additions: Additions, kinds: Conditions) -> str:
    """Name of the sampler to be used. Raises UserError when this pipeline cannot draw what is asked.

    Args:
        kinds: conditions of any picture.
    """
    if problems := folder_problems(args.pipeline):
        raise DataError("\n".join(problems))
    merged = args.pipeline / LORA_WEIGHT_NAME_SAFE
    own = fingerprint(merged) if args.lora and merged.is_file() else None
    if twice := next((path for path, _ in args.lora if fingerprint(path) == own), None):
        raise ConfigError(
            f"--lora: {twice} is part of the weights of {args.pipeline} already (model.lora.merge) and would count "
            "twice; leave it out, or give the pipeline that the run began with as --pipeline"
        )
    name = read_index(args.pipeline)["_class_name"]
    kind = getattr(diffusers, name, None)
    takes = set(inspect.signature(kind.__call__).parameters) if kind is not None else set()
    is_ours = any(family.pipeline_class is kind for family in FAMILIES.values())  # FLUX.2 takes an image, or none
    if {"prompt", "generator", "num_inference_steps", "guidance_scale"} - takes or ("image" in takes and not is_ours):
        raise DataError(f"{args.pipeline}: {name} does not draw pictures from text alone")
    if (kind := additions.pipeline_class(name)) is None:
        raise ConfigError(f"--controlnet, --init-image: diffusers cannot draw so with a {name}")
    needs = {*pipeline_options(args, additions), *["negative_prompt"] * (kinds.negative_prompt is not None)}
    needs |= {*["callback_on_step_end"] * args.gif, *["true_cfg_scale"] * (name == "FluxPipeline")}
    if lacks := sorted(needs - set(inspect.signature(kind.__call__).parameters)):
        raise ConfigError(f"{args.pipeline}: {kind.__name__} of diffusers takes no {', '.join(lacks)}")
    config = json.loads((args.pipeline / "scheduler" / "scheduler_config.json").read_text(encoding="utf-8"))
    if args.steps > (longest := config.get("num_train_timesteps", args.steps)):
        raise ConfigError(f"--steps: {args.steps} is more than the {longest} timesteps of the model")
    sampler = str(args.scheduler or config["_class_name"])
    if args.scheduler is not None or args.scheduler_params:
        make_sampler(config, sampler, name, args.scheduler_params, args.steps)
    return sampler


def plan_pictures(
    args: argparse.Namespace, rows: Rows, conditions: Sequence[Conditions], sampler: str
) -> list[Picture]:
    """Every picture of this call, in order. Raises DataError when a uid takes the name of the grid."""
    settings: dict[str, Any] = {"scheduler": sampler, "guidance": args.guidance_scale, "steps": args.steps}
    settings |= {"height": args.height, "width": args.width, "dtype": args.dtype, "weights": fingerprint(args.pipeline)}
    recent = {
        "scheduler_params": args.scheduler_params,
        "guidance_rescale": args.guidance_rescale,
        "denoiser": args.denoiser and fingerprint(args.denoiser),
        "loras": [[fingerprint(path), weight] for path, weight in args.lora],
        "controlnets": [[fingerprint(path), scale] for path, scale in args.controlnet],
    }
    pictures = list[Picture]()
    for (stem, row), own in zip(rows.items(), conditions, strict=True):
        images = [hashlib.sha256(p.read_bytes()).hexdigest()[:16] for p in (own.init_image, *own.control_images) if p]
        added = {**recent, "strength": own.init_image and (args.strength or _STRENGTH), "images": images}
        for k in range(args.images_per_prompt):
            file = f"{stem}_{k}.png" if args.images_per_prompt > 1 else f"{stem}.png"
            record = {"file": file, "prompt": row["caption"], "seed": args.seed + len(pictures), **settings}
            if own.negative_prompt is not None:  # to some pipelines, none is another one than an empty one
                record["negative_prompt"] = own.negative_prompt
            pictures.append(Picture(record | {key: value for key, value in added.items() if value}, own))
    if any(picture.file == "grid.png" for picture in pictures):
        raise DataError(f"{args.prompts}: the uid 'grid' is taken by the picture grid.png; rename it")
    return pictures


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


def draw_share(
    args: argparse.Namespace, mine: Sequence[Picture], additions: Additions, device: str, done: Callable[[], Any]
) -> None:
    """Draws and saves what is missing of `mine` on one device; `done` is called after each picture."""
    missing = [picture for picture in mine if not is_done(args, picture)]
    if not missing:
        return
    pipeline = load_pipeline(args.pipeline, DTYPES[args.dtype])
    if args.scheduler is not None or args.scheduler_params:
        own, name = pipeline.scheduler.config, missing[0].record["scheduler"]
        pipeline.scheduler = make_sampler(own, name, type(pipeline).__name__, args.scheduler_params, args.steps)
    pipeline, films = additions.extend(pipeline).to(device), defaultdict[int, list[Image.Image]](list)

    def keep(start: int, shown: list[Image.Image]) -> None:
        for number, image in enumerate(shown, start):
            image.thumbnail((_FILM_SIDE, _FILM_SIDE))
            films[number].append(image)

    images = draw_images(
        pipeline,
        [picture.record["prompt"] for picture in missing],
        [picture.record["seed"] for picture in missing],
        height=args.height,
        width=args.width,
        num_inference_steps=args.steps,
        guidance_scale=args.guidance_scale,
        batch_size=args.batch_size,
        conditions=[picture.conditions for picture in missing],
        on_step=keep if args.gif else None,
        **pipeline_options(args, additions),
    )
    try:
        for number, (picture, image) in enumerate(zip(missing, images, strict=True)):
            save_picture(args.out, picture.file, image)
            if frames := films.pop(number, []):
                times = [*[_FRAME_MS] * (len(frames) - 1), _LAST_FRAME_MS]
                later = {"save_all": True, "append_images": frames[1:], "duration": times, "loop": 0}
                save_picture(args.out, picture.film, frames[0], **later)
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


def run(args: argparse.Namespace, pictures: list[Picture], additions: Additions) -> None:
    """Draws this process's share of the pictures."""
    with launched_group() as (rank, world):
        device, mine = choose_device(args.device), pictures[rank::world]
        missing = sum(not is_done(args, picture) for picture in mine)
        if device == "cpu":
            prepare_cpu(int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
        with tqdm(total=missing, unit="images", desc="drawing", disable=rank > 0) as bar:
            draw_share(args, mine, additions, device, bar.update)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command."""
    args = parse_arguments(argv)
    check_options(args)
    rows = read_prompts(args)
    conditions = read_conditions(args, rows)
    additions = Additions(args.denoiser, args.lora, args.controlnet, conditions[0].init_image is not None)
    pictures = plan_pictures(args, rows, conditions, check_pipeline(args, additions, conditions[0]))
    choose_device(args.device)
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out: {args.out} cannot be made ({error.strerror})") from error
    is_first = os.environ.get("RANK", "0") == "0"
    if is_first:  # the others wait for it before they draw
        begin_folder(args.out, pictures)
    try:
        run(args, pictures, additions)
    finally:  # also after Ctrl-C
        if is_first:
            there = write_grid(args.out, pictures, args.images_per_prompt if args.images_per_prompt > 1 else None)
            print(f"{there} of {len(pictures)} pictures, metadata.jsonl, grid.png: {args.out}", file=sys.stderr)


def command() -> None:
    """`sd-generate` of an installed package."""
    run_cli(main)


if __name__ == "__main__":
    command()
