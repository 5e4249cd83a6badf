"""`pipe:` shards: the output of a shell command, kept in the shard cache.

Kept as a file, the output is indexed and read at random like any other shard, so order, resume and elasticity hold as
they do for files. Commands run only where `dataset.params.allow_pipe` says so (`data/sources/shards.py` refuses them
otherwise): they are code, with the rights of the user who trains.
"""

import hashlib
import subprocess
import time
from pathlib import Path

from sd_training.data.storage.files import Access, ByteFile, FileState, LocalFile
from sd_training.data.storage.locations import shown
from sd_training.data.storage.object_store import FIRST_WAIT_S, LONGEST_WAIT_S
from sd_training.data.storage.shard_cache import ShardCache, shard_cache
from sd_training.errors import DataError

PIPE = "pipe:"
_SHELL = ("bash", "-o", "pipefail", "-c")
"""Without pipefail `aws s3 cp … - | zcat` succeeds when the first command fails (webdataset issue 411)."""
_NO_PROGRAM = (126, 127)
"""What a shell says of a program that cannot be started: trying again would not help."""
_END_BLOCK = bytes(512)
_BLOCK_BYTES = 1 << 20


def pipe_state(location: str, access: Access) -> FileState:
    """Runs the command unless its output is kept; the version is the hash of the output.

    Raises:
        DataError: the command failed at every attempt, or what it wrote is no whole tar file.
    """
    return _cache(access).open(location, lambda path: _run(location, path, access), lambda path: _state(location, path))


def open_pipe(state: FileState, access: Access) -> ByteFile:
    """The output of the command, run again where it is not kept any more.

    Raises:
        DataError: as `pipe_state`; also when the command now writes something else than when it was indexed.
    """

    def produce(path: Path) -> None:
        _run(state.location, path, access)
        if _state(state.location, path) != state:
            raise DataError(
                f"'{state.location}' writes other bytes than when it was indexed; start again to index it anew"
            )

    def opened(path: Path) -> LocalFile:
        if not path.exists():
            raise FileNotFoundError(path)
        return LocalFile(str(path), state.location)

    return _cache(access).open(state.location, produce, opened)


def _cache(access: Access) -> ShardCache:
    return shard_cache(access.cache_dir, access.cache_gib)


def _run(location: str, path: Path, access: Access) -> None:
    """Runs the command until it succeeds; its output is the file.

    Raises:
        DataError: its program cannot be started, or it failed at every attempt.
    """
    command = location.removeprefix(PIPE)
    for attempt in range(access.num_retries + 1):
        if attempt:
            time.sleep(min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** (attempt - 1)))
        with path.open("wb") as output:
            done = subprocess.run((*_SHELL, command), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.PIPE)
        last_line = done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
        failure = f"exit status {done.returncode}: {' '.join(last_line)}"
        if done.returncode in _NO_PROGRAM:
            raise DataError(f"'{shown(location)}' cannot be read: {failure}")
        if done.returncode == 0:
            if _ends_as_tar(path):
                return
            failure = f"the {path.stat().st_size:,} bytes it wrote are no whole tar file"
    raise DataError(
        f"'{shown(location)}' cannot be read: {access.num_retries + 1} attempts failed, the last one with: {failure}"
    )


def _ends_as_tar(path: Path) -> bool:
    """A tar file ends with blocks of zeros; a cut one does not."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - len(_END_BLOCK)))
        return file.read() == _END_BLOCK


def _state(location: str, path: Path) -> FileState:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return FileState(location, size, digest.hexdigest())
