"""`incidents/` in the run folder: one JSON file, `step=N.KIND.json`, per event that a person should look at.

Values may come from outside (names of samples, error messages) or be infinite. They are written as short, printable
JSON without secrets. The same event again, after a resume, replaces its file.
"""

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sd_training.log import get_logger
from sd_training.redaction import for_terminal

log = get_logger(__name__)

FOLDER = "incidents"
MAX_FILES = 1000
"""Per run; later incidents are only logged."""
MAX_ITEMS = 1024
"""Entries of a list or table that are written."""
MAX_TEXT = 300
"""Characters of a text that are written."""


def incident_path(run_dir: Path, step: int, kind: str) -> Path:
    """The file of an incident."""
    return run_dir / FOLDER / f"step={step}.{kind}.json"


def write_incident(run_dir: Path, kind: str, step: int, **facts: Any) -> None:
    """Describes an incident. One that cannot be written is logged: a full disk does not end the run.

    Args:
        run_dir: the run folder.
        kind: what happened, in one word; part of the file's name.
        step: optimizer steps completed before the step in question.
        facts: further entries.
    """
    path = incident_path(run_dir, step, kind)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    entry = {"kind": kind, "optimizer_step": step, "time_unix_s": int(time.time()), **facts}
    try:
        path.parent.mkdir(exist_ok=True)
        if path.exists() or sum(1 for _ in path.parent.glob("step=*.json")) < MAX_FILES:
            partial.write_text(json.dumps(_plain(entry), indent=1, allow_nan=False) + "\n", encoding="utf-8")
            os.replace(partial, path)
    except OSError as error:
        log.error(f"{path} cannot be written: {error.strerror}")


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {_text(key): _plain(item) for key, item in list(value.items())[:MAX_ITEMS]}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value[:MAX_ITEMS]]
    return _text(value)


def _text(value: Any) -> str:
    return for_terminal(str(value)).replace("\n", "\\n").replace("\t", "\\t")[:MAX_TEXT]
