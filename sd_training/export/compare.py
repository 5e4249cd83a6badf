"""Does a pipeline folder give back, offline, exactly what was in memory? One part in memory at a time, on the CPU."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline, ModelMixin
from diffusers.utils import logging as diffusers_logging
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from sd_training.models.load import loaded_as

CAPTION = "A photo of 7 small red squares, naïve café; 日本 <|endoftext|>"
"""Text that a reloaded tokenizer must turn into the same ids: words, digits, marks, accents, other scripts."""

_NOT_SETTINGS = {"architectures", "dtype", "torch_dtype", "transformers_version"}
_OFFLINE: dict[str, Any] = {"local_files_only": True, "use_safetensors": True}


def differences(pipeline: DiffusionPipeline | ModelMixin, folder: Path) -> list[str]:
    """What the folder gives back differently, one sentence each; empty when it is the same.

    Weights are compared bit for bit, settings value by value, tokenizers by the ids of a caption. Global random
    numbers are left as they were.
    """
    with torch.random.fork_rng(devices=[]), without_progress_bars():  # a module that is built draws initial weights
        try:
            if isinstance(pipeline, DiffusionPipeline):
                return list(_pipeline_differences(pipeline, folder))
            return list(_module_differences("model", pipeline, folder))
        except (OSError, ValueError, TypeError, KeyError, RuntimeError, AttributeError, ImportError) as error:
            return [f"it does not load: {type(error).__name__}: {error}"]


def bit_differences(expected: dict[str, Tensor], found: dict[str, Tensor]) -> list[str]:
    """Names of the tensors that are missing, extra, or not equal in type, shape and every bit."""
    problems = [f"{name} is missing" for name in expected.keys() - found.keys()]
    problems += [f"{name} is extra" for name in found.keys() - expected.keys()]
    both = (name for name in expected if name in found)
    return sorted(problems) + [f"{name} differs" for name in both if not _same_bits(expected[name], found[name])]


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Keeps the libraries' bars for loading and saving parts out of the training's output."""
    shown = [lib for lib in (diffusers_logging, transformers_logging) if lib.is_progress_bar_enabled()]
    for library in shown:
        library.disable_progress_bar()
    try:
        yield
    finally:
        for library in shown:
            library.enable_progress_bar()


def _pipeline_differences(pipeline: Any, folder: Path) -> Iterator[str]:
    parts = {name: part for name, part in pipeline.components.items() if part is not None}
    modules = {name: part for name, part in parts.items() if isinstance(part, nn.Module)}
    left_out = {name: None for name, part in pipeline.components.items() if part is None}
    # Parts that are handed over are not loaded again, so this reads model_index.json, schedulers and tokenizers only.
    reloaded = type(pipeline).from_pretrained(folder, low_cpu_mem_usage=False, **modules, **left_out, **_OFFLINE)
    yield from _index_differences(modules, folder)
    for name, part in parts.items():
        if name in modules:
            yield from _module_differences(name, part, folder / name)
        else:
            yield from _small_part_differences(name, part, getattr(reloaded, name))
    own = set(parts)
    yield from _setting_differences("pipeline", _without(pipeline.config, own), _without(reloaded.config, own))


def _without(config: Any, names: set[str]) -> dict[str, Any]:
    """A pipeline's own settings: its config also lists its parts."""
    return {key: value for key, value in dict(config).items() if key not in names}


def _index_differences(modules: dict[str, nn.Module], folder: Path) -> Iterator[str]:
    index = json.loads((folder / DiffusionPipeline.config_name).read_text(encoding="utf-8"))
    for name, module in modules.items():
        if index.get(name, [None, None])[1] != type(module).__name__:
            yield f"{name} is listed as {index.get(name)}, not as {type(module).__name__}"


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
        if _ids(part) != _ids(reloaded):
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
    kept = {k: v for k, v in plain.items() if not k.startswith("_") and k not in _NOT_SETTINGS}
    settings: dict[str, Any] = json.loads(json.dumps(kept, default=_as_json))
    return settings


def _as_json(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _ids(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], int]:
    tokens = tokenizer(CAPTION, padding="max_length", truncation=True, max_length=tokenizer.model_max_length)
    return list(tokens["input_ids"]), len(tokenizer)


def _same_bits(expected: Tensor, found: Tensor) -> bool:
    if expected.dtype != found.dtype or expected.shape != found.shape:
        return False
    plain = expected.detach().cpu().contiguous().reshape(-1).view(torch.uint8)  # bytes: NaN equals itself, 0 is not -0
    return torch.equal(plain, found.detach().cpu().contiguous().reshape(-1).view(torch.uint8))
