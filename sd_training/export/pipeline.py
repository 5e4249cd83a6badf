"""Trained parts as a folder that diffusers loads: written beside the old one, reloaded, compared, then put in place.

    current_pipeline.partial-7 being written or checked, by the start of the run with token 7
    current_pipeline           the newest good export; with `keep_export` a link to pipelines/step_N
    current_pipeline.old       the one before, for the moment between two renames

A process killed at any moment leaves a good folder that `recover_export`, called at the start of a run, puts in place.
`differences` compares a folder with what is in memory, offline, one part at a time on the CPU. Frozen parts are written
and compared once per start of a run; later exports get hard links to the same files. `load_pipeline` reads a folder
from elsewhere.
"""

import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline, ModelMixin
from diffusers.loaders.lora_base import LORA_WEIGHT_NAME_SAFE
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

import sd_training.models.families.mmdit  # noqa: F401 - makes its class known to diffusers
from sd_training.checkpoint import folder as sealed
from sd_training.checkpoint.folder import NO_LOCK, RunLock
from sd_training.errors import DataError
from sd_training.log import get_logger
from sd_training.models.load import folder_settings_problems, loaded_as

log = get_logger(__name__)

CAPTION = "A photo of 7 small red squares, naïve café; 日本 <|endoftext|>"
"""Text that a reloaded tokenizer must turn into the same ids: words, digits, marks, accents, other scripts."""
_COMPARED_TOKENS = 512

NOT_SETTINGS = {"architectures", "dtype", "torch_dtype", "transformers_version"}
"""Keys that saving adds to a network's config."""
_OFFLINE: dict[str, Any] = {"local_files_only": True, "use_safetensors": True}
CURRENT = "current_pipeline"
"""Name of the newest export in a run folder."""
KEPT = "pipelines"
"""Folder of the exports that are kept, `step_N`, in a run folder."""
EXPORTED_STEP = "exported_step"
"""File in the run folder: the optimizer step that `current_pipeline` is of."""
_LIBRARIES = ("diffusers", "transformers", "stable_diffusion", "sd_training.models.mmdit_rope")
"""Where parts may come from; "stable_diffusion" is diffusers' own module of the safety checker."""


class ExportError(OSError):
    """The exported folder does not give back what was in memory. The export before it is still in place."""


_ARCHITECTURES = {
    "sdxl": "stable-diffusion-xl-v1-base",
    "sd3": "stable-diffusion-v3-medium",
    "flux": "Flux.1-dev",
}
"""Family → what ModelSpec's readers call it; others have their own name."""


@dataclass(frozen=True)
class LoraExport:
    """What a run that trains adapters exports: a file of them and, where asked, a pipeline that needs no such file."""

    tensors: Mapping[str, Tensor]
    """Of the file, on the CPU."""
    header: Mapping[str, str]
    """Of the file, as `modelspec` makes it."""
    make_pipeline: Callable[[], DiffusionPipeline] | None
    """With the adapters added to the weights; read from disk, so not called before it is written."""

    @cached_property
    def pipeline(self) -> DiffusionPipeline | None:
        """What `make_pipeline` makes."""
        return None if self.make_pipeline is None else self.make_pipeline()


def modelspec(
    family: str, config: Mapping[str, Any], prediction: str, side: int, title: str, *, is_adapter: bool
) -> dict[str, str]:
    """What the header of one file says about a model, by Stability AI's ModelSpec 1.0; ComfyUI and others read it. No
    date: the same weights are the same file.

    Args:
        family: of the pipeline.
        config: settings of the denoiser.
        prediction: what the denoiser answers.
        side: of a picture [pixels].
        is_adapter: the file holds LoRA by diffusers' names, instead of a whole model by the original ones.
    """
    architecture = _ARCHITECTURES.get(family, family)
    if family == "stable_diffusion":
        is_second = config["cross_attention_dim"] == 1024
        second = "v2-768-v" if prediction == "v_prediction" else "v2-512"
        architecture = f"stable-diffusion-{second if is_second else 'v1'}"
    spec = {
        "sai_model_spec": "1.0.0",
        "architecture": f"{architecture}/lora" if is_adapter else architecture,
        "implementation": "diffusers" if is_adapter else "https://github.com/Stability-AI/generative-models",
        "title": title,
        "resolution": f"{side}x{side}",
    }
    if prediction in ("epsilon", "v_prediction"):
        spec["prediction_type"] = prediction.removesuffix("_prediction")
    return {f"modelspec.{name}": value for name, value in spec.items()}


