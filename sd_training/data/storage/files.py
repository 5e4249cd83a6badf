"""Where a file is, and how it is read: a local file, a remote one, or the output of a command; and which files a folder
or pattern names.

A local folder that cannot be listed is an error, because leaving it out would give a smaller data set; `os.walk` and
`glob` skip such folders silently.

A remote file and the output of a `pipe:` command are kept as files in the shard cache, and then indexed and read at
random like any other shard. The cache is a folder of bounded size that all processes of a machine share. It has one
file per key, made as `<name>.partial` and then renamed, while `<name>.lock` is locked: only one process makes it. The
empty lock files stay. The least recently used files are deleted to make room; processes that have such a file open can
continue reading it. Files that are being made count, and are not deleted: together they may take the folder over its
limit. A partial file that a crash left is removed: no process has it locked.

Length and version of every remote file are compared with the indexed file. A transient failure is retried
`dataset.params.remote.num_retries` times. The retries are written here and obstore's are off, because its own do not
cover answers of a wrong length and would multiply with these.

Commands run only where `dataset.params.allow_pipe` permits them (`data/sources/choose.py`): they are code, with the
rights of the user who trains.
"""

import fcntl
import hashlib
import os
import random
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from fnmatch import fnmatchcase
from glob import has_magic
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar
from urllib.parse import unquote

import obstore
from obstore import exceptions

from sd_training.config.data_schema import RemoteConfig
from sd_training.config.value_types import output_path
from sd_training.data.storage.object_store import is_outage, open_store, reason_of
from sd_training.errors import ConfigError, DataError, OutageError

FIRST_WAIT_S = 0.2
"""Wait after the first failure of a request; every further one is twice as long."""
LONGEST_WAIT_S = 20.0
_CHUNK_BYTES = 1 << 20
_HASHED_AT_ONCE = 1 << 22
_STATES_AT_ONCE = 16
_SHELL = ("bash", "-o", "pipefail", "-c")
"""Without pipefail `aws s3 cp … - | zcat` succeeds when the first command fails (webdataset issue 411)."""
T = TypeVar("T")


REMOTE = ("s3", "gs", "http", "https")
"""Protocols that are read besides local paths and `file://`."""
PIPE, HUB = "pipe:", "hf://"
"""Start of an entry of `dataset.params.path` that is a shell command, or a data set of the Hugging Face hub."""
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.:-]*)://")


def protocol_of(location: str) -> str:
    """One of `REMOTE`, or an empty string for a local file.

    Raises:
        ConfigError: any other protocol, also chains such as `simplecache::s3://`.
    """
    found = _SCHEME.match(location)
    name = found[1].lower() if found else "file"
    if name != "file" and name not in REMOTE:
        raise ConfigError(
            f"dataset.params.path: '{shown(location)}' has the protocol '{name}', which is not read; "
            "use a local path, s3://, gs://, http:// or https://"
        )
    return "" if name == "file" else name


def is_remote(location: str) -> bool:
    """Whether a file is read over the network. Raises ConfigError as `protocol_of` does."""
    return protocol_of(location) != ""


def local_path(location: str) -> str:
    """Absolute path of a local file, which may be written as `file:///path`."""
    if location[:7].lower() == "file://":
        location = unquote(location[7:])
    return os.path.abspath(os.path.expanduser(location))


def shown(location: str) -> str:
    """A location for messages: without user, password and query, where secrets are (signed links)."""
    scheme, separator, rest = location.partition("://")
    if not separator:
        return location
    if scheme not in ("s3", "gs"):  # there `?` and `#` are part of a key
        rest = re.split("[?#]", rest, maxsplit=1)[0]
    host, slash, path = rest.partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"


def cache_folder(name: str) -> Path:
    """`$XDG_CACHE_HOME/sd_training/NAME` or `~/.cache/sd_training/NAME`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "sd_training", name)


def entries_of(folder: str) -> list[os.DirEntry[str]]:
    """The entries of a folder that are not hidden, sorted by name. Raises DataError when it cannot be listed."""
    try:
        with os.scandir(folder) as entries:
            return sorted((e for e in entries if not e.name.startswith(".")), key=lambda entry: entry.name)
    except OSError as error:
        raise DataError(
            f"dataset.params.path: '{error.filename}' cannot be read: {error.strerror}; make it readable, or name what "
            "is beside it"
        ) from error


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether an entry is a folder or a link to one; not where a link leads to itself."""
    with suppress(OSError):
        return entry.is_dir()
    return False


