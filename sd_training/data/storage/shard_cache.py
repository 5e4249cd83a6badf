"""A folder of bounded size that all processes of a machine share, for files that are costly to get.

One file per key. Each file is made under a lock of its key, so that only one process makes it, as `<name>.partial`,
and then renamed: a file without that ending is complete. The least recently used files are deleted to make room;
processes that have such a file open can go on reading it. A crash leaves only partial files and free locks, which the
next process removes.
"""

import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from sd_training.data.storage.byte_file import FileMissing
from sd_training.errors import DataError

GIB = 1 << 30
_WAIT_S = 0.05
"""Between checks whether other processes have finished their files."""
_REOPENED = 20
"""How often a file may be deleted between being found and being opened."""
_DATA, _PARTIAL, _LOCK, _EVICT = ".data", ".partial", ".lock", "evict.lock"
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
            produce: writes the file to the path it is given, where an empty file is. Called by one process at a time.
            size: of the file, when it is known [bytes]. Room is then made beforehand, the given file has this size and
                should be overwritten in place, and a file of another size is an error.

        Raises:
            DataError: the file is larger than the whole cache, or the folder cannot be written.
        """
        stem = str(self.folder / hashlib.sha256(key.encode()).hexdigest()[:32])
        path = Path(stem + _DATA)
        try:
            if not _touch(path):
                self._check_size(size or 0)
                self.folder.mkdir(parents=True, exist_ok=True)
                with _locked(Path(stem + _LOCK)):
                    if not _touch(path):
                        self._make(path, Path(stem + _PARTIAL), produce, size)
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
        """Makes the file; this process holds the lock of its key."""
        self._reserve(partial, size)
        try:
            produce(partial)
            made = partial.stat().st_size
            if size is not None and made != size:
                raise DataError(f"a file for the shard cache has {made} bytes instead of {size}")
            self._check_size(made)
            with _locked(self.folder / _EVICT):
                self._evict(made, partial)
                partial.rename(path)
        finally:
            partial.unlink(missing_ok=True)

    def _reserve(self, partial: Path, size: int | None) -> None:
        """Makes room for `size` bytes, and puts an empty file of that size there, which other processes count."""
        while True:
            with _locked(self.folder / _EVICT):
                self._sweep()
                partial.write_bytes(b"")
                if self._evict(size or 0, partial) or size is None:
                    os.truncate(partial, size or 0)
                    return
            time.sleep(_WAIT_S)  # the rest belongs to files being made; each ends without waiting for room

    def _evict(self, needed: int, own: Path) -> bool:
        """Deletes files, least recently used first, until `needed` bytes fit. Returns whether they fit then."""
        complete, total = [], needed
        for entry in os.scandir(self.folder):
            with suppress(FileNotFoundError):
                status = entry.stat()
                total += status.st_size if entry.path != str(own) else 0
                if entry.name.endswith(_DATA):
                    complete.append((status.st_mtime_ns, status.st_size, entry.path))
        for _, size, path in sorted(complete):
            if total <= self.max_bytes:
                break
            Path(path).unlink(missing_ok=True)
            total -= size
        return total <= self.max_bytes

    def _sweep(self) -> None:
        """Removes what crashed processes left: partial files and lock files that no process holds."""
        for entry in os.scandir(self.folder):
            stem, ending = os.path.splitext(entry.path)
            if ending in (_PARTIAL, _LOCK) and entry.name != _EVICT:
                with _locked(Path(stem + _LOCK), wait=False) as is_mine:
                    if is_mine:
                        Path(stem + _PARTIAL).unlink(missing_ok=True)

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


@contextmanager
def _locked(path: Path, wait: bool = True) -> Iterator[bool]:
    """Holds a lock file, which is deleted afterwards. Yields False when another process holds it and `wait` is off.

    flock, unlike POSIX locks, also keeps threads of one process apart.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(descriptor), path.stat()):
                    break
        except BlockingIOError:
            os.close(descriptor)
            yield False
            return
        os.close(descriptor)  # its holder deleted this lock file, and others lock a new one
    try:
        yield True
    finally:
        path.unlink(missing_ok=True)
        # Unlocked by name: a process forked meanwhile has a copy of the descriptor, and closing ours would not do.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def _touch(path: Path) -> bool:
    """Marks a file as used now. Returns whether it exists."""
    with suppress(FileNotFoundError):
        os.utime(path)
        return True
    return False
