"""Random access to the bytes of one file: the contract of every kind of file, and the local kind.

Reading is safe from several threads. `files` chooses the kind of a file and has the remote one; outputs of commands are
in `pipe`.
"""

import io
import os
import stat
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol

from sd_training.data.storage.locations import local_path, shown
from sd_training.errors import DataError

READ_AHEAD_BYTES = 8 << 20
"""Bytes of a remote file that are fetched at once while it is read in small pieces."""
_BLOCKS_KEPT = 4


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


@dataclass(frozen=True)
class FileState:
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
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise _unreadable(self.location, error) from error
        status = os.fstat(self._descriptor)
        self.size, self.version = status.st_size, str(status.st_mtime_ns)

    def pread(self, length: int, offset: int) -> bytes:
        """As `ByteFile.pread`."""
        data = b""
        try:
            while len(data) < length:  # one call reads at most 2 GiB, and less when a signal arrives
                piece = os.pread(self._descriptor, length - len(data), offset + len(data))
                if not piece:
                    raise DataError(
                        f"'{shown(self.location)}' ends after {offset + len(data)} bytes, "
                        f"{length} from {offset} were expected; it is truncated or has changed"
                    )
                data += piece
        except OSError as error:
            raise DataError(f"'{shown(self.location)}' cannot be read at byte {offset}: {error.strerror}") from error
        return data

    def close(self) -> None:
        """As `ByteFile.close`; a second call does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def local_state(location: str) -> FileState:
    """Size and version of a local file. Raises FileMissing or DataError."""
    try:
        status = os.stat(local_path(location))
    except OSError as error:
        raise _unreadable(location, error) from error
    if stat.S_ISDIR(status.st_mode):
        raise FileMissing(f"'{shown(location)}' is a folder, a file was expected")
    return FileState(location, status.st_size, str(status.st_mtime_ns))


def has_changed(location: str) -> DataError:
    """The error about a file that differs from its indexed state."""
    return DataError(f"'{shown(location)}' has changed since it was indexed; start again to index it anew")


def _unreadable(location: str, error: OSError) -> DataError:
    missing = isinstance(error, (FileNotFoundError, NotADirectoryError, PermissionError))
    return (FileMissing if missing else DataError)(f"'{shown(location)}' cannot be read: {error.strerror}")


class ReadAhead:
    """A `ByteFile` that fetches whole blocks of another one and keeps the last few. `close` leaves that one open."""

    def __init__(self, file: ByteFile, block_bytes: int = READ_AHEAD_BYTES) -> None:
        self.file, self.size, self._block_bytes = file, file.size, block_bytes
        self._block = lru_cache(maxsize=_BLOCKS_KEPT)(self._fetch)

    def pread(self, length: int, offset: int) -> bytes:
        """As `ByteFile.pread`."""
        if offset < 0 or length > self._block_bytes or offset + length > self.size:
            return self.file.pread(length, offset)
        first, start = divmod(offset, self._block_bytes)
        last = (offset + length - 1) // self._block_bytes
        return b"".join(self._block(number) for number in range(first, last + 1))[start : start + length]

    def _fetch(self, number: int) -> bytes:
        start = number * self._block_bytes
        return self.file.pread(min(self._block_bytes, self.size - start), start)

    def close(self) -> None:
        """As `ByteFile.close`."""


def seekable(file: ByteFile, start: int = 0, length: int | None = None, buffer_size: int = 1 << 16) -> BinaryIO:
    """A file object over `file`, as `tarfile`, PIL and pyarrow want it. Closing it leaves `file` open.

    Args:
        start: first byte.
        length: number of bytes; None: up to the end.
        buffer_size: bytes read at once.
    """
    view = _View(file, start, file.size - start if length is None else length)
    return io.BufferedReader(view, buffer_size)


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