def folders_below(root: str, seen: set[str] | None = None) -> Iterator[str]:
    """`root` and all folders below it, sorted, without hidden ones. Links are followed, each folder comes once.

    Raises:
        DataError: a folder cannot be listed.
    """
    seen, real = set() if seen is None else seen, os.path.realpath(root)  # finds loops of links
    if real not in seen:
        seen.add(real)
        yield root
        for entry in entries_of(root):
            if is_folder(entry):
                yield from folders_below(entry.path, seen)


# --- Local files ---


class FileMissing(DataError):
    """There is no such file, or it may not be read: trying again does not help."""


class FileState(NamedTuple):
    """Size and version of a file at one time."""

    location: str
    """Path or URL."""
    size: int
    """[bytes]."""
    version: str
    """Modification time [ns] of a local file; ETag, generation or modification time of a remote one, empty when the
    server sends none of these; SHA-256 of a command's output."""


class ByteFile:
    """An open file.

    Args:
        path: of the file.
        location: its name in messages; None: its path.

    Raises:
        FileMissing, DataError: it cannot be opened.
    """

    def __init__(self, path: str | Path, location: str | None = None) -> None:
        self.location = str(path) if location is None else location
        try:
            self.stream: BinaryIO = open(path, "rb")  # noqa: SIM115  # until `close`
        except OSError as error:
            cannot_help = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)
            kind = FileMissing if isinstance(error, cannot_help) else DataError
            raise kind(f"'{shown(self.location)}' cannot be read: {error.strerror}") from error
        status = os.fstat(self.stream.fileno())
        self.size, self.version = status.st_size, str(status.st_mtime_ns)

    def pread(self, length: int, offset: int) -> bytes:
        """Exactly `length` bytes from `offset`. Raises DataError, which names the file, when there are fewer."""
        data = b""
        try:
            while len(data) < length:  # one call reads at most 2 GiB, and less when a signal arrives
                piece = os.pread(self.stream.fileno(), length - len(data), offset + len(data))
                if not piece:
                    raise DataError(
                        f"'{shown(self.location)}' has {self.size} bytes, {length} from {offset} were expected; it is "
                        "truncated or has changed"
                    )
                data += piece
        except OSError as error:
            raise DataError(f"'{shown(self.location)}' cannot be read at byte {offset}: {error.strerror}") from error
        return data

    def close(self) -> None:
        """Nothing may be read afterwards."""
        self.stream.close()


def has_changed(location: str) -> DataError:
    """The error about a file that differs from its indexed state."""
    return DataError(f"'{shown(location)}' has changed since it was indexed; start again to index it anew")


# --- Files of any location ---


def file_state(location: str, access: RemoteConfig) -> FileState:
    """Size and version of a file.

    Raises:
        FileMissing: it does not exist, is not a file, or may not be read.
        OutageError: its server cannot be reached or fails, after all retries.
        DataError: another failure, such as that of a command.
        ConfigError: its protocol is unknown.
    """
    if location.startswith(PIPE):
        with closing(_piped(location, access)) as output:
            return FileState(location, output.size, sha256_of(output.stream))
    if is_remote(location):
        return remote_state(location, access)
    with closing(ByteFile(local_path(location), location)) as local:
        return FileState(location, local.size, local.version)


def file_states(locations: Sequence[str], access: RemoteConfig) -> list[FileState]:
    """As `file_state`, of several files at once."""
    with ThreadPoolExecutor(_STATES_AT_ONCE) as pool:
        return list(pool.map(lambda location: file_state(location, access), locations))


def open_bytes(file: str | FileState, access: RemoteConfig) -> ByteFile:
    """Opens a file.

    Args:
        file: path or URL; or its state, which saves a request for remote files and is compared with the content.
        access: how remote files are read.

    Raises:
        FileMissing, OutageError, DataError, ConfigError: as `file_state`; DataError also when the file is not in the
            given state.
    """
    state = file if isinstance(file, FileState) else None
    location = file if isinstance(file, str) else file.location
    if location.startswith(PIPE):
        return _piped(location, access, state)
    if is_remote(location):
        remote = state or remote_state(location, access)
        key = "\n".join((location, str(remote.size), remote.version))
        return ShardCache(access).open(key, lambda path: download(remote, access, path), location, remote.size)
    opened = ByteFile(local_path(location), location)
    if state is not None and (opened.size, opened.version) != (state.size, state.version):
        opened.close()
        raise has_changed(location)
    return opened


