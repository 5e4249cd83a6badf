"""Where a file is: a local path or a URL, and how it may be shown in a message.

Folders and patterns on local disks. What cannot be listed is an error: it would be a smaller data set.

`os.walk` and `glob` leave out what they may not read.
"""

import glob
import os
import re
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from urllib.parse import unquote

from sd_training.errors import ConfigError, DataError

REMOTE = ("s3", "gs", "http", "https")
"""Protocols that are read besides local paths and `file://`."""
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.:-]*)://")
_URL_IN_TEXT = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"<>]+")


def protocol_of(location: str) -> str:
    """One of `REMOTE`, or an empty string for a local file.

    Raises:
        ConfigError: any other protocol, also chains such as `simplecache::s3://`.
    """
    found = _SCHEME.match(location)
    name = found[1].lower() if found else "file"
    if name in REMOTE:
        return name
    if name == "file":
        return ""
    raise ConfigError(
        f"dataset.params.path: '{shown(location)}' has the protocol '{name}', which is not read; "
        "use a local path, s3://, gs://, http:// or https://"
    )


def is_remote(location: str) -> bool:
    """Whether a file is read over the network. Raises ConfigError as `protocol_of` does."""
    return protocol_of(location) != ""


def is_listable(location: str) -> bool:
    """Whether a remote place can be asked for its files; web servers cannot."""
    return protocol_of(location) in ("s3", "gs")


def local_folders(paths: Sequence[str]) -> list[str]:
    """Absolute paths of folders of loose files.

    Raises:
        ConfigError: one is remote; a listing and a request per image would be slower than the training.
    """
    if remote := [path for path in paths if is_remote(path)]:
        raise ConfigError(
            f"dataset.params.path: '{shown(remote[0])}' is remote, and folders of loose files are read from local "
            "disks only; pack the folder with scripts/make_webdataset.py and use dataset.type=WebDataset"
        )
    return [local_path(path) for path in paths]


def local_path(location: str) -> str:
    """Absolute path of a local file, which may be written as `file:///path`."""
    if location[:7].lower() == "file://":
        location = unquote(location[7:])
    return os.path.abspath(os.path.expanduser(location))


def shown(location: str) -> str:
    """A location for messages: without user, password and query, where secrets are (signed links)."""
    scheme, separator, rest = location.partition("://")
    if not separator:
        return location
    if scheme not in ("s3", "gs"):  # there `?` and `#` are part of a key
        rest = re.split("[?#]", rest, maxsplit=1)[0]
    host, slash, path = rest.partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"


def without_secrets(text: str) -> str:
    """A library's message with every URL in it as `shown` gives it."""
    return _URL_IN_TEXT.sub(lambda found: shown(found[0]), text)


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
