"""Files at `s3://`, `gs://` and `http(s)://`.

Every answer is checked: its length against what was asked for, its version against the file that was indexed. A failure
that can pass is tried again, `dataset.params.remote.num_retries` times.
"""

import os
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

import obstore
from obstore.exceptions import (
    BaseError,
    NotSupportedError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import ObjectStore

from sd_training.data.storage.files import Access, ByteFile, FileMissing, FileState, LocalFile, has_changed
from sd_training.data.storage.locations import is_listable, shown
from sd_training.data.storage.object_store import FIRST_WAIT_S, LONGEST_WAIT_S, is_outage, open_store, reason_of
from sd_training.data.storage.shard_cache import shard_cache
from sd_training.errors import DataError, OutageError

PART_BYTES = 8 << 20
"""Bytes of a file that are downloaded with one request."""
_PARTS_AT_ONCE = 4
_MAGIC = frozenset("*?[")


_UNSATISFIABLE = "416 Range Not Satisfiable"
T = TypeVar("T")


class _ShortAnswer(Exception):
    """A server sent fewer or more bytes than were asked for."""


class NoParts(DataError):
    """A web server that sends whole files only."""


def remote_state(location: str, access: Access) -> FileState:
    """As `byte_files.file_state`, of a URL.

    One byte is asked for: many web servers and all signed links refuse HEAD.
    """

    def look() -> FileState:
        store, path = _store(location, access)
        try:
            meta = obstore.get(store, path, options={"range": (0, 1)}).meta
        except NotSupportedError:  # no ranges: the answer is the whole file, and its beginning is enough
            meta = obstore.get(store, path).meta
        except BaseError as error:
            if _UNSATISFIABLE in str(error):  # an empty file has no first byte
                return FileState(location, 0, "")
            raise
        return FileState(location, meta["size"], _version(meta))

    return _retrying(location, access, look)


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
    """A `ByteFile` that requests the bytes it is asked for."""

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
        FileMissing: it does not exist or may not be read.
        NoParts: the server sends whole files only.
        OutageError: the server cannot be reached or is not well, after all retries.
        DataError: the file has changed, or another failure.
    """
    options: Any = {"range": (start, stop), **_if_unchanged(state)}

    def read() -> bytes:
        store, path = _store(state.location, access)
        answer = obstore.get(store, path, options=options)
        _check(answer.meta, state)
        data = bytes(answer.bytes())
        if len(data) != stop - start:
            raise _ShortAnswer(f"the answer has {len(data)} bytes instead of {stop - start}")
        return data

    return _retrying(state.location, access, read)


def download(state: FileState, path: Path, access: Access) -> None:
    """Writes a remote file to `path`, several parts at a time; in one piece where the server does not send parts.

    Raises:
        FileMissing, OutageError, DataError: as `fetch`.
        OSError: the disk is full.
    """
    try:
        _download_parts(state, path, access)
    except NoParts:
        _download_whole(state, path, access)


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
    def write() -> None:
        store, name = _store(state.location, access)
        answer = obstore.get(store, name)
        _check(answer.meta, state)
        with path.open("r+b") as target:
            length = sum(target.write(bytes(chunk)) for chunk in answer.stream(min_chunk_size=1 << 20))
        if length != state.size:
            raise _ShortAnswer(f"the answer has {length} bytes instead of {state.size}")

    _retrying(state.location, access, write)


def list_folder(location: str, access: Access, extensions: Sequence[str]) -> list[str] | None:
    """Sorted URLs of the files with these extensions in a remote folder, without hidden ones; None: it is no folder."""
    if not is_listable(location):
        if location.endswith("/"):
            raise _unlisted(location)
        return None
    root, path = _split(location)
    files, folders = _listed(root, path, access)
    if not files and not folders:
        return None
    names = (name for name in files if name.lower().endswith(tuple(extensions)))
    return sorted(f"{root}/{name}" for name in names if not name.rpartition("/")[2].startswith("."))


def list_matches(pattern: str, access: Access) -> list[str]:
    """Sorted URLs of the files that a pattern with `*`, `?` or `[…]` matches; `*` matches no slash.

    Raises:
        DataError: a web server, which cannot be asked for its files; or as `fetch`: a listing that fails is never taken
            for an empty one.
    """
    if not is_listable(pattern):
        raise _unlisted(pattern)
    root, path = _split(pattern)
    parts = path.split("/")
    found = [""]
    for depth, part in enumerate(parts):
        is_last = depth == len(parts) - 1
        if _MAGIC.isdisjoint(part) and not is_last:
            found = [f"{folder}{part}/" for folder in found]
            continue
        listings = (_listed(root, folder, access)[0 if is_last else 1] for folder in found)
        ending = "" if is_last else "/"
        found = [f"{n}{ending}" for names in listings for n in names if fnmatchcase(n.rpartition("/")[2], part)]
    return sorted(f"{root}/{name}" for name in found)


def _unlisted(location: str) -> DataError:
    return DataError(
        f"dataset.params.path: '{shown(location)}': web servers do not list files; name them by braces, such as "
        "shards/{000..099}.tar, or by a list"
    )


def _split(location: str) -> tuple[str, str]:
    """`s3://bucket` and the path in it."""
    scheme, _, rest = location.partition("://")
    bucket, _, path = rest.partition("/")
    return f"{scheme}://{bucket}", path.strip("/")


def _listed(root: str, folder: str, access: Access) -> tuple[list[str], list[str]]:
    """Paths of the files and folders directly in a folder of a bucket; none where there is no such folder."""
    store, _ = _store(root, access)
    prefix = folder.rstrip("/") or None
    found = _retrying(f"{root}/{folder}", access, lambda: obstore.list_with_delimiter(store, prefix))
    return [meta["path"] for meta in found["objects"]], [path.rstrip("/") for path in found["common_prefixes"]]


def _version(meta: Any) -> str:
    """ETag or modification time; empty where the server tells neither (the epoch stands for none)."""
    modified = meta["last_modified"]
    return meta.get("e_tag") or (str(modified) if modified.timestamp() else "")


def _if_unchanged(state: FileState) -> dict[str, str]:
    """Weak tags never match `If-Match` (RFC 9110, section 13.1.1)."""
    return {"if_match": state.version} if state.version.startswith('"') else {}


def _check(meta: Any, state: FileState) -> None:
    if (meta["size"], _version(meta)) != (state.size, state.version):
        raise has_changed(state.location)


def _store(location: str, access: Access) -> tuple[ObjectStore, str]:
    """Without retries of its own, which would multiply with ours; those do not cover bodies that break off."""
    return open_store(location, 0, access.timeout_s)


def _retrying(location: str, access: Access, attempt: Callable[[], T]) -> T:
    """What `attempt` returns, called again after growing waits while it fails for reasons that can pass.

    Raises:
        FileMissing, NoParts, OutageError, DataError: as `fetch`. Without their cause, which holds URLs with secrets.
        OSError: of the local disk.
    """
    failures = 0
    while True:
        try:
            return attempt()
        except (OSError, BaseError, _ShortAnswer) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # of the disk; obstore's errors have no number
            failures += 1
            can_pass = is_outage(error) or isinstance(error, _ShortAnswer) or "invalid list response" in str(error)
            if not can_pass or failures > access.num_retries:
                raise _explained(location, error, failures) from None
        time.sleep(random.uniform(0.5, 1.0) * min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** (failures - 1)))


def _explained(location: str, error: Exception, failures: int) -> DataError:
    name, reason = shown(location), reason_of(error)
    if isinstance(error, FileNotFoundError):
        return FileMissing(f"'{name}' cannot be read: does not exist")
    if isinstance(error, (PermissionError, PermissionDeniedError, UnauthenticatedError)):
        return FileMissing(f"'{name}' cannot be read: not allowed: {reason}; are the credentials right?")
    if isinstance(error, PreconditionError) or _UNSATISFIABLE in str(error):
        return has_changed(location)
    if isinstance(error, NotSupportedError):
        return NoParts(f"the server of '{name}' sends no parts of files; set dataset.params.remote.mode=cache")
    attempts = f" after {failures} attempts" if failures > 1 else ""
    return (OutageError if is_outage(error) else DataError)(f"'{name}' cannot be read{attempts}: {reason}")
