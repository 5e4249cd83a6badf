"""Folders and patterns on local disks. What cannot be listed is an error: it would be a smaller data set.

`os.walk` and `glob` leave out what they may not read.
"""

import glob
import os
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase

from sd_training.errors import DataError


def unreadable(error: OSError) -> DataError:
    """The error about a folder or file that cannot be looked at."""
    return DataError(
        f"dataset.params.path: '{error.filename}' cannot be read: {error.strerror}; make it readable, or name what "
        "is beside it"
    )


def _raise(error: OSError) -> None:
    raise unreadable(error) from error


def folders_below(root: str, on_error: Callable[[OSError], None] = _raise) -> Iterator[str]:
    """`root` and all folders below it, sorted, without hidden ones. Links are followed, each folder comes once.

    Args:
        root: where to begin.
        on_error: takes what a folder that cannot be listed raises; the default ends the walk.

    Raises:
        DataError: a folder cannot be listed.
    """
    seen: set[str] = set()
    for folder, below, _ in os.walk(root, followlinks=True, onerror=on_error):
        real = os.path.realpath(folder)  # tells loops of links
        below[:] = [] if real in seen else sorted(name for name in below if not name.startswith("."))
        if real not in seen:
            seen.add(real)
            yield folder


def entries_of(folder: str) -> list[os.DirEntry[str]]:
    """What lies directly in a folder, by name, without hidden files.

    Raises:
        DataError: the folder cannot be listed.
    """
    try:
        with os.scandir(folder) as entries:
            return sorted((entry for entry in entries if not entry.name.startswith(".")), key=lambda entry: entry.name)
    except OSError as error:
        raise unreadable(error) from error


def exists(path: str) -> bool:
    """As `os.path.exists`, which takes what may not be looked at for missing.

    Raises:
        DataError: a folder on the way to it cannot be entered.
    """
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise unreadable(error) from error
    return True


def expand(pattern: str) -> list[str]:
    """Sorted paths of the files and folders that an absolute pattern matches; `*` matches no slash and no leading dot.

    Raises:
        DataError: a folder that has to be listed cannot be.
    """
    found = ["/"]
    for part in pattern.strip("/").split("/"):
        if glob.has_magic(part):
            found = [os.path.join(folder, name) for folder in found for name in _matching(folder, part)]
        else:
            found = [os.path.join(folder, part) for folder in found]
    return sorted(filter(exists, found))


def _matching(folder: str, part: str) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise unreadable(error) from error
    return [name for name in names if fnmatchcase(name, part) and (part.startswith(".") or not name.startswith("."))]