def _piped(location: str, access: RemoteConfig, state: FileState | None = None) -> ByteFile:
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
        with path.open("rb") as output:
            if state is not None and sha256_of(output) != state.version:
                raise has_changed(location)

    return ShardCache(access).open(location, run, location, None if state is None else state.size)


def sha256_of(stream: Any) -> str:
    """Hexadecimal digest of a file from its beginning, or from where it was read to."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(_HASHED_AT_ONCE))
    while count := stream.readinto(buffer):
        digest.update(buffer[:count])
    return digest.hexdigest()


def list_folder(folder: str, access: RemoteConfig) -> tuple[list[str], list[str]]:
    """Sorted paths or URLs of the files and of the folders directly in a folder, without hidden files; none where a
    bucket has no such one.

    Raises:
        DataError: a local folder cannot be read, or as `file_state`: a failed listing is never taken for an empty one.
    """
    if is_remote(folder):
        scheme, _, rest = folder.partition("://")
        bucket, _, path = rest.partition("/")
        store, _ = open_store(folder, 0, access.timeout_s)
        found = _retrying(folder, access, lambda: obstore.list_with_delimiter(store, path.strip("/") or None))
        files, folders = [meta["path"] for meta in found["objects"]], found["common_prefixes"]
        files = [file for file in files if not file.rpartition("/")[2].startswith(".")]
        root = f"{scheme}://{bucket}/"
        return sorted(root + file for file in files), sorted(root + inner.rstrip("/") for inner in folders)
    entries = entries_of(folder)
    return [e.path for e in entries if not is_folder(e)], [e.path for e in entries if is_folder(e)]


def expand(pattern: str, access: RemoteConfig) -> tuple[list[str], list[str]]:
    """Sorted paths or URLs of the files, and of the folders, that an absolute pattern with `*`, `?` or `[…]` matches.

    `*` matches no slash and no leading dot. Raises DataError as `list_folder` does."""
    parent, _, name = pattern.rpartition("/")
    files, folders = list[str](), list[str]()
    for folder in expand(parent, access)[1] if has_magic(parent) else [parent or "/"]:
        if is_remote(folder) or os.path.isdir(folder):
            files_in, folders_in = list_folder(folder, access)
            files += [path for path in files_in if fnmatchcase(path.rpartition("/")[2], name)]
            folders += [path for path in folders_in if fnmatchcase(path.rpartition("/")[2], name)]
    return sorted(files), sorted(folders)


# --- Remote files ---


def download(state: FileState, access: RemoteConfig, path: Path) -> None:
    """Writes a whole remote file to `path`. Raises as `remote_state` does."""

    def write() -> None:
        store, key = open_store(state.location, 0, access.timeout_s)
        answer = obstore.get(store, key)
        size, version = answer.meta["size"], _version(answer.meta)
        if version != state.version or (size != state.size and not version):
            raise has_changed(state.location)
        with path.open("wb") as target:
            written = sum(target.write(bytes(chunk)) for chunk in answer.stream(min_chunk_size=_CHUNK_BYTES))
        if written != state.size:
            raise _WrongLength(f"the answer has {written} bytes instead of {state.size}")

    _retrying(state.location, access, write)


def remote_state(location: str, access: RemoteConfig) -> FileState:
    """Size and version of a remote file. One byte is requested: many web servers and all signed links refuse HEAD.

    Raises:
        FileMissing: it does not exist or may not be read.
        OutageError: its server cannot be reached or fails, after all retries.
        DataError: another failure.
    """

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


class _WrongLength(Exception):
    """A server sent fewer or more bytes than the file has."""


def _retrying(location: str, access: RemoteConfig, attempt: Callable[[], T]) -> T:
    """The result of `attempt`, called again after growing waits while its failures may be transient.

    Raises:
        FileMissing, OutageError, DataError: as `remote_state`. Without their cause, which holds URLs with secrets.
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
    attempts = f" after {failures} attempts" if failures > 1 else ""
    return (OutageError if is_outage(error) else DataError)(f"'{name}' cannot be read{attempts}: {reason}")


