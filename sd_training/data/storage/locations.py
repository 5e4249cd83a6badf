"""Where a file is: a local path or a URL, how it appears in messages, and listings of local folders.

A local folder that cannot be listed is an error, because leaving it out would give a smaller data set; `os.walk` and
`glob` skip such folders silently.
"""

import os
import re
from collections.abc import Iterator
from urllib.parse import unquote

from sd_training.errors import ConfigError, DataError

REMOTE = ("s3", "gs", "http", "https")
"""Protocols that are read besides local paths and `file://`."""
PIPE, HUB = "pipe:", "hf://"
"""Start of an entry of `dataset.params.path` that is a shell command, or a data set of the Hugging Face hub."""
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.:-]*)://")


def protocol_of(location: str) -> str:
    """One of `REMOTE`, or an empty string for a local file.

    Raises:
        ConfigError: any other protocol, also chains such as `simplecache::s3://`.
    """
    found = _SCHEME.match(location)
    name = found[1].lower() if found else "file"
    if name != "file" and name not in REMOTE:
        raise ConfigError(
            f"dataset.params.path: '{shown(location)}' has the protocol '{name}', which is not read; "
            "use a local path, s3://, gs://, http:// or https://"
        )
    return "" if name == "file" else name


def is_remote(location: str) -> bool:
    """Whether a file is read over the network. Raises ConfigError as `protocol_of` does."""
    return protocol_of(location) != ""


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


def unreadable(error: OSError) -> DataError:
    """The error about a folder or file that cannot be read."""
    return DataError(
        f"dataset.params.path: '{error.filename}' cannot be read: {error.strerror}; make it readable, or name what "
        "is beside it"
    )


def entries_of(folder: str) -> list[os.DirEntry[str]]:
    """The entries of a folder that are not hidden, sorted by name. Raises DataError when it cannot be listed."""
    try:
        with os.scandir(folder) as entries:
            return sorted((e for e in entries if not e.name.startswith(".")), key=lambda entry: entry.name)
    except OSError as error:
        raise unreadable(error) from error


def folders_below(root: str) -> Iterator[str]:
    """`root` and all folders below it, sorted, without hidden ones. Links are followed, each folder comes once.

    Raises:
        DataError: a folder cannot be listed.
    """

    def stop(error: OSError) -> None:
        raise unreadable(error) from error

    seen: set[str] = set()
    for folder, below, _ in os.walk(root, followlinks=True, onerror=stop):
        real = os.path.realpath(folder)  # finds loops of links
        below[:] = [] if real in seen else sorted(name for name in below if not name.startswith("."))
        if real not in seen:
            seen.add(real)
            yield folder
