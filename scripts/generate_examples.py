"""Draws pictures from a pipeline folder, with torchrun on every device, and resumes where it was interrupted.

    python scripts/generate_examples.py --pipeline runs/x/current_pipeline --prompts prompts.txt --out pictures
    torchrun --nproc_per_node 8 scripts/generate_examples.py --pipeline ... --prompts captions.csv --out pictures

Picture i of a call (counted over prompts, then over the pictures of a prompt) is drawn from seed + i. The same call
again draws only what is missing, and refuses to mix in pictures that were made in another way (`metadata.jsonl`).
`grid.png` is written at the end.
"""

import argparse
import hashlib
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
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
from PIL import Image
from tqdm import tqdm

from scripts.download_diffusers import DTYPES, folder_problems, load_pipeline, part_names, read_index
from sd_training.checkpoint.folder import replace_text
from sd_training.cli import run_cli
from sd_training.config.value_types import path_argument
from sd_training.errors import ConfigError, DataError
from sd_training.export.draw import draw_images, picture_grid, read_captions

_FLOW_SIGMAS = ("DPMSolverMultistepScheduler", "UniPCMultistepScheduler")
"""Samplers of discrete schedules that can sample flow models as well."""
_NAMES = "DDIM DDPM EulerAncestralDiscrete EulerDiscrete HeunDiscrete LMSDiscrete PNDM"
_DISCRETE = (*(f"{name}Scheduler" for name in _NAMES.split()), *_FLOW_SIGMAS)
_FLOW = ("FlowMatchEulerDiscreteScheduler", "FlowMatchHeunDiscreteScheduler", *_FLOW_SIGMAS)
_EDM = ("EDMDPMSolverMultistepScheduler", "EDMEulerScheduler")
_SCALING = ("StableDiffusionPipeline", "StableDiffusionXLPipeline", "PixArtSigmaPipeline")
"""Pipelines that call `scale_model_input`, which the samplers of flow models alone do not have."""
SAMPLERS = tuple(sorted({*_DISCRETE, *_FLOW, *_EDM}))
"""The allow-list; names are diffusers' class names."""

_MUST_FOLLOW = {"prediction_type": "epsilon", "rescale_betas_zero_snr": False, "trained_betas": None}
"""Settings of the model (with the value that every sampler knows) that a sampler may not drop."""


def samplers_for(config: Mapping[str, Any], pipeline: str = "") -> tuple[str, ...]:
    """The samplers that can follow a model whose own scheduler has this configuration, in a pipeline of this class."""
    if not _is_flow(config):
        return _EDM if "sigma_data" in config else _DISCRETE
    if config.get("use_dynamic_shifting"):  # a shift by tokens
        return _FLOW[:1]
    if pipeline == "FluxPipeline":  # it chooses the noise levels itself
        return (_FLOW[0], "UniPCMultistepScheduler")
    return _FLOW_SIGMAS if pipeline in _SCALING else _FLOW


def _is_flow(config: Mapping[str, Any]) -> bool:
    return bool(config.get("use_flow_sigmas")) or "shift" in config


def make_sampler(config: Mapping[str, Any], name: str, pipeline: str = "") -> Any:
    """A sampler of class `name` for the noise schedule and prediction type in `config`.

    Args:
        config: configuration of the pipeline's own scheduler.
        name: one of `SAMPLERS`.
        pipeline: class of the pipeline that it is for.

    Raises:
        ConfigError: unknown name, or that sampler cannot follow this model, so that it would silently draw wrong
            pictures.
    """
    if name not in (known := samplers_for(config, pipeline)):
        raise ConfigError(f"scheduler {name}: is none of those that can follow this model: {', '.join(known)}")
    kind = getattr(diffusers, name)
    options = inspect.signature(kind.__init__).parameters
    settings = _as_flow(config, name) if _is_flow(config) else dict(config)
    dropped = [key for key, usual in _MUST_FOLLOW.items() if settings.get(key, usual) != usual and key not in options]
    if dropped:
        raise ConfigError(f"scheduler {name}: cannot follow this model's {', '.join(dropped)}; choose another one")
    try:
        return kind.from_config(settings)
    except (ImportError, NotImplementedError, ValueError) as error:
        raise ConfigError(f"scheduler {name}: {' '.join(str(error).split())}") from error


