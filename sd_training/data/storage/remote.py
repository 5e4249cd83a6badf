"""Files at `s3://`, `gs://` and `http(s)://`, read through obstore.

Every answer is checked: its length against the request, its version against the indexed file. A transient failure is
retried `dataset.params.remote.num_retries` times. The retries are written here and obstore's are off, because its own
do not cover answers of a wrong length and would multiply with these.
"""

import os
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from glob import has_magic
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

from sd_training.data.storage.byte_file import Access, ByteFile, FileMissing, FileState, LocalFile, has_changed
from sd_training.data.storage.locations import protocol_of, shown
from sd_training.data.storage.object_store import FIRST_WAIT_S, LONGEST_WAIT_S, is_outage, open_store, reason_of
from sd_training.data.storage.shard_cache import shard_cache
from sd_training.errors import DataError, OutageError

PART_BYTES = 8 << 20
"""Bytes of a file that are downloaded with one request."""
_PARTS_AT_ONCE = 4
_UNSATISFIABLE = "416 Range Not Satisfiable"
T = TypeVar("T")


class _WrongLength(Exception):
    """A server sent fewer or more bytes than were asked for."""


class NoRanges(DataError):
    """A web server that sends whole files only."""


def remote_state(location: str, access: Access) -> FileState:
    """Size and version of a remote file; errors are those of `fetch`.

    One byte is requested: many web servers and all signed links refuse HEAD.
    """

    def look() -> FileState:
        store, path = open_store(location, 0, access.timeout_s)
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
    """Opens a remote file whose state is known. No request is made when the cache holds the file."""
    if access.mode == "range":
        return RangeFile(state, access)
    cache = shard_cache(access.cache_dir, access.cache_gib)
    key = "\n".join((state.location, str(state.size), state.version))

    def opened() -> LocalFile:
        return cache.open(
            key,
            lambda path: download(state, path, access),
            lambda path: LocalFile(str(path), state.location),
            state.size,
        )

    file = opened()
    if file.size == state.size:
        return file
    file.close()  # another program wrote to the folder
    cache.forget(key)
    return opened()


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
        NoRanges: the server sends whole files only.
        OutageError: the server cannot be reached or fails, after all retries.
        DataError: the file has changed, or another failure.
    """
    options: Any = {"range": (start, stop)}
    if state.version.startswith('"'):  # weak tags never match `If-Match` (RFC 9110, section 13.1.1)
        options["if_match"] = state.version

    def read() -> bytes:
        store, path = open_store(state.location, 0, access.timeout_s)
        answer = obstore.get(store, path, options=options)
        _check(answer.meta, state)
        data = bytes(answer.bytes())
        _check_length(len(data), stop - start)
        return data

    return _retrying(state.location, access, read)


def download(state: FileState, path: Path, access: Access) -> None:
    """Writes a remote file to `path`, several parts at a time; in one piece where the server does not send ranges.

    Raises:
        FileMissing, OutageError, DataError: as `fetch`.
        OSError: the disk is full.
    """

    def write_part(start: int) -> None:
        data = fetch(state, start, min(start + PART_BYTES, state.size), access)
        while data:
            written = os.pwrite(target.fileno(), data, start)
            data, start = data[written:], start + written

    def write_whole() -> None:
        store, name = open_store(state.location, 0, access.timeout_s)
        answer = obstore.get(store, name)
        _check(answer.meta, state)
        target.seek(0)
        written = sum(target.write(bytes(chunk)) for chunk in answer.stream(min_chunk_size=1 << 20))
        _check_length(written, state.size)

    with path.open("r+b") as target:
        try:
            with ThreadPoolExecutor(_PARTS_AT_ONCE) as pool:
                list(pool.map(write_part, range(0, state.size, PART_BYTES)))  # raises the first error
        except NoRanges:
            _retrying(state.location, access, write_whole)


def list_folder(location: str, access: Access, extensions: Sequence[str]) -> list[str] | None:
    """Sorted URLs of the files with these extensions in a remote folder, without hidden ones; None: not a folder."""
    if protocol_of(location) not in ("s3", "gs"):
        if location.endswith("/"):
            raise _not_listed(location)
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
        DataError: a web server, which does not list files; or as `fetch`: a failed listing is never taken for an empty
            one.
    """
    if protocol_of(pattern) not in ("s3", "gs"):
        raise _not_listed(pattern)
    root, path = _split(pattern)
    *folders, last = path.split("/")
    found = [""]
    for part in folders:
        if has_magic(part):
            below = [name for folder in found for name in _listed(root, folder, access)[1]]
            found = [f"{name}/" for name in below if fnmatchcase(name.rpartition("/")[2], part)]
        else:
            found = [f"{folder}{part}/" for folder in found]
    files = [name for folder in found for name in _listed(root, folder, access)[0]]
    return sorted(f"{root}/{name}" for name in files if fnmatchcase(name.rpartition("/")[2], last))


def _not_listed(location: str) -> DataError:
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
    store, _ = open_store(root, 0, access.timeout_s)
    prefix = folder.rstrip("/") or None
    found = _retrying(f"{root}/{folder}", access, lambda: obstore.list_with_delimiter(store, prefix))
    return [meta["path"] for meta in found["objects"]], [path.rstrip("/") for path in found["common_prefixes"]]


def _version(meta: Any) -> str:
    """ETag or modification time; empty where the server sends neither (obstore then gives the epoch)."""
    modified = meta["last_modified"]
    return meta.get("e_tag") or (str(modified) if modified.timestamp() else "")


def _check(meta: Any, state: FileState) -> None:
    if (meta["size"], _version(meta)) != (state.size, state.version):
        raise has_changed(state.location)


def _check_length(found: int, requested: int) -> None:
    if found != requested:
        raise _WrongLength(f"the answer has {found} bytes instead of {requested}")


def _retrying(location: str, access: Access, attempt: Callable[[], T]) -> T:
    """The result of `attempt`, called again after growing waits while its failures may be transient.

    Raises:
        FileMissing, NoRanges, OutageError, DataError: as `fetch`. Without their cause, which holds URLs with secrets.
        OSError: of the local disk.
    """
    failures = 0
    while True:
        try:
            return attempt()
        except (OSError, BaseError, _WrongLength) as error:
            if isinstance(error, OSError) and error.errno is not None:
                raise  # of the disk; obstore's errors have no number
            failures += 1
            transient = is_outage(error) or isinstance(error, _WrongLength) or "invalid list response" in str(error)
            if not transient or failures > access.num_retries:
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
        return NoRanges(f"the server of '{name}' sends no parts of files; set dataset.params.remote.mode=cache")
    attempts = f" after {failures} attempts" if failures > 1 else ""
    return (OutageError if is_outage(error) else DataError)(f"'{name}' cannot be read{attempts}: {reason}")
