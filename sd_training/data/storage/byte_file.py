"""Random access to the bytes of one file: the contract of every kind of file, and the local kind.

Reading is safe from several threads. `files` chooses the kind of a file, and has the remote one.
"""

import io
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, Protocol

from sd_training.data.storage.locations import shown
from sd_training.errors import DataError

READ_AHEAD_BYTES = 8 << 20
"""Bytes of a remote file that are fetched at once while it is read in small pieces."""


class FileMissing(DataError):
    """There is no such file, or it may not be read: trying again does not help."""


@dataclass(frozen=True)
class Access:
    """How remote files are read. Small and picklable: it is sent to other processes."""

    mode: Literal["range", "cache"] = "cache"
    """`range`: only the bytes that are asked for. `cache`: whole files, through a folder that processes share."""
    cache_dir: Path | None = None
    """Folder of the cache; None: `$XDG_CACHE_HOME/sd_training/shards` or `~/.cache/sd_training/shards`."""
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


class ByteFile(Protocol):
    """Random access to one file. Reading is safe from several threads."""

    size: int
    """[bytes]."""

    def pread(self, length: int, offset: int) -> bytes:
        """Exactly `length` bytes from `offset`. Raises DataError, which names the file, when there are fewer."""

    def close(self) -> None:
        """Frees what the file holds. Nothing may be read afterwards."""


class LocalFile:
    """A `ByteFile` on a local file system.

    Args:
        path: of the file.
        location: its name in messages; None: its path.

    Raises:
        FileMissing, DataError: it cannot be opened.
    """

    def __init__(self, path: str, location: str | None = None) -> None:
        self.location = path if location is None else location
        try:
            self._file = open(path, "rb", buffering=0)  # noqa: SIM115  # until `close`
        except OSError as error:
            cannot_help = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)
            kind = FileMissing if isinstance(error, cannot_help) else DataError
            raise kind(f"'{shown(self.location)}' cannot be read: {error.strerror}") from error
        status = os.fstat(self._file.fileno())
        self.size, self.version = status.st_size, str(status.st_mtime_ns)

    def pread(self, length: int, offset: int) -> bytes:
        """As `ByteFile.pread`."""
        data = b""
        try:
            while len(data) < length:  # one call reads at most 2 GiB, and less when a signal arrives
                piece = os.pread(self._file.fileno(), length - len(data), offset + len(data))
                if not piece:
                    raise is_short(self.location, self.size, length, offset)
                data += piece
        except OSError as error:
            raise DataError(f"'{shown(self.location)}' cannot be read at byte {offset}: {error.strerror}") from error
        return data

    def close(self) -> None:
        """As `ByteFile.close`."""
        self._file.close()


def is_short(location: str, size: int, length: int, offset: int) -> DataError:
    """The error about bytes that a file does not have."""
    return DataError(
        f"'{shown(location)}' has {size} bytes, {length} from {offset} were expected; it is truncated or has changed"
    )


def has_changed(location: str) -> DataError:
    """The error about a file that differs from its indexed state."""
    return DataError(f"'{shown(location)}' has changed since it was indexed; start again to index it anew")


class ReadAhead:
    """A `ByteFile` that fetches large blocks of another one, for one thread that reads it roughly in order. `close`
    leaves that one open."""

    def __init__(self, file: ByteFile, block_bytes: int = READ_AHEAD_BYTES) -> None:
        self.file, self.size = file, file.size
        self._near = seekable(file, buffer_size=block_bytes)

    def pread(self, length: int, offset: int) -> bytes:
        """As `ByteFile.pread`."""
        self._near.seek(offset)
        data = self._near.read(length)
        return data if len(data) == length else self.file.pread(length, offset)

    def close(self) -> None:
        """As `ByteFile.close`."""


def seekable(file: ByteFile, start: int = 0, length: int | None = None, buffer_size: int = 1 << 16) -> BinaryIO:
    """A file object over `file`, as `tarfile`, PIL and pyarrow want it. Closing it leaves `file` open.

    Args:
        start: first byte.
        length: number of bytes; None: up to the end.
        buffer_size: bytes read at once.
    """
    return io.BufferedReader(_View(file, start, file.size - start if length is None else length), buffer_size)


class _View(io.RawIOBase):
    def __init__(self, file: ByteFile, start: int, length: int) -> None:
        self._file, self._start, self._length, self._position = file, start, max(0, length), 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        position = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence] + offset
        if position < 0:
            raise ValueError(f"cannot seek to byte {position}")
        self._position = position
        return position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        target = memoryview(buffer).cast("B")
        count = max(0, min(len(target), self._length - self._position))
        if count:
            target[:count] = self._file.pread(count, self._start + self._position)
        self._position += count
        return count