def _as_flow(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The settings of a flow model under the names of the chosen class: diffusers has two names for each."""
    factor = config["shift"] if "shift" in config else config.get("flow_shift")
    if name in _FLOW_SIGMAS:
        count = {"num_train_timesteps": config.get("num_train_timesteps", 1000)}
        return {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": factor or 1.0, **count}
    plain = {key: value for key, value in config.items() if key != "prediction_type"}
    return {**plain, "shift": factor or 1.0}


_GRID_PICTURES = 100
_GRID_CELL = 256
_PROBE_BYTES = 2**20


@dataclass(frozen=True)
class Picture:
    """One line of `metadata.jsonl`: everything that decides how a picture looks."""

    file: str
    """Name in the folder."""
    prompt: str
    """Text it is drawn from."""
    seed: int
    """Seed of its noise."""
    scheduler: str
    """Class name of the sampler."""
    guidance: float
    """Classifier-free guidance scale, 1 is off."""
    steps: int
    """Denoising steps."""
    height: int | None
    """[pixels]; None is the pipeline's own."""
    width: int | None
    """[pixels]; None is the pipeline's own."""
    dtype: str
    """Type of the weights."""
    weights: str
    """Fingerprint of the pipeline."""


def begin_folder(folder: Path, pictures: Sequence[Picture]) -> None:
    """Writes `metadata.jsonl`: a line for each of these pictures, whether it is drawn already or not, and then those of
    earlier calls.

    Raises:
        DataError: the folder has one of them, made in another way; nothing is written then.
    """
    path, lines = folder / "metadata.jsonl", {picture.file: asdict(picture) for picture in pictures}
    try:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        before: dict[str, dict[str, Any]] = {record["file"]: record for record in map(json.loads, text.splitlines())}
    except (ValueError, TypeError, LookupError) as error:
        raise DataError(f"{path}: is not what this command writes ({error}); choose another --out") from error
    for file, wanted in lines.items():
        record = before.get(file, {})
        if record != wanted and is_drawn(folder, file):
            changed = [key for key in wanted if record.get(key) != wanted[key]]
            differs = "; ".join(f"{key} {record.get(key)!r} instead of {wanted[key]!r}" for key in changed)
            raise DataError(
                f"{folder / file}: is there already, made with {differs}; choose another --out, or remove it"
            )
    lines |= {file: record for file, record in before.items() if file not in lines}
    replace_text(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines.values()))


def is_drawn(folder: Path, file: str) -> bool:
    """Whether the folder has this picture. A damaged file counts as missing."""
    try:
        with Image.open(folder / file) as image:
            image.verify()
    except (OSError, SyntaxError, ValueError):
        return False
    return True


def save_picture(folder: Path, picture: Picture, image: Image.Image) -> None:
    """Writes a PNG; under its name there is a whole file or none."""
    partial = folder / f".{picture.file}.partial"  # a fixed name: an interrupted one is overwritten next time
    image.save(partial, format="PNG")
    os.replace(partial, folder / picture.file)


def write_grid(folder: Path, pictures: Sequence[Picture], columns: int | None = None) -> int:
    """Writes `grid.png` of the first 100 pictures that are there, each at most 256 pixels large.

    Args:
        folder: where the pictures are.
        pictures: of this call, in order.
        columns: of the grid; None makes it square.

    Returns:
        How many of `pictures` exist.
    """
    there = [folder / picture.file for picture in pictures if is_drawn(folder, picture.file)]
    shown = [Image.open(path) for path in there[:_GRID_PICTURES]]
    for image in shown:
        image.thumbnail((_GRID_CELL, _GRID_CELL))  # reads the file and closes it
    if shown:
        grid = picture_grid(shown, columns or max(1, round(len(shown) ** 0.5)))
        grid.save(folder / ".grid.png.partial", format="PNG")
        os.replace(folder / ".grid.png.partial", folder / "grid.png")
    return len(there)


def fingerprint(folder: Path) -> str:
    """16 hex digits that change when a pipeline's weights or settings change.

    Large files count by their size and their last MiB: training moves every weight.
    """
    digest = hashlib.sha256((folder / "model_index.json").read_bytes())
    parts = part_names(read_index(folder))
    for path in sorted(p for part in parts for p in (folder / part).iterdir() if p.suffix in {".json", ".safetensors"}):
        size = path.stat().st_size
        digest.update(f"{path.relative_to(folder).as_posix()} {size}\n".encode())
        with path.open("rb") as stream:
            stream.seek(max(0, size - _PROBE_BYTES))
            digest.update(stream.read())
    return digest.hexdigest()[:16]


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
