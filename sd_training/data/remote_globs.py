"""Patterns on remote storage, folder by folder.

fsspec's own `glob` takes a listing that failed for an empty one (`_walk(on_error="omit")`, fsspec 2026.9): a server
that is busy for a moment would silently make the data set smaller. Here every failure is raised.
"""

from fnmatch import fnmatchcase
from typing import Any

_MAGIC = frozenset("*?[")


def has_magic(part: str) -> bool:
    """Whether a path has `*`, `?` or `[`."""
    return not _MAGIC.isdisjoint(part)


async def expand(file_system: Any, pattern: str) -> list[str]:
    """Names of the files that match, in any order.

    Args:
        file_system: an asynchronous fsspec file system.
        pattern: as the file system names files; `*` does not match a slash.

    Raises:
        Exception: whatever a listing raises, but for a folder that does not exist.
    """
    parts = pattern.split("/")
    first = next((i for i, part in enumerate(parts) if has_magic(part)), len(parts))
    found = ["/".join(parts[:first])]
    for depth in range(first, len(parts)):
        is_last = depth == len(parts) - 1
        if has_magic(parts[depth]) or is_last:
            kind = "file" if is_last else "directory"
            found = [name for folder in found for name in await _matching(file_system, folder, parts[depth], kind)]
        else:
            found = [f"{folder}/{parts[depth]}" for folder in found]
    return found


async def _matching(file_system: Any, folder: str, part: str, kind: str) -> list[str]:
    """Files or folders directly in `folder` whose name matches."""
    try:
        entries = await file_system._ls(f"{folder}/", detail=True)
    except FileNotFoundError:
        return []
    names = [entry["name"].rstrip("/") for entry in entries if entry["type"] == kind]
    return [name for name in names if fnmatchcase(name.rpartition("/")[2], part)]
