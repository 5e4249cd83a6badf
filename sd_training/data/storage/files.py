"""How a file is read, chosen by its location: a local file, an object or web server's file, or the output of a command.

Remote files are read through obstore. Every answer is checked: its length against the request, its version against the
indexed file. A transient failure is retried `dataset.params.remote.num_retries` times. The retries are written here and
obstore's are off, because its own do not cover answers of a wrong length and would multiply with these.

The output of a `pipe:` command is kept as a file in the shard cache, and then indexed and read at random like any other
shard. Commands run only where `dataset.params.allow_pipe` permits them (`data/sources/choose.py`): they are code, with
the rights of the user who trains.
"""

import hashlib
import os
import random
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from fnmatch import fnmatchcase
from glob import has_magic
from pathlib import Path
from typing import Any, TypeVar

import obstore
from obstore import exceptions

from sd_training.data.storage.byte_file import (
    Access,
    ByteFile,
    FileMissing,
    FileState,
    LocalFile,
    has_changed,
    is_short,
)
from sd_training.data.storage.locations import PIPE, entries_of, is_remote, local_path, protocol_of, shown
from sd_training.data.storage.object_store import FIRST_WAIT_S, LONGEST_WAIT_S, is_outage, open_store, reason_of
from sd_training.data.storage.shard_cache import shard_cache
from sd_training.errors import DataError, OutageError

_CHUNK_BYTES = 1 << 20
_STATES_AT_ONCE = 16
_UNSATISFIABLE = "416 Range Not Satisfiable"
_SHELL = ("bash", "-o", "pipefail", "-c")
"""Without pipefail `aws s3 cp … - | zcat` succeeds when the first command fails (webdataset issue 411)."""
T = TypeVar("T")


def file_state(location: str, access: Access) -> FileState:
    """Size and version of a file.

    Raises:
        FileMissing: it does not exist, is not a file, or may not be read.
        OutageError: its server cannot be reached or fails, after all retries.
        DataError: another failure, such as that of a command.
        ConfigError: its protocol is unknown.
    """
    if location.startswith(PIPE):
        return _piped(location, access, lambda path: _output_state(location, path))
    if is_remote(location):
        return _remote_state(location, access)
    with closing(LocalFile(local_path(location), location)) as file:
        return FileState(location, file.size, file.version)


def file_states(locations: Sequence[str], access: Access) -> list[FileState]:
    """As `file_state`, of several files at once."""
    with ThreadPoolExecutor(_STATES_AT_ONCE) as pool:
        return list(pool.map(lambda location: file_state(location, access), locations))


def open_bytes(file: str | FileState, access: Access) -> ByteFile:
    """Opens a file.

    Args:
        file: path or URL; or its state, which saves a request for remote files and is compared with the content.
        access: how remote files are read.

    Raises:
        FileMissing, OutageError, DataError, ConfigError: as `file_state`; DataError also when the file is not in the
            given state.
    """
    location = file if isinstance(file, str) else file.location
    if location.startswith(PIPE) or is_remote(location):
        state = file_state(location, access) if isinstance(file, str) else file
        if location.startswith(PIPE):
            return _piped(location, access, lambda path: LocalFile(str(path), location), state)
        return RangeFile(state, access) if access.mode == "range" else _cached(state, access)
    opened = LocalFile(local_path(location), location)
    if isinstance(file, FileState) and (opened.size, opened.version) != (file.size, file.version):
        opened.close()
        raise has_changed(location)
    return opened


def _piped(location: str, access: Access, opener: Callable[[Path], T], state: FileState | None = None) -> T:
    """The output of a command, which runs unless its output is cached.

    Raises:
        DataError: the command failed, or its output differs from `state`, the indexed one.
    """

    def run(path: Path) -> None:
        with path.open("wb") as output:
            command = (*_SHELL, location.removeprefix(PIPE))
            done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.PIPE)
        if done.returncode:
            last_line = " ".join(done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:])
            raise DataError(f"'{shown(location)}' failed with exit status {done.returncode}: {last_line}")
        if state is not None and _output_state(location, path) != state:
            raise DataError(f"'{location}' writes other bytes than when it was indexed; start again to index it anew")

    cache = shard_cache(access.cache_dir, access.cache_gib)
    return cache.open(location, run, opener, None if state is None else state.size)


def _output_state(location: str, path: Path) -> FileState:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return FileState(location, file.tell(), digest)


class RangeFile:
    """A `ByteFile` that requests the bytes it is asked for."""

    def __init__(self, state: FileState, access: Access) -> None:
        self.state, self.access, self.size = state, access, state.size

    def pread(self, length: int, offset: int) -> bytes:
        """As `ByteFile.pread`. Raises OutageError, or DataError as for a server that does not send ranges."""
        if length < 0 or offset < 0 or offset + length > self.size:
            raise is_short(self.state.location, self.size, length, offset)
        options: Any = {"range": (offset, offset + length)}
        if self.state.version.startswith('"'):  # weak tags never match `If-Match` (RFC 9110, section 13.1.1)
            options["if_match"] = self.state.version

        def read() -> bytes:
            data = bytes(_get(self.state, self.access, options).bytes())
            _check_length(len(data), length)
            return data

        return _retrying(self.state.location, self.access, read) if length else b""

    def close(self) -> None:
        """As `ByteFile.close`."""


