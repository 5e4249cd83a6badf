"""A folder of bounded size that all processes of a machine share, for files that are costly to get.

One file per key. Each file is made under a lock of its key, so that only one process makes it, as `<name>.partial`,
and then renamed: a file without that ending is complete. What was not used for longest is deleted to make room;
processes that have such a file open can go on reading it. A crash leaves nothing but partial files and free locks,
which the next process removes.
"""

import fcntl
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from sd_training.errors import DataError

GIB = 1 << 30
_WAIT_S = 0.05
"""Between looks at whether other processes have finished their files."""
_REOPENED = 20
"""How often a file may be deleted between being found and being opened."""
_DATA, _PARTIAL, _LOCK = ".data", ".partial", ".lock"
T = TypeVar("T")


_NO_CACHE = " or set dataset.params.remote.mode=range"
"""Helps where the files are copies of remote ones; what is made here (row groups, `pipe:`) is always kept."""


class ShardCache:
    """The files of one folder.

    Args:
        folder: is made when it does not exist.
        max_gib: most that the files in it take together [GiB].
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
        path = self._path(key, _DATA)
        try:
            if _touch(path):
                return path
            self._check_size(0 if size is None else size)
            self.folder.mkdir(parents=True, exist_ok=True)
            with _locked(self._path(key, _LOCK)):
                if not _touch(path):
                    self._make(key, produce, size)
        except OSError as error:
            raise DataError(f"the shard cache '{self.folder}' cannot be used: {error.strerror or error}") from error
        return path

    def open(
        self, key: str, produce: Callable[[Path], None], opener: Callable[[Path], T], size: int | None = None
    ) -> T:
        """What `opener` makes of the file of a key; called again when the file is deleted in between.

        Raises:
            DataError: as `get`, or the cache is so small that files are deleted as soon as they are made.
        """
        for _ in range(_REOPENED):
            try:
                return opener(self.get(key, produce, size))
            except FileNotFoundError:
                continue
        raise DataError(f"the shard cache '{self.folder}' is too small: raise dataset.params.remote.cache_gib")

    def forget(self, key: str) -> None:
        """Deletes the file of a key, because it is not what it should be."""
        self._path(key, _DATA).unlink(missing_ok=True)

    def _path(self, key: str, ending: str) -> Path:
        return self.folder / (hashlib.sha256(key.encode()).hexdigest()[:32] + ending)

    def _make(self, key: str, produce: Callable[[Path], None], size: int | None) -> None:
        """Makes the file; this process holds the lock of its key."""
        partial = self._path(key, _PARTIAL)
        self._reserve(partial, size)
        try:
            produce(partial)
            made = partial.stat().st_size
            if size is not None and made != size:
                raise DataError(f"a file for the shard cache has {made} bytes instead of {size}")
            self._check_size(made, "" if size is None else _NO_CACHE)
            with _locked(self.folder / f"evict{_LOCK}"):
                self._evict(made, partial)
                partial.rename(self._path(key, _DATA))
        finally:
            partial.unlink(missing_ok=True)

    def _reserve(self, partial: Path, size: int | None) -> None:
        """Makes room for `size` bytes, and puts an empty file of that size there: others then count it."""
        while True:
            with _locked(self.folder / f"evict{_LOCK}"):
                self._sweep()
                partial.write_bytes(b"")
                if self._evict(size or 0, partial) or size is None:
                    os.truncate(partial, size or 0)
                    return
            time.sleep(_WAIT_S)  # the rest belongs to files being made; each ends without waiting for room

    def _evict(self, needed: int, own: Path) -> bool:
        """Deletes files, those unused for longest first, until `needed` bytes fit. Whether they do then."""
        done, total = [], needed
        for entry in os.scandir(self.folder):
            if (status := _status(entry)) is None or entry.path == str(own):
                continue
            total += status.st_size
            if entry.name.endswith(_DATA):
                done.append((status.st_mtime_ns, status.st_size, entry.path))
        for _, size, path in sorted(done):
            if total <= self.max_bytes:
                break
            Path(path).unlink(missing_ok=True)
            total -= size
        return total <= self.max_bytes

    def _sweep(self) -> None:
        """Removes what crashed processes left: partial files and lock files that nobody holds."""
        for entry in os.scandir(self.folder):
            stem, ending = os.path.splitext(entry.path)
            if ending in (_PARTIAL, _LOCK) and entry.name != f"evict{_LOCK}":
                with _locked(Path(stem + _LOCK), wait=False) as is_mine:
                    if is_mine:
                        Path(stem + _PARTIAL).unlink(missing_ok=True)

    def _check_size(self, size: int, other_remedy: str = _NO_CACHE) -> None:
        if size > self.max_bytes:
            raise DataError(
                f"a file of {size / GIB:.3g} GiB does not fit into the shard cache of {self.max_bytes / GIB:.3g} GiB; "
                f"raise dataset.params.remote.cache_gib{other_remedy}"
            )


def shard_cache(cache_dir: Path | None, max_gib: float) -> ShardCache:
    """The shard cache that the options name; None is `$XDG_CACHE_HOME/sd_training/shards` or that below `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return ShardCache(cache_dir or Path(base) / "sd_training" / "shards", max_gib)


@contextmanager
def _locked(path: Path, wait: bool = True) -> Iterator[bool]:
    """Holds a lock file, which is deleted afterwards. Yields False when somebody else holds it and `wait` is off."""
    descriptor = _acquire(path, wait)
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            path.unlink(missing_ok=True)
            # Unlocked by name: a process forked meanwhile has a copy of the descriptor, and closing ours would not do.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


def _acquire(path: Path, wait: bool) -> int | None:
    """Descriptor of the locked file. flock, unlike POSIX locks, also keeps threads of one process apart."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _same_file(descriptor, path):  # else its holder deleted it while we waited, and others lock a new one
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            return None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _touch(path: Path) -> bool:
    """Marks a file as used now. Whether it is there."""
    try:
        os.utime(path)
    except FileNotFoundError:
        return False
    return True


def _status(entry: "os.DirEntry[str]") -> os.stat_result | None:
    try:
        return entry.stat()
    except FileNotFoundError:
        return None