def save_sorted(tensors: dict[str, Tensor], path: Path, metadata: Mapping[str, str]) -> None:
    """As safetensors, which orders the metadata at random: the same tensors would be another file at every save."""
    save_file(tensors, path, {"format": "pt", **metadata})
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        file.seek(8)
        file.write(json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode().ljust(size))


@dataclass(frozen=True)
class WrittenPart:
    """The files of a frozen part in an earlier export."""

    folder: Path
    files: Mapping[str, tuple[int, int]]
    """Name → size [bytes] and time of modification [ns], as they were when the part had been compared."""

    @classmethod
    def of(cls, folder: Path) -> "WrittenPart":
        """The part as it lies there now."""
        status = {path.name: path.stat() for path in folder.iterdir()}
        return cls(folder, {name: (s.st_size, s.st_mtime_ns) for name, s in status.items()})

    def link_to(self, folder: Path) -> bool:
        """Makes hard links in a new folder. False, and nothing is left, where a file was changed or is missing, or the
        file system has no links."""
        try:
            if WrittenPart.of(self.folder) != self:
                return False
            folder.mkdir()
            for name in self.files:
                os.link(self.folder / name, folder / name)
        except OSError:
            sealed.remove_quietly(folder)
            return False
        return True


def frozen_parts(pipeline: Any, folder: Path) -> dict[str, WrittenPart]:
    """The parts of an export that have no trained parameter, by name; none of a single model."""
    pipeline = pipeline.pipeline if isinstance(pipeline, LoraExport) else pipeline
    parts = pipeline.components if isinstance(pipeline, DiffusionPipeline) else {}
    modules = {name: part for name, part in parts.items() if isinstance(part, nn.Module)}
    frozen = [name for name, part in modules.items() if not any(p.requires_grad for p in part.parameters())]
    return {name: WrittenPart.of(folder / name) for name in frozen}


def trained_parts(pipeline: Any, names: Iterable[str]) -> dict[str, nn.Module]:
    """Beginning of the names of trained weights → the network of the pipeline whose parameters are named behind it: the
    denoiser alone (behind nothing) or, where text encoders are trained as well, `denoiser.` and `text_encoder.`.

    Args:
        names: of the weights.
    """
    parts = {name: part for name, part in pipeline.components.items() if isinstance(part, nn.Module)}
    denoiser = parts["unet"] if "unet" in parts else parts["transformer"]
    if not any(name.startswith("denoiser.") for name in names):
        return {"": denoiser}
    return {"denoiser.": denoiser, **{f"{n}.": part for n, part in parts.items() if n.startswith("text_encoder")}}


def export_pipeline(
    pipeline: DiffusionPipeline | ModelMixin | LoraExport,
    destination: Path,
    run_lock: RunLock = NO_LOCK,
    written: Mapping[str, WrittenPart] | None = None,
) -> None:
    """Replaces `destination` by `pipeline` in diffusers' layout, once the new folder was reloaded and compared.

    Args:
        pipeline: a whole pipeline, adapters, or one model such as an autoencoder; on any device. A part is
            copied to the CPU for the comparison, one part at a time.
        destination: folder to replace; a link there is replaced, not followed.
        run_lock: of this start of the run.
        written: parts that an earlier export of this process holds (`frozen_parts`); they are linked, not written.

    Raises:
        OSError: it could not be written; names folder and free space. `destination` is as it was.
        ExportError: the folder does not load as what was written. `destination` is as it was.
        TakenOverError: another start has the run. `destination` is as it was.
    """
    partial = _beside(destination, f"partial{run_lock.suffix}")
    try:
        run_lock.check()
        recover_export(destination)
        sealed.make_empty_folder(partial)
        try:
            linked = _write(pipeline, partial, written or {})
        except Exception as error:  # I/O errors of safetensors and tokenizers are no OSErrors
            raise (sealed.system_error(error) or error) from None
        sealed.flush_tree(partial)
        if problems := differences(pipeline, partial, linked):
            raise ExportError(f"the pipeline written to {partial} is not the one in memory: {'; '.join(problems)}")
        run_lock.check()
        _replace(destination, partial)
    except BaseException as error:
        sealed.remove_quietly(partial)
        if isinstance(error, OSError) and not isinstance(error, ExportError):
            raise sealed.write_failure("pipeline", destination, error) from error
        raise