def _cached(state: FileState, access: Access) -> LocalFile:
    """A remote file as its copy in the shard cache. No request is made when that holds the file."""

    def download(path: Path) -> None:
        with path.open("wb") as target:
            chunks = _get(state, access).stream(min_chunk_size=_CHUNK_BYTES)
            _check_length(sum(target.write(bytes(chunk)) for chunk in chunks), state.size)

    key = "\n".join((state.location, str(state.size), state.version))
    return shard_cache(access.cache_dir, access.cache_gib).open(
        key,
        lambda path: _retrying(state.location, access, lambda: download(path)),
        lambda path: LocalFile(str(path), state.location),
        state.size,
    )


def _get(state: FileState, access: Access, options: Any = None) -> Any:
    """obstore's answer for a file, which is in the indexed state."""
    store, path = open_store(state.location, 0, access.timeout_s)
    answer = obstore.get(store, path, options=options)
    size, version = answer.meta["size"], _version(answer.meta)
    if version != state.version or (size != state.size and not version):
        raise has_changed(state.location)
    _check_length(size, state.size)
    return answer


def _remote_state(location: str, access: Access) -> FileState:
    """Size and version of a remote file. One byte is requested: many web servers and all signed links refuse HEAD."""

    def look() -> FileState:
        store, path = open_store(location, 0, access.timeout_s)
        try:
            meta = obstore.get(store, path, options={"range": (0, 1)}).meta
        except exceptions.NotSupportedError:  # no ranges: the answer is the whole file, and its beginning is enough
            meta = obstore.get(store, path).meta
        return FileState(location, meta["size"], _version(meta))

    return _retrying(location, access, look)


def _version(meta: Any) -> str:
    """ETag or modification time; empty where the server sends neither (obstore then gives the epoch)."""
    modified = meta["last_modified"]
    return meta.get("e_tag") or (str(modified) if modified.timestamp() else "")


def list_folder(folder: str, access: Access) -> tuple[list[str], list[str]]:
    """Sorted paths or URLs of the files and of the folders directly in a folder, without hidden files; none where a
    bucket has no such one.

    Raises:
        DataError: a local folder cannot be read, or as `file_state`: a failed listing is never taken for an empty one.
    """
    if not is_remote(folder):
        entries = entries_of(folder)
        return [e.path for e in entries if not e.is_dir()], [e.path for e in entries if e.is_dir()]
    scheme, _, rest = folder.partition("://")
    bucket, _, path = rest.partition("/")
    store, _ = open_store(f"{scheme}://{bucket}", 0, access.timeout_s)
    found = _retrying(folder, access, lambda: obstore.list_with_delimiter(store, path.strip("/") or None))
    files = sorted(f"{scheme}://{bucket}/{meta['path']}" for meta in found["objects"])
    folders = sorted(f"{scheme}://{bucket}/{prefix.rstrip('/')}" for prefix in found["common_prefixes"])
    return [file for file in files if not file.rpartition("/")[2].startswith(".")], folders


def expand(pattern: str, access: Access) -> list[str]:
    """Sorted paths or URLs of the files and folders that an absolute pattern with `*`, `?` or `[…]` matches.

    `*` matches no slash and no leading dot. Raises DataError as `list_folder` does, and of a web server, which does
    not list files."""
    if protocol_of(pattern) in ("http", "https"):
        raise DataError(
            f"dataset.params.path: '{shown(pattern)}': web servers do not list files; name them by braces, such as "
            "shards/{000..099}.tar, or by a list"
        )
    scheme, separator, rest = pattern.rpartition("://")
    first, *parts = rest.split("/")  # the bucket, or nothing before the first slash of a path
    found, is_listed = [f"{scheme}{separator}{first}"], False
    for number, part in enumerate(parts):
        is_listed = is_listed or has_magic(part)
        if not is_listed:
            found = [f"{folder}/{part}" for folder in found]
            continue
        matches: list[str] = []
        for folder in found if separator else filter(os.path.isdir, (folder or "/" for folder in found)):
            files, folders = list_folder(folder, access)
            candidates = folders if number + 1 < len(parts) else files + folders
            matches += [path for path in candidates if fnmatchcase(path.rpartition("/")[2], part)]
        found = matches
    return sorted(found)


class _WrongLength(Exception):
    """A server sent fewer or more bytes than were asked for."""


def _check_length(found: int, requested: int) -> None:
    if found != requested:
        raise _WrongLength(f"the answer has {found} bytes instead of {requested}")


def _retrying(location: str, access: Access, attempt: Callable[[], T]) -> T:
    """The result of `attempt`, called again after growing waits while its failures may be transient.

    Raises:
        FileMissing, OutageError, DataError: as `file_state`. Without their cause, which holds URLs with secrets.
        OSError: of the local disk.
    """
    failures = 0
    while True:
        try:
            return attempt()
        except (OSError, exceptions.BaseError, _WrongLength) as error:
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
    if isinstance(error, (PermissionError, exceptions.PermissionDeniedError, exceptions.UnauthenticatedError)):
        return FileMissing(f"'{name}' cannot be read: not allowed: {reason}; are the credentials right?")
    if isinstance(error, exceptions.PreconditionError) or _UNSATISFIABLE in str(error):
        return has_changed(location)
    if isinstance(error, exceptions.NotSupportedError):
        return DataError(f"the server of '{name}' sends no parts of files; set dataset.params.remote.mode=cache")
    attempts = f" after {failures} attempts" if failures > 1 else ""
    return (OutageError if is_outage(error) else DataError)(f"'{name}' cannot be read{attempts}: {reason}")
