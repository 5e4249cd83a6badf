"""Class index → prompts, for `ClassificationWebDataset`."""

import errno
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sd_training.config.data_schema import SourceParams

Written = Mapping[str | int, str | list[str]] | str
"""Inline, or the path of a JSON file."""
_MAX_BYTES = 256 * 2**20
"""Largest file of prompts [bytes]."""
_MAX_DIGITS = 20
"""Longer numbers are names."""


def prompts_of(params: SourceParams) -> Written | None:
    """`idx_to_prompt`, or `class_mapping`, its other name; None when neither is set."""
    return params.idx_to_prompt if params.idx_to_prompt is not None else params.class_mapping


def read_class_prompts(params: SourceParams) -> tuple[dict[str, list[str]], list[str]]:
    """The prompts of every class.

    Returns:
        Class → at least one prompt, and one sentence per problem. `7`, `"7"` and `"07"` are the class `7`.
    """
    option = "dataset.params.idx_to_prompt" if params.idx_to_prompt is not None else "dataset.params.class_mapping"
    written: Any = prompts_of(params)
    if isinstance(written, str):
        try:
            written = json.loads(_read(Path(written).expanduser()))
        except RecursionError:
            return {}, [f"{option}: {written!r} is not readable as JSON: nested too deeply"]
        except (OSError, RuntimeError) as error:  # RuntimeError: `~nobody`
            return {}, [f"{option}: cannot read {written!r}: {getattr(error, 'strerror', None) or error}"]
        except ValueError as error:
            return {}, [f"{option}: {written!r} is not readable as JSON: {error}"]
    if not isinstance(written, dict) or not written:
        return {}, [f"{option}: must be a mapping of class to prompt, with at least one class"]
    return _read_mapping(option, written)


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        content = file.read(_MAX_BYTES + 1)
    if len(content) > _MAX_BYTES:
        raise OSError(errno.EFBIG, f"larger than {_MAX_BYTES:,} bytes")
    return content


def _read_mapping(option: str, written: dict[Any, Any]) -> tuple[dict[str, list[str]], list[str]]:
    prompts: dict[str, list[str]] = {}
    problems: list[str] = []
    for key, value in written.items():
        name = str(key).strip()
        name = str(int(name)) if name.isascii() and name.isdigit() and len(name) < _MAX_DIGITS else name
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
            problems.append(f"{option}.{key}: must be a prompt or a list of at least one prompt")
        elif name in prompts:
            problems.append(f"{option}.{key}: this class is listed twice")
        else:
            prompts[name] = texts
    return prompts, problems