def _write(pipeline: Any, folder: Path, written: Mapping[str, WrittenPart]) -> set[str]:
    """Writes the pipeline, or links parts of it; returns the names of those."""
    if isinstance(pipeline, LoraExport):
        save_sorted(dict(pipeline.tensors), folder / LORA_WEIGHT_NAME_SAFE, pipeline.header)
        return set() if pipeline.pipeline is None else _write(pipeline.pipeline, folder, written)
    linked = {name for name, part in written.items() if part.link_to(folder / name)}
    if not linked:
        pipeline.save_pretrained(folder, safe_serialization=True)
        return linked
    # As `DiffusionPipeline.save_pretrained`, which cannot leave a part out.
    for name, part in pipeline.components.items():
        if part is not None and name not in linked:
            part.save_pretrained(folder / name)
    pipeline.save_config(folder)
    return linked


def keep_export(
    pipeline: DiffusionPipeline | ModelMixin | LoraExport,
    run_dir: Path,
    step: int,
    run_lock: RunLock = NO_LOCK,
    written: Mapping[str, WrittenPart] | None = None,
) -> Path:
    """Exports to `run_dir/pipelines/step_N` and points the link `run_dir/current_pipeline` at it.

    Returns:
        The new folder. Errors as in `export_pipeline`.
    """
    kept = run_dir / KEPT / f"step_{step}"
    export_pipeline(pipeline, kept, run_lock, written)
    current = run_dir / CURRENT
    recover_export(current)
    link = _beside(current, f"partial{run_lock.suffix}")
    sealed.remove_durably(link)
    link.symlink_to(Path(KEPT) / kept.name)  # relative, so that the run folder can be moved
    if current.is_symlink():
        os.replace(link, current)  # one step: there is no moment without a pipeline
        sealed.flush(run_dir)
    else:
        _replace(current, link)
    return kept


def recover_export(destination: Path) -> None:
    """Puts the former export back if a process was killed between two renames."""
    old = _beside(destination, "old")
    if os.path.lexists(old) and not os.path.lexists(destination):
        log.info("putting %s back in place: a process was stopped while it was replaced", destination)
        os.rename(old, destination)
        sealed.flush(destination.parent)
    sealed.remove_durably(old)


def recover_exports(run_dir: Path) -> None:
    """Tidies everything that `export_pipeline` and `keep_export` write in a run folder; half-written ones are removed.

    To be called once, at the start of a run.
    """
    kept = run_dir / KEPT
    for left in [*run_dir.glob(f"{CURRENT}.partial*"), *kept.glob("step_*.partial*")]:
        sealed.remove_durably(left)
    recover_export(run_dir / CURRENT)
    for name in sorted({path.name.removesuffix(".old") for path in kept.glob("step_*")}):
        recover_export(kept / name)


def _beside(destination: Path, suffix: str) -> Path:
    return destination.with_name(f"{destination.name}.{suffix}")


def _replace(destination: Path, new: Path) -> None:
    """Moves the old folder out of the way, the new one in, and deletes the old one last."""
    old = _beside(destination, "old")
    if os.path.lexists(destination):
        os.rename(destination, old)
        sealed.flush(destination.parent)
    try:
        os.rename(new, destination)
        sealed.flush(destination.parent)
    finally:
        recover_export(destination)


def differences(
    pipeline: DiffusionPipeline | ModelMixin | LoraExport, folder: Path, linked: Collection[str] = ()
) -> list[str]:
    """What the folder gives back differently, one sentence each; empty when it is the same. Parts that are linked to
    files compared before are not read again.

    Weights are compared bit for bit, settings value by value, tokenizers by the ids of a caption. Global random
    numbers are left as they were.
    """
    with torch.random.fork_rng(devices=[]):  # a module that is built draws initial weights
        try:
            if isinstance(pipeline, LoraExport):
                problems = bit_differences(dict(pipeline.tensors), load_file(folder / LORA_WEIGHT_NAME_SAFE))
                whole = pipeline.pipeline
                return problems + (differences(whole, folder, linked) if whole is not None else [])
            if isinstance(pipeline, DiffusionPipeline):
                return list(_pipeline_differences(pipeline, folder, linked))
            return list(_module_differences("model", pipeline, folder))
        except (OSError, ValueError, TypeError, KeyError, RuntimeError, AttributeError, ImportError) as error:
            return [f"it does not load: {type(error).__name__}: {error}"]


