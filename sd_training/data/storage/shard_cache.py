"""A folder of bounded size that all processes of a machine share, for files that are costly to get.

One file per key. Each file is made as `<name>.partial`, which its maker locks, so that only one process makes it, and
then renamed: a file without that ending is complete. The least recently used files are deleted to make room; processes
that have such a file open can go on reading it. Files that are being made count, and are not deleted: together they may
take the folder over its limit. A crash leaves partial files without a lock, which the next process removes.
"""

import fcntl
import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from sd_training.data.storage.byte_file import FileMissing
from sd_training.errors import DataError

GIB = 1 << 30
_REOPENED = 20
"""How often a file may be deleted between being found and being opened."""
_DATA, _PARTIAL = ".data", ".partial"
T = TypeVar("T")


class ShardCache:
    """The files of one folder.

    Args:
        folder: is made when it does not exist.
        max_gib: largest total size of the files in it [GiB].
    """

    def __init__(self, folder: Path, max_gib: float) -> None:
        self.folder, self.max_bytes = folder, int(max_gib * GIB)

    def get(self, key: str, produce: Callable[[Path], None], size: int | None = None) -> Path:
        """The file of a key, made when it is not there. It may be deleted at any time; `open` is safe against that.

        Args:
            key: any text; the same text must always mean the same bytes.
            produce: writes the file to the path it is given, where a file is that it must not replace by another one.
                Called by one process at a time.
            size: of the file, when it is known [bytes]. Room is then made beforehand; a file of another size is an
                error, and one that is in the cache is made anew.

        Raises:
            DataError: the file is larger than the whole cache, or the folder cannot be written.
        """
        stem = str(self.folder / hashlib.sha256(key.encode()).hexdigest()[:32])
        path, partial = Path(stem + _DATA), Path(stem + _PARTIAL)
        try:
            while not _found(path, size):
                self._check_size(size or 0)
                self.folder.mkdir(parents=True, exist_ok=True)
                with partial.open("ab") as locked:
                    fcntl.flock(locked, fcntl.LOCK_EX)
                    try:
                        # Who held the lock may have made the file, or failed and deleted this one.
                        if _is_at(locked.fileno(), partial) and not path.exists():
                            self._make(path, partial, produce, size)
                    finally:  # a process forked meanwhile has a copy of the descriptor: closing ours would not unlock
                        fcntl.flock(locked, fcntl.LOCK_UN)
        except OSError as error:
            raise DataError(f"the shard cache '{self.folder}' cannot be used: {error.strerror or error}") from error
        return path

    def open(
        self, key: str, produce: Callable[[Path], None], opener: Callable[[Path], T], size: int | None = None
    ) -> T:
        """What `opener` returns for the file of a key; called again when the file is deleted in between.

        Raises:
            DataError: as `get`, or the cache is so small that files are deleted as soon as they are made.
        """
        for _ in range(_REOPENED):
            path = self.get(key, produce, size)  # outside: what it reads may be missing itself
            with suppress(FileNotFoundError, FileMissing):
                return opener(path)
        raise DataError(f"the shard cache '{self.folder}' is too small: raise dataset.params.remote.cache_gib")

    def _make(self, path: Path, partial: Path, produce: Callable[[Path], None], size: int | None) -> None:
        """Makes the file; this process holds the lock of `partial`."""
        try:
            os.truncate(partial, size or 0)  # other processes then count it
            self._make_room()
            produce(partial)
            made = partial.stat().st_size
            if size is not None and made != size:
                raise DataError(f"a file for the shard cache has {made} bytes instead of {size}")
            self._check_size(made)
            self._make_room()
            partial.rename(path)
        except BaseException:  # once it is renamed, a file of this name is that of the next process
            partial.unlink(missing_ok=True)
            raise

    def _make_room(self) -> None:
        """Deletes what crashed processes left, and then files, least recently used first, until the rest fits."""
        complete, total = [], 0
        for entry in os.scandir(self.folder):
            with suppress(FileNotFoundError):
                status = entry.stat()
                if entry.name.endswith(_DATA):
                    complete.append((status.st_mtime_ns, status.st_size, entry.path))
                elif entry.name.endswith(_PARTIAL) and _is_left(Path(entry.path)):
                    continue
                total += status.st_size
        for _, size, path in sorted(complete):
            if total <= self.max_bytes:
                break
            Path(path).unlink(missing_ok=True)
            total -= size

    def _check_size(self, size: int) -> None:
        if size > self.max_bytes:
            raise DataError(
                f"a file of {size / GIB:.3g} GiB does not fit into the shard cache of {self.max_bytes / GIB:.3g} GiB; "
                "raise dataset.params.remote.cache_gib, or read remote shards with dataset.params.remote.mode=range"
            )


def shard_cache(cache_dir: Path | None, max_gib: float) -> ShardCache:
    """The shard cache that the options name; None is `$XDG_CACHE_HOME/sd_training/shards` or that below `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return ShardCache(cache_dir or Path(base) / "sd_training" / "shards", max_gib)


def _found(path: Path, size: int | None) -> bool:
    """Marks a file as used now. Returns whether it exists; one of a wrong size is deleted."""
    with suppress(FileNotFoundError):
        if size is None or path.stat().st_size == size:
            os.utime(path)
            return True
        path.unlink()
    return False


def _is_at(descriptor: int, path: Path) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), path.stat())
    return False


def _is_left(partial: Path) -> bool:
    """Deletes a partial file that no process has locked. Returns whether it did."""
    with partial.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        try:
            if is_left := _is_at(file.fileno(), partial):
                partial.unlink()
            return is_left
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)
