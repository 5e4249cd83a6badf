"""Files at `s3://`, `gs://` and `http(s)://`, read through fsspec's file systems.

Every answer is checked: its length against what was asked for, its version against the known state. The libraries'
own retries are off where they can be, so that there is one policy (`retries`). Credentials, endpoints and proxies come
from the environment as these libraries read them.
"""

import os
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import fsspec.asyn

from sd_training.data.byte_files import Access, ByteFile, FileMissing, FileState, LocalFile
from sd_training.data.locations import protocol_of, shown
from sd_training.data.remote_stores import STORES, HttpStore, NoParts, Store
from sd_training.data.retries import ShortAnswer, retrying
from sd_training.data.shard_cache import shard_cache
from sd_training.errors import DataError

PART_BYTES = 8 << 20
"""Bytes of a file that are downloaded with one request."""
_PARTS_AT_ONCE = 4
_SLOWEST_BYTES_PER_S = 1 << 16
"""A transfer that is slower on the whole is given up and tried again."""
T = TypeVar("T")

_stores: dict[tuple[int, str, float], Store] = {}
_lock = threading.Lock()


def remote_state(location: str, access: Access) -> FileState:
    """As `byte_files.file_state`, of a URL."""

    def look() -> FileState:
        store = _store(location, access)
        size, version = _run(store, store.state, location, timeout_s=2 * access.timeout_s)
        return FileState(location, size, version)

    return retrying(location, access, look)


def open_remote(state: FileState, access: Access) -> ByteFile:
    """As `byte_files.open_bytes`, of a URL whose state is known. No request is made when the cache holds the file."""
    if access.mode == "range":
        return RangeFile(state, access)
    cache = shard_cache(access.cache_dir, access.cache_gib)
    key = "\n".join((state.location, str(state.size), state.version))

    def produce(path: Path) -> None:
        download(state, path, access)

    def opened(path: Path) -> LocalFile:
        try:
            return LocalFile(str(path), state.location)
        except FileMissing:  # deleted to make room; the cache gets it again
            raise FileNotFoundError(path) from None

    file = cache.open(key, produce, opened, state.size)
    if file.size == state.size:
        return file
    file.close()  # somebody wrote to the folder
    cache.forget(key)
    return cache.open(key, produce, opened, state.size)


class RangeFile:
    """A `ByteFile` that requests the bytes it is asked for. It holds nothing open, so it survives a fork."""

    def __init__(self, state: FileState, access: Access) -> None:
        self.state, self.access, self.size = state, access, state.size

    def pread(self, length: int, offset: int) -> bytes:
        """As `ByteFile.pread`."""
        if length < 0 or offset < 0 or offset + length > self.size:
            raise DataError(
                f"'{shown(self.state.location)}' has {self.size} bytes, {length} from {offset} were expected; "
                "it is truncated or has changed"
            )
        return fetch(self.state, offset, offset + length, self.access) if length else b""

    def close(self) -> None:
        """As `ByteFile.close`."""


def fetch(state: FileState, start: int, stop: int, access: Access) -> bytes:
    """Bytes `start` to `stop` of a remote file, exactly so many.

    Raises:
        FileMissing, DataError: as `retrying`; DataError also when the file has changed.
    """

    def read() -> bytes:
        store = _store(state.location, access)
        longest = access.timeout_s + (stop - start) / _SLOWEST_BYTES_PER_S
        data = _run(store, store.read, state, start, stop, timeout_s=longest)
        if len(data) != stop - start:
            raise ShortAnswer(f"the answer has {len(data)} bytes instead of {stop - start}")
        return data

    return retrying(state.location, access, read)


def download(state: FileState, path: Path, access: Access) -> None:
    """Writes a remote file to `path`, several parts at a time, each checked and retried on its own; all at once where
    the server does not send parts.

    Raises:
        FileMissing, DataError: as `fetch`.
        OSError: the disk is full.
    """
    try:
        _download_parts(state, path, access)
    except NoParts:
        retrying(state.location, access, lambda: _download_whole(state, path, access))


def _download_parts(state: FileState, path: Path, access: Access) -> None:
    with path.open("r+b") as target:

        def part(start: int) -> None:
            data = fetch(state, start, min(start + PART_BYTES, state.size), access)
            while data:
                written = os.pwrite(target.fileno(), data, start)
                data, start = data[written:], start + written

        starts = range(0, state.size, PART_BYTES)
        with ThreadPoolExecutor(min(_PARTS_AT_ONCE, max(1, len(starts)))) as pool:
            for _ in pool.map(part, starts):  # the first error is raised, and what has not begun is dropped
                pass


def _download_whole(state: FileState, path: Path, access: Access) -> None:
    store = _store(state.location, access)
    if not isinstance(store, HttpStore):
        raise TypeError("S3 and GCS send parts")
    longest = access.timeout_s + state.size / _SLOWEST_BYTES_PER_S
    length = _run(store, store.write_whole, state, path, timeout_s=longest)
    if length != state.size:
        raise ShortAnswer(f"the answer has {length} bytes instead of {state.size}")


def list_folder(location: str, access: Access, extensions: Sequence[str]) -> list[str] | None:
    """Sorted URLs of the files with these extensions in a remote folder, without hidden ones; None: it is no folder."""

    def look() -> list[str] | None:
        store = _store(location, access)
        return _run(store, store.listing, location)

    found = retrying(location, access, look)
    if found is None:
        return None
    shards = [url for url in found if url.lower().endswith(tuple(extensions))]
    return sorted(url for url in shards if not url.rpartition("/")[2].startswith("."))


def list_matches(pattern: str, access: Access) -> list[str]:
    """Sorted URLs of the files that a pattern with `*`, `?` or `[…]` matches."""

    def look() -> list[str]:
        store = _store(pattern, access)
        return _run(store, store.matches, pattern)

    try:
        return sorted(retrying(pattern, access, look))
    except FileMissing as error:
        if "does not exist" in str(error):
            return []
        raise


def _store(location: str, access: Access) -> Store:
    """The file system of a location, one per process: connections and event loops do not survive a fork."""
    protocol = protocol_of(location).replace("https", "http")
    key = (os.getpid(), protocol, access.timeout_s)
    with _lock:
        if key not in _stores:
            # Those of the parent stay in the table: closing them here would unregister the parent's sockets, because
            # the two processes share its epoll descriptor.
            _stores[key] = STORES[protocol](access)
        return _stores[key]


def _run(store: Store, action: Callable[..., Awaitable[T]], *args: object, timeout_s: float | None = None) -> T:
    result: T = fsspec.asyn.sync(store.file_system.loop, action, *args, timeout=timeout_s)
    return result


def _after_fork() -> None:
    """Locks that another thread of the parent held at the fork would never be released here."""
    global _lock
    _lock = threading.Lock()
    fsspec.asyn.reset_lock()


os.register_at_fork(after_in_child=_after_fork)