def bit_differences(expected: dict[str, Tensor], found: dict[str, Tensor]) -> list[str]:
    """Names of the tensors that are missing, extra, or not equal in type, shape and every bit."""

    def form(tensor: Tensor) -> tuple[torch.dtype, torch.Size, Tensor]:
        return tensor.dtype, tensor.shape, tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)

    problems = [f"{name} is missing" for name in sorted(expected.keys() - found.keys())]
    problems += [f"{name} is extra" for name in sorted(found.keys() - expected.keys())]
    for name in (name for name in expected if name in found):
        own, other = form(expected[name]), form(found[name])
        if own[:2] != other[:2] or not torch.equal(own[2], other[2]):  # as bytes: NaN equals itself, 0 is not -0
            problems.append(f"{name} differs")
    return problems


def _pipeline_differences(pipeline: Any, folder: Path, linked: Collection[str]) -> Iterator[str]:
    parts = {name: part for name, part in pipeline.components.items() if part is not None}
    modules = {name: part for name, part in parts.items() if isinstance(part, nn.Module)}
    left_out = {name: None for name, part in pipeline.components.items() if part is None}
    # Parts that are handed over are not loaded again, so this reads model_index.json, schedulers and tokenizers only.
    reloaded = type(pipeline).from_pretrained(folder, low_cpu_mem_usage=False, **modules, **left_out, **_OFFLINE)
    index = json.loads((folder / DiffusionPipeline.config_name).read_text(encoding="utf-8"))
    for name, part in parts.items():
        if name not in modules:
            yield from _small_part_differences(name, part, getattr(reloaded, name))
            continue
        if index.get(name, [None, None])[1] != type(part).__name__:
            yield f"{name} is listed as {index.get(name)}, not as {type(part).__name__}"
        if name not in linked:
            yield from _module_differences(name, part, folder / name)
    own = [{key: v for key, v in dict(p.config).items() if key not in parts} for p in (pipeline, reloaded)]
    yield from _setting_differences("pipeline", *own)


def _module_differences(name: str, module: Any, folder: Path) -> Iterator[str]:
    options: dict[str, Any] = {"low_cpu_mem_usage": False} if isinstance(module, ModelMixin) else {}
    options |= loaded_as(type(module), module.dtype)
    reloaded = type(module).from_pretrained(folder, **options, **_OFFLINE)
    for problem in bit_differences(module.state_dict(), reloaded.state_dict()):
        yield f"{name}: {problem}"
    yield from _setting_differences(name, module.config, reloaded.config)


def _small_part_differences(name: str, part: Any, reloaded: Any) -> Iterator[str]:
    if type(part) is not type(reloaded):
        yield f"{name} loads as {type(reloaded).__name__}, not as {type(part).__name__}"
    elif isinstance(part, PreTrainedTokenizerBase):
        length = min(part.model_max_length, _COMPARED_TOKENS)  # decoders have no limit, which is written as 1e30
        padding: dict[str, Any] = {"padding": "max_length", "truncation": True, "max_length": length}
        ids = [tokenizer(CAPTION, **padding)["input_ids"] for tokenizer in (part, reloaded)]
        if ids[0] != ids[1] or len(part) != len(reloaded) or part.model_max_length != reloaded.model_max_length:
            yield f"{name} gives other token ids"
    else:
        yield from _setting_differences(name, getattr(part, "config", part), getattr(reloaded, "config", reloaded))


def _setting_differences(name: str, expected: Any, found: Any) -> Iterator[str]:
    before, after = _settings(expected), _settings(found)
    for key in sorted(before.keys() | after.keys()):
        if before.get(key) != after.get(key):
            yield f"{name}: setting {key} is {after.get(key)!r}, not {before.get(key)!r}"


def _settings(config: Any) -> dict[str, Any]:
    """A config as JSON would give it back, without private keys and keys that saving adds."""
    plain = config.to_dict() if hasattr(config, "to_dict") else dict(config)
    kept = {k: v for k, v in plain.items() if not k.startswith("_") and k not in NOT_SETTINGS}
    text = json.dumps(kept, default=lambda value: value.tolist() if hasattr(value, "tolist") else str(value))
    return json.loads(text)


def exported_step(run_dir: Path) -> int:
    """The optimizer step that `current_pipeline` of a run is of; -1: there is none."""
    path = run_dir / EXPORTED_STEP
    text = path.read_text(encoding="utf-8").strip() if path.is_file() else ""
    return int(text) if text.isdigit() else -1


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
    try:
        pipeline: DiffusionPipeline = DiffusionPipeline.from_pretrained(
            str(folder), local_files_only=True, use_safetensors=True, **options
        )
        return pipeline
    except Exception as error:  # hostile and damaged files make diffusers raise many kinds
        raise DataError(f"{folder}: diffusers cannot load it ({' '.join(str(error).split())})") from error
