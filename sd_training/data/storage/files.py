"""Random access to the bytes of a file, local or remote.

Large reads for a file that is read in small pieces from front to back, as a remote tar file is when indexed.
"""

import io
import os
import stat
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal, Protocol

from sd_training.data.storage.locations import is_remote, local_path, shown
from sd_training.errors import DataError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


class FileMissing(DataError):
    """There is no such file, or it may not be read: asking again does not help."""


class ByteFile(Protocol):
    """Random access to one file. Reading is safe from several threads."""

    size: int
    """[bytes]."""

    def pread(self, length: int, offset: int) -> bytes:
        """Exactly `length` bytes from `offset`. Raises DataError, which names the file, when there are fewer."""

    def close(self) -> None:
        """Frees what the file holds. Nothing may be read afterwards."""


@dataclass(frozen=True)
class Access:
    """How remote files are read. Small and picklable: it travels into other processes."""

    mode: Literal["range", "cache"] = "cache"
    """`range`: only the bytes that are asked for. `cache`: whole files, through a folder that processes share."""
    cache_dir: Path | None = None
    """Folder of the cache; None: `$XDG_CACHE_HOME/sd_training/shards` or `~/.cache/sd_training/shards`."""
    cache_gib: float = 100.0
    """Most that the cache holds [GiB]."""
    num_retries: int = 8
    """Attempts after the first [count]."""
    timeout_s: float = 60.0
    """Longest wait for an answer [s]."""


@dataclass(frozen=True)
class FileState:
    """A file at the time it was looked at."""

    location: str
    """Path or URL."""
    size: int
    """[bytes]."""
    version: str
    """Modification time [ns] of a local file; ETag, generation or modification time of a remote one; empty when the
    server tells none of these."""


def file_state(location: str, access: Access) -> FileState:
    """Looks at a file.

    Raises:
        FileMissing: it does not exist, is not a file, or may not be read.
        DataError: it cannot be reached, after all retries.
        ConfigError: its protocol is unknown or not installed.
    """
    if location.startswith("pipe:"):
        from sd_training.data.storage.pipe import pipe_state  # stands on this module

        return pipe_state(location, access)
    if is_remote(location):
        from sd_training.data.storage.remote import remote_state  # local runs need no network libraries

        return remote_state(location, access)
    try:
        status = os.stat(local_path(location))
    except OSError as error:
        raise _unreadable(location, error) from error
    if stat.S_ISDIR(status.st_mode):
        raise FileMissing(f"'{shown(location)}' is a folder, a file was expected")
    return FileState(location, status.st_size, str(status.st_mtime_ns))


def find_state(location: str, access: Access) -> FileState | None:
    """As `file_state`, for a file that need not be there: None when it is missing or forbidden. (S3 answers
    "forbidden" for what is missing to those who may not list the bucket.)"""
    try:
        return file_state(location, access)
    except FileMissing:
        return None


def open_bytes(file: str | FileState, access: Access) -> ByteFile:
    """Opens a file.

    Args:
        file: path or URL; or its state, which saves a request for remote files and makes sure of the content.
        access: how remote files are read.

    Raises:
        FileMissing, DataError, ConfigError: as `file_state`; DataError also when the file is not in the given state.
    """
    location = file if isinstance(file, str) else file.location
    if location.startswith("pipe:"):
        from sd_training.data.storage.pipe import open_pipe, pipe_state  # stands on this module

        return open_pipe(pipe_state(file, access) if isinstance(file, str) else file, access)
    if not is_remote(location):
        opened = LocalFile(local_path(location), location)
        if isinstance(file, FileState) and (opened.size, opened.version) != (file.size, file.version):
            opened.close()
            raise has_changed(location)
        return opened
    from sd_training.data.storage.remote import open_remote  # local runs need no network libraries

    return open_remote(file if isinstance(file, FileState) else file_state(file, access), access)


def has_changed(location: str) -> DataError:
    """The error about a file that is not in its known state any more."""
    return DataError(f"'{shown(location)}' has changed since it was indexed; start again to index it anew")


class LocalFile:
    """A `ByteFile` on a local file system.

    Args:
        path: of the file.
        location: what it is called in messages; None: its path.
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
        try:
            data = os.pread(self._descriptor, length, offset)
            if len(data) == length:
                return data
            return self._rest(data, length, offset)
        except OSError as error:
            reason = error.strerror
        raise DataError(f"'{shown(self.location)}' cannot be read at byte {offset}: {reason}")

    def _rest(self, data: bytes, length: int, offset: int) -> bytes:
        """One call reads at most 2 GiB, and less when a signal comes."""
        while len(data) < length:
            piece = os.pread(self._descriptor, length - len(data), offset + len(data))
            if not piece:
                raise DataError(
                    f"'{shown(self.location)}' ends after {offset + len(data)} bytes, "
                    f"{length} from {offset} were expected; it is truncated or has changed"
                )
            data += piece
        return data

    def close(self) -> None:
        """As `ByteFile.close`; a second time does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _unreadable(location: str, error: OSError) -> DataError:
    text = f"'{shown(location)}' cannot be read: {error.strerror}"
    missing = isinstance(error, (FileNotFoundError, NotADirectoryError, PermissionError))
    return FileMissing(text) if missing else DataError(text)


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
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise ValueError(f"cannot seek to byte {base + offset}")
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: "WriteableBuffer") -> int:
        target = memoryview(buffer).cast("B")
        count = max(0, min(len(target), self._length - self._position))
        if count:
            target[:count] = self._file.pread(count, self._start + self._position)
        self._position += count
        return count


BLOCK_BYTES = 8 << 20
_BLOCKS_KEPT = 4


class ReadAhead:
    """A `ByteFile` that fetches whole blocks of another one and keeps the last few."""

    def __init__(self, file: ByteFile, block_bytes: int = BLOCK_BYTES) -> None:
        self.file, self.size, self._block_bytes = file, file.size, block_bytes
        self._blocks: OrderedDict[int, bytes] = OrderedDict()

    def pread(self, length: int, offset: int) -> bytes:
        """`length` bytes from `offset`; errors are the file's."""
        if offset < 0 or length > self._block_bytes or offset + length > self.size:
            return self.file.pread(length, offset)
        parts = []
        while length > 0:
            number, start = divmod(offset, self._block_bytes)
            parts.append(self._block(number)[start : start + length])
            length, offset = length - len(parts[-1]), offset + len(parts[-1])
        return b"".join(parts)

    def close(self) -> None:
        """The file is closed by who opened it."""

    def _block(self, number: int) -> bytes:
        if number not in self._blocks:
            start = number * self._block_bytes
            self._blocks[number] = self.file.pread(min(self._block_bytes, self.size - start), start)
            if len(self._blocks) > _BLOCKS_KEPT:
                self._blocks.popitem(last=False)
        self._blocks.move_to_end(number)
        return self._blocks[number]
