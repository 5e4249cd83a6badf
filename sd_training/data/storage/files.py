"""How a file is read, chosen by its location: a local file, a remote one (`object_store`), or the output of a command;
and which files a folder or pattern names.

A remote file and the output of a `pipe:` command are kept as files in the shard cache, and then indexed and read at
random like any other shard. The cache is a folder of bounded size that all processes of a machine share. It has one
file per key, made as `<name>.partial` and then renamed, while `<name>.lock` is locked: only one process makes it. The
empty lock files stay. The least recently used files are deleted to make room; processes that have such a file open can
go on reading it. Files that are being made count, and are not deleted: together they may take the folder over its
limit. A partial file that a crash left is removed: nobody has it locked.

Commands run only where `dataset.params.allow_pipe` permits them (`data/sources/choose.py`): they are code, with the
rights of the user who trains.
"""

import fcntl
import hashlib
import os
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from fnmatch import fnmatchcase
from glob import has_magic
from pathlib import Path
from typing import TypeVar

from sd_training.data.storage.locations import (
    PIPE,
    Access,
    ByteFile,
    FileMissing,
    FileState,
    cache_folder,
    entries_of,
    has_changed,
    is_folder,
    is_remote,
    local_path,
    shown,
)
from sd_training.data.storage.object_store import download, list_bucket, remote_state
from sd_training.errors import DataError

_STATES_AT_ONCE = 16
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
        return remote_state(location, access)
    with closing(ByteFile(local_path(location), location)) as local:
        return FileState(location, local.size, local.version)


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
    state = file if isinstance(file, FileState) else None
    location = file if isinstance(file, str) else file.location
    if location.startswith(PIPE):
        return _piped(location, access, lambda path: ByteFile(path, location), state)
    if is_remote(location):
        remote = state or remote_state(location, access)
        return ShardCache(access).open(
            "\n".join((location, str(remote.size), remote.version)),
            lambda path: download(remote, access, path),
            lambda path: ByteFile(path, location),
            remote.size,
        )
    opened = ByteFile(local_path(location), location)
    if state is not None and (opened.size, opened.version) != (state.size, state.version):
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
            raise has_changed(location)

    return ShardCache(access).open(location, run, opener, None if state is None else state.size)


def _output_state(location: str, path: Path) -> FileState:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return FileState(location, file.tell(), digest)


def list_folder(folder: str, access: Access) -> tuple[list[str], list[str]]:
    """Sorted paths or URLs of the files and of the folders directly in a folder, without hidden files; none where a
    bucket has no such one.

    Raises:
        DataError: a local folder cannot be read, or as `file_state`: a failed listing is never taken for an empty one.
    """
    if is_remote(folder):
        files, folders = list_bucket(folder, access)
        return sorted(file for file in files if not file.rpartition("/")[2].startswith(".")), sorted(folders)
    entries = entries_of(folder)
    return [e.path for e in entries if not is_folder(e)], [e.path for e in entries if is_folder(e)]


def expand(pattern: str, access: Access) -> tuple[list[str], list[str]]:
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


# --- The shard cache ---

GIB = 1 << 30
_REOPENED = 20
"""How often a file may be deleted between being made and being opened."""
_DATA, _PARTIAL = ".data", ".partial"


class ShardCache:
    """The files of `access.cache_dir`, which is made when it does not exist, of at most `access.cache_gib` together."""

    def __init__(self, access: Access) -> None:
        self.folder, self.max_bytes = access.cache_dir or cache_folder("shards"), int(access.cache_gib * GIB)

    def open(
        self, key: str, produce: Callable[[Path], None], opener: Callable[[Path], T], size: int | None = None
    ) -> T:
        """What `opener` returns for the file of a key, made when it is not there; called again when another process
        that needs room deletes the file in between.

        Args:
            key: any text; the same text must always mean the same bytes.
            produce: writes the file to the path it is given. Called by one process at a time.
            opener: opens the file.
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
                        with suppress(FileNotFoundError, FileMissing):
                            return opener(path)
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
