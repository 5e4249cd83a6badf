"""What the JSON files of a model repository may not say.

Classes and weights are chosen here, but the libraries also follow what a config.json tells them: transformers
fetches and runs an attention kernel that is named like a hub repository, and starts a quantizer, without being asked.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MAX_JSON_BYTES = 64 << 20
"""Largest settings or index file of a repository [bytes]; a tokenizer's own files may be larger."""
_REFUSED = {
    "quantization_config": "quantized weights are not trained or drawn with",
    "custom_pipeline": "code of a repository is never run",
    "custom_pipelines": "code of a repository is never run",
}
_KERNELS = ("attn_implementation", "kernel_config")


def refused_settings(settings: Any, where: str) -> Iterator[str]:
    """One sentence per setting that would make a library run code from elsewhere.

    Args:
        settings: content of a config.json.
        where: what the sentences call it.
    """
    if isinstance(settings, list):
        for entry in settings:
            yield from refused_settings(entry, where)
    if not isinstance(settings, dict):
        return
    for name, value in settings.items():
        if name in _REFUSED and value:
            yield f"{where}: has {name}; {_REFUSED[name]}"
        elif any(word in str(name) for word in _KERNELS) and not _is_builtin(value):
            yield f"{where}: has {name}={json.dumps(value)[:80]}; kernels from elsewhere are never fetched or run"
        else:
            yield from refused_settings(value, where)


def _is_builtin(value: Any) -> bool:
    """Names without a slash, an `@` or a colon are in the library."""
    if isinstance(value, dict):
        return all(map(_is_builtin, value.values()))
    return value is None or isinstance(value, bool) or (isinstance(value, str) and value.replace("_", "").isalnum())


def folder_settings_problems(folder: Path) -> list[str]:
    """Everything in the JSON files of a part's folder that is not followed: settings, shards that an index names."""
    problems: list[str] = []
    for path in sorted(folder.glob("*config.json")):
        problems += _of_file(path, lambda value, path=path: refused_settings(value, str(path)))
    for path in sorted(folder.glob("*.safetensors.index.json")):
        problems += _of_file(path, lambda value, path=path: _index_problems(value, path))
    return problems


def _of_file(path: Path, check: Any) -> list[str]:
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            return [f"{path}: is larger than {MAX_JSON_BYTES:,} bytes"]
        value = json.loads(path.read_text(encoding="utf-8"))
        return list(check(value)) if isinstance(value, dict) else [f"{path}: is no JSON object"]
    except (OSError, ValueError, RecursionError) as error:
        return [f"{path}: is not readable as JSON ({str(error)[:100]})"]


def _index_problems(value: dict[str, Any], path: Path) -> Iterator[str]:
    """Shards are files of the same folder, in the format that holds no code."""
    names = value.get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        yield f"{path}: has no weight_map of tensor to file"
        return
    for name in sorted(set(names.values())):
        if Path(name).name != name or "\\" in name or not name.endswith(".safetensors"):
            yield f"{path}: names {name[:80]!r}, which is no *.safetensors file of its folder"
