"""Where a file is: a local path or a URL, how it appears in messages; local files and listings of local folders.

`files` makes a local file of every kind of location: remote files and outputs of commands are copied first.

A local folder that cannot be listed is an error, because leaving it out would give a smaller data set; `os.walk` and
`glob` skip such folders silently.
"""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple
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


def cache_folder(name: str) -> Path:
    """`$XDG_CACHE_HOME/sd_training/NAME` or `~/.cache/sd_training/NAME`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "sd_training", name)


def entries_of(folder: str) -> list[os.DirEntry[str]]:
    """The entries of a folder that are not hidden, sorted by name. Raises DataError when it cannot be listed."""
    try:
        with os.scandir(folder) as entries:
            return sorted((e for e in entries if not e.name.startswith(".")), key=lambda entry: entry.name)
    except OSError as error:
        raise DataError(
            f"dataset.params.path: '{error.filename}' cannot be read: {error.strerror}; make it readable, or name what "
            "is beside it"
        ) from error


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether an entry is a folder or a link to one; not where a link leads to itself."""
    with suppress(OSError):
        return entry.is_dir()
    return False


def folders_below(root: str, seen: set[str] | None = None) -> Iterator[str]:
    """`root` and all folders below it, sorted, without hidden ones. Links are followed, each folder comes once.

    Raises:
        DataError: a folder cannot be listed.
    """
    seen, real = set() if seen is None else seen, os.path.realpath(root)  # finds loops of links
    if real not in seen:
        seen.add(real)
        yield root
        for entry in entries_of(root):
            if is_folder(entry):
                yield from folders_below(entry.path, seen)


# --- Local files ---


class FileMissing(DataError):
    """There is no such file, or it may not be read: trying again does not help."""


@dataclass(frozen=True)
class Access:
    """How remote files are read. Small and picklable: it is sent to other processes."""

    cache_dir: Path | None = None
    """Folder of the cache that processes share; None: `$XDG_CACHE_HOME/sd_training/shards` or
    `~/.cache/sd_training/shards`."""
    cache_gib: float = 100.0
    """Largest size of the cache [GiB]."""
    num_retries: int = 8
    """Attempts after the first [count]."""
    timeout_s: float = 60.0
    """Longest wait for an answer [s]."""


class FileState(NamedTuple):
    """Size and version of a file at one time."""

    location: str
    """Path or URL."""
    size: int
    """[bytes]."""
    version: str
    """Modification time [ns] of a local file; ETag, generation or modification time of a remote one, empty when the
    server sends none of these; SHA-256 of a command's output."""


class ByteFile:
    """An open file.

    Args:
        path: of the file.
        location: its name in messages; None: its path.

    Raises:
        FileMissing, DataError: it cannot be opened.
    """

    def __init__(self, path: str | Path, location: str | None = None) -> None:
        self.location = str(path) if location is None else location
        try:
            self.stream: BinaryIO = open(path, "rb")  # noqa: SIM115  # until `close`
        except OSError as error:
            cannot_help = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)
            kind = FileMissing if isinstance(error, cannot_help) else DataError
            raise kind(f"'{shown(self.location)}' cannot be read: {error.strerror}") from error
        status = os.fstat(self.stream.fileno())
        self.size, self.version = status.st_size, str(status.st_mtime_ns)

    def pread(self, length: int, offset: int) -> bytes:
        """Exactly `length` bytes from `offset`. Raises DataError, which names the file, when there are fewer."""
        data = b""
        try:
            while len(data) < length:  # one call reads at most 2 GiB, and less when a signal arrives
                piece = os.pread(self.stream.fileno(), length - len(data), offset + len(data))
                if not piece:
                    raise DataError(
                        f"'{shown(self.location)}' has {self.size} bytes, {length} from {offset} were expected; it is "
                        "truncated or has changed"
                    )
                data += piece
        except OSError as error:
            raise DataError(f"'{shown(self.location)}' cannot be read at byte {offset}: {error.strerror}") from error
        return data

    def close(self) -> None:
        """Nothing may be read afterwards."""
        self.stream.close()


def has_changed(location: str) -> DataError:
    """The error about a file that differs from its indexed state."""
    return DataError(f"'{shown(location)}' has changed since it was indexed; start again to index it anew")
