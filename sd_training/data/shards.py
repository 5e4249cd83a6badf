"""`dataset.params.path` → the list of shard files."""

import glob
import os
import re
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import braceexpand

from sd_training.errors import DataError
from sd_training.rank_log import get_logger

log = get_logger(__name__)

MAX_SHARDS = 1_000_000
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")


def expand_shards(path: str | Sequence[str]) -> list[Path]:
    """Expands a file, folder (its `*.tar`, sorted), glob, brace pattern such as `{000..999}`, or a list of these.

    Returns:
        Absolute paths in the order written, each once.

    Raises:
        DataError: a file is missing, a pattern matches nothing, or the path is not on a local file system.
    """
    written = [path] if isinstance(path, str) else list(path)
    if not written:
        raise DataError("dataset.params.path: the list is empty; name at least one shard")
    found = [shard for entry in written for shard in _expand(entry)]
    unique = list(dict.fromkeys(found))
    if len(unique) < len(found):
        log.info("dataset.params.path names %d shards more than once; each is read once", len(found) - len(unique))
    return unique


def _expand(entry: str) -> list[Path]:
    _refuse_remote(entry)
    local = os.path.abspath(os.path.expanduser(entry))
    if os.path.exists(local):
        return _existing(local)
    shards: list[Path] = []
    missing: list[str] = []
    for name in _braces(entry, local):
        matches = sorted(glob.glob(name)) if glob.has_magic(name) and not os.path.exists(name) else [name]
        if not matches or not os.path.exists(matches[0]):
            missing.append(name)
            continue
        shards.extend(shard for match in matches for shard in _existing(match))
    if missing:
        raise DataError(_missing_message(entry, missing, len(shards)))
    return shards


def _existing(path: str) -> list[Path]:
    if not os.path.isdir(path):
        return [Path(path)]
    shards = sorted(Path(path).glob("*.tar"))
    if not shards:
        raise DataError(f"dataset.params.path: the folder '{path}' holds no *.tar file")
    return shards


def _braces(entry: str, local: str) -> list[str]:
    try:
        names = list(islice(braceexpand.braceexpand(local), MAX_SHARDS + 1))
    except ValueError:
        raise DataError(f"dataset.params.path: the braces of '{entry}' cannot be expanded; is one missing?") from None
    if len(names) > MAX_SHARDS:
        raise DataError(f"dataset.params.path: '{entry}' stands for more than {MAX_SHARDS:,} files")
    return names


def _missing_message(entry: str, missing: list[str], num_found: int) -> str:
    first = ", ".join(missing[:3]) + (", …" if len(missing) > 3 else "")
    if len(missing) == 1 and not num_found:
        what = "matches no file" if glob.has_magic(missing[0]) else "does not exist"
        return f"dataset.params.path: '{entry}' {what} (looked for {first})"
    if not num_found:
        return f"dataset.params.path: the pattern '{entry}' stands for {len(missing):,} files and none exists: {first}"
    return f"dataset.params.path: {len(missing):,} files of the pattern '{entry}' are missing: {first}"


def _refuse_remote(entry: str) -> None:
    if entry.startswith("pipe:"):
        raise DataError(f"dataset.params.path: '{entry}' is a shell command; shell pipes are not run, use local shards")
    if _URL.match(entry):
        raise DataError(f"dataset.params.path: '{entry}' is a URL; only local shards can be read, copy them to a disk")