# --- The shard cache ---

GIB = 1 << 30
_REOPENED = 20
"""How often a file may be deleted between being made and being opened."""
_DATA, _PARTIAL = ".data", ".partial"


class ShardCache:
    """The files of `access.cache_dir`, which is made when it does not exist, of at most `access.cache_gib` together."""

    def __init__(self, access: RemoteConfig) -> None:
        self.folder = output_path(access.cache_dir) if access.cache_dir else cache_folder("shards")
        self.max_bytes = int(access.cache_gib * GIB)

    def open(self, key: str, produce: Callable[[Path], None], name: str, size: int | None = None) -> ByteFile:
        """The file of a key, made when it is not there, and again when another process that needs room deletes it in
        between.

        Args:
            key: any text; the same text must always mean the same bytes.
            produce: writes the file to the path it is given. Called by one process at a time.
            name: of the file, in messages.
            size: of the file, when it is known [bytes]. Room is then made beforehand; a file of another size is an
                error, and one that is in the cache is made anew.

        Raises:
            DataError: the folder cannot be written, the file is larger than the whole cache, or the cache is so small
                that files are deleted as soon as they are made.
        """
        stem = str(self.folder / hashlib.sha256(key.encode()).hexdigest()[:32])
        path = Path(stem + _DATA)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with open(f"{stem}.lock", "wb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                try:
                    for _ in range(_REOPENED):
                        if not _found(path, size):
                            self._make(path, Path(stem + _PARTIAL), produce, size)
                        with suppress(FileMissing):
                            return ByteFile(path, name)
                finally:  # a process forked meanwhile has a copy of the descriptor: closing ours would not unlock
                    fcntl.flock(lock, fcntl.LOCK_UN)
        except OSError as error:
            raise DataError(f"the shard cache '{self.folder}' cannot be used: {error.strerror or error}") from error
        raise DataError(f"the shard cache '{self.folder}' is too small: raise dataset.params.remote.cache_gib")

    def _make(self, path: Path, partial: Path, produce: Callable[[Path], None], size: int | None) -> None:
        self._check_size(size or 0)
        try:
            with partial.open("wb") as file:
                file.truncate(size or 0)  # other processes then count it
            self._make_room()
            produce(partial)
            made = partial.stat().st_size
            if size is not None and made != size:
                raise DataError(f"a file for the shard cache has {made} bytes instead of {size}")
            self._check_size(made)
            self._make_room()
            partial.rename(path)
        except BaseException:  # once it is renamed, a file of this name is not ours
            partial.unlink(missing_ok=True)
            raise

    def _check_size(self, size: int) -> None:
        if size > self.max_bytes:
            raise DataError(
                f"a file of {size / GIB:.3g} GiB does not fit into the shard cache of {self.max_bytes / GIB:.3g} GiB; "
                "raise dataset.params.remote.cache_gib"
            )

    def _make_room(self) -> None:
        """Deletes what crashed processes left, and files, least recently used first, until the rest fits."""
        complete, total = list[tuple[float, int, str]](), 0
        for entry in os.scandir(self.folder):
            with suppress(FileNotFoundError):
                if entry.name.endswith(_DATA):
                    complete.append((entry.stat().st_mtime, entry.stat().st_size, entry.path))
                if entry.name.endswith(_DATA) or (entry.name.endswith(_PARTIAL) and not _was_left(entry.path)):
                    total += entry.stat().st_size
        for _, size, path in sorted(complete):
            if total > self.max_bytes:
                Path(path).unlink(missing_ok=True)
                total -= size


def _was_left(partial: str) -> bool:
    """Deletes a partial file that no process is making. Returns whether it did."""
    try:
        with open(f"{partial.removesuffix(_PARTIAL)}.lock", "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                Path(partial).unlink(missing_ok=True)
            finally:
                fcntl.flock(lock, fcntl.LOCK_UN)
        return True
    except OSError:  # it is locked, or of another user
        return False


def _found(path: Path, size: int | None) -> bool:
    """Marks a file as used now. Returns whether it exists with this size."""
    with suppress(FileNotFoundError):
        if size is None or path.stat().st_size == size:
            os.utime(path)
            return True
    return False
