"""A pipeline folder on disk: checking that it is complete and safe, its fingerprint, loading it without network."""

import hashlib
import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from safetensors import SafetensorError, safe_open

import sd_training.models.families.mmdit_pipeline  # noqa: F401 - makes its class known to diffusers
from sd_training.errors import DataError
from sd_training.models.load import folder_settings_problems

_LIBRARIES = ("diffusers", "transformers", "stable_diffusion", "sd_training.models.mmdit_rope")
"""Where parts may come from; "stable_diffusion" is diffusers' own module of the safety checker."""
_PROBE_BYTES = 2**20


def read_index(folder: Path) -> dict[str, Any]:
    """The content of `model_index.json`.

    Raises:
        DataError: no such folder, or it is not a diffusers pipeline.
    """
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder; a pipeline folder is needed (see scripts/download_diffusers.py)")
    try:
        index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    except OSError:
        raise DataError(f"{folder}: is not a diffusers pipeline, it has no model_index.json") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{folder}/model_index.json: is not JSON ({error})") from None
    if not isinstance(index, dict) or not isinstance(index.get("_class_name"), str):
        raise DataError(f"{folder}/model_index.json: `_class_name` must name a pipeline class of diffusers")
    return index


def part_names(index: dict[str, Any]) -> dict[str, str]:
    """The parts that have a folder of their own, with the library each comes from."""
    pairs = {name: value for name, value in index.items() if isinstance(value, list) and len(value) == 2}
    return {name: str(value[0]) for name, value in pairs.items() if not name.startswith("_") and value[0] is not None}


def folder_problems(folder: Path) -> list[str]:
    """Everything that keeps a pipeline folder from being loaded safely; empty when it is whole.

    Raises:
        DataError: there is no pipeline to check.
    """
    problems = [f"{path}: python code in a pipeline folder is never run; remove it" for path in folder.rglob("*.py")]
    for part, library in part_names(read_index(folder)).items():
        problems += _part_problems(folder / part, library)
    return problems


def _part_problems(part: Path, library: str) -> Iterator[str]:
    yield from folder_settings_problems(part)
    if library not in _LIBRARIES:
        yield f"{part}: comes from {library!r}; only parts of {', '.join(_LIBRARIES)} are loaded"
    elif not part.is_dir():
        yield f"{part}: is missing although model_index.json lists it"
    elif not any(part.glob("*.json")):
        yield f"{part}: has no configuration (*.json)"
    elif (part / "config.json").is_file():  # only models have this name; schedulers and tokenizers have their own
        yield from _weight_problems(part)


def _weight_problems(part: Path) -> Iterator[str]:
    weights = {path.name for path in part.glob("*.safetensors")}
    if not weights:
        yield f"{part}: has no *.safetensors weights; other formats can hold code and are not loaded"
    for name in sorted(weights):
        try:
            with safe_open(part / name, framework="pt") as tensors:
                tensors.keys()
        except (SafetensorError, OSError) as error:
            yield f"{part / name}: is damaged ({error})"


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
