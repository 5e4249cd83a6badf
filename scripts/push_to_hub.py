"""Publishes a run's export on the Hugging Face hub: the pipeline or the adapters, a picture, and a model card.

    python scripts/push_to_hub.py logs/mine OWNER/NAME --license openrail++
    python scripts/push_to_hub.py logs/mine OWNER/NAME --license mit --out FOLDER    # writes it, sends nothing

The card says what the run folder knows: length, data with their fingerprint, measurements with 95 % intervals, and the
options of model, objective and optimizer that are not at their default; none that names a file or a folder. Read it in
FOLDER before you publish it. The hub needs a token: `hf auth login`, or HF_TOKEN.
"""

import argparse
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from huggingface_hub import HfApi, ModelCardData
from huggingface_hub.utils import validate_repo_id

from sd_training.cli import run_cli
from sd_training.config.value_types import path_argument
from sd_training.errors import ConfigError, DataError
from sd_training.evaluation.report import Run
from sd_training.export.pipeline import CURRENT, exported_step

ADAPTERS, INDEX, PICTURE, CARD = "pytorch_lora_weights.safetensors", "model_index.json", "samples.png", "README.md"
PUBLIC = (
    *("objective.", "optimizer.", "lr_scheduler.", "conditioning.", "ema.", "model."),
    *("system.batch_size", "system.gradient_accumulation", "dataset.params.resolution", "dataset.params.crop"),
    *("dataset.params.flip_prob", "dataset.params.filters", "dataset.params.buckets."),
)
"""Begin the options of a card; a value with a slash may be a place, and is left out."""
UNREAD_FACTS = ("run folder", "bad samples")


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line.

    Raises:
        ConfigError: the run has no export, or the name is none.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=path_argument, metavar="RUN", help="run folder, log_dir/name")
    parser.add_argument("repository", metavar="OWNER/NAME", help="on the hub; made if it is new")
    parser.add_argument("--license", required=True, help="id of https://hf.co/docs/hub/repositories-licenses")
    parser.add_argument("--private", action="store_true", help="make a new repository private")
    parser.add_argument("--out", type=path_argument, metavar="FOLDER", help="write this new folder, and send nothing")
    args = parser.parse_args(argv)
    if not any((args.run / CURRENT / name).is_file() for name in (INDEX, ADAPTERS)):
        raise ConfigError(f"{args.run}: has no {CURRENT} with a pipeline or adapters; give the folder of a run")
    try:
        validate_repo_id(args.repository)
    except ValueError as error:
        raise ConfigError(f"OWNER/NAME: {args.repository!r} is no name of the hub: {error}") from error
    if args.out is not None and args.out.exists():
        raise ConfigError(f"--out: {args.out} is there already; remove it, or give another folder")
    return args


def table(rows: Mapping[str, Any]) -> str:
    """Markdown."""
    lines = [f"| {name} | {str(value).strip().replace('|', chr(92) + '|')} |" for name, value in rows.items()]
    return "\n".join(["| | |", "|---|---|", *(line.replace("\n", "<br>") for line in lines)])


def usage(repository: str, base: str | None, has_pipeline: bool, prompt: str) -> str:
    """Lines of Python that draw."""
    load = [f'pipeline = DiffusionPipeline.from_pretrained("{repository}").to("cuda")']
    if not has_pipeline:
        source = base or "the model that it was trained on"
        load = [f'pipeline = DiffusionPipeline.from_pretrained("{source}").to("cuda")']
        load += [f'pipeline.load_lora_weights("{repository}")']
    lines = ["from diffusers import DiffusionPipeline", "", *load, f"pipeline({prompt!r}).images[0]"]
    return "\n".join(["```python", *lines, "```"])


def card(run: Run, repository: str, license_id: str, has_picture: bool) -> str:
    """The text of README.md."""
    files, pretrained = run.path / CURRENT, run.config.get("model.pretrained")
    base = pretrained if isinstance(pretrained, str) and not Path(pretrained).exists() else None
    base = base if base is not None and base.count("/") == 1 and not base.startswith((".", "/", "~")) else None
    has_adapters, prompts = (files / ADAPTERS).is_file(), run.config.get("sampling.prompts") or ["a photo"]
    head = ModelCardData(
        license=license_id,
        library_name="diffusers",
        pipeline_tag="text-to-image",
        base_model=base,
        tags=["sd_training", "text-to-image", *(["lora"] if has_adapters else [])],
    )
    facts = {name: fact for name, fact in run.facts().items() if name not in UNREAD_FACTS}
    measured = {name: facts.pop(name) for name in list(facts) if " after step " in facts[name]}
    chosen = {
        f"`{key}`": value for key, value in run.chosen().items() if key.startswith(PUBLIC) and "/" not in str(value)
    }
    parts = [
        f"---\n{head.to_yaml()}\n---\n\n# {repository.rpartition('/')[2]}",
        usage(repository, base, (files / INDEX).is_file(), str(prompts[0])),
        f"![samples]({PICTURE})" if has_picture else "",
        f"## Training\n\nTrained with sd_training to optimizer step {exported_step(run.path):,}.\n\n{table(facts)}",
        f"## Measurements\n\nIn brackets a 95 % interval.\n\n{table(measured)}" if measured else "",
        f"## Options\n\nWhat is not at its default, of what training is about.\n\n{table(chosen)}",
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def newest_picture(run_dir: Path) -> Path | None:
    """The grid of the newest previews; of averaged weights where there are both."""
    found = [path for path in run_dir.glob("samples/step_*/*_grid.png") if path.parent.name[5:].isdecimal()]
    return max(found, key=lambda path: (int(path.parent.name[5:]), "trained" not in path.stem, path.stem), default=None)


def write_folder(run: Run, args: argparse.Namespace, folder: Path) -> None:
    """All that is published.

    Raises:
        DataError: it cannot be written.
    """
    picture = newest_picture(run.path)
    try:
        shutil.copytree(run.path / CURRENT, folder, copy_function=_link)
        if picture is not None:
            shutil.copyfile(picture, folder / PICTURE)
        text = card(run, args.repository, args.license, picture is not None)
        (folder / CARD).write_text(text, encoding="utf-8")
    except OSError as error:
        raise DataError(f"{folder}: cannot be written: {error.strerror or error}") from error


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copyfile(source, target)


def upload(folder: Path, args: argparse.Namespace) -> None:
    """Sends the folder as one commit.

    Raises:
        DataError: the hub refuses it, or cannot be reached.
    """
    hub = HfApi()
    try:
        hub.create_repo(args.repository, private=args.private or None, exist_ok=True)
        done = hub.upload_folder(
            repo_id=args.repository, folder_path=folder, commit_message=f"Step {exported_step(args.run)}"
        )
    except Exception as error:  # of the hub's library and of the one that it makes requests with
        reason = " ".join(str(error).split())[:300]
        raise DataError(f"{args.repository}: the hub has not taken it ({reason}); hf auth login, HF_TOKEN") from error
    print(done.commit_url)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command."""
    args = parse_arguments(argv)
    run = Run(args.run, args.run.absolute().name, 0)
    if args.out is not None:
        write_folder(run, args, args.out)
        print(args.out)
        return
    with tempfile.TemporaryDirectory(dir=args.run) as parent:
        write_folder(run, args, Path(parent) / "folder")
        upload(Path(parent) / "folder", args)


if __name__ == "__main__":
    run_cli(main)
