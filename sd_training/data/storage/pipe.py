"""`pipe:` shards: the output of a shell command, kept as a file in the shard cache.

The output is then indexed and read at random like any other shard, so order, resume and elasticity hold as they do for
files. Commands run only where `dataset.params.allow_pipe` permits them (`data/sources/choose.py`): they are code, with
the rights of the user who trains.
"""

import hashlib
import subprocess
import time
from pathlib import Path

from sd_training.data.storage.byte_file import Access, FileState, LocalFile
from sd_training.data.storage.locations import PIPE, shown
from sd_training.data.storage.shard_cache import shard_cache
from sd_training.errors import DataError

FIRST_WAIT_S = 0.2
_LONGEST_WAIT_S = 20.0
_SHELL = ("bash", "-o", "pipefail", "-c")
"""Without pipefail `aws s3 cp … - | zcat` succeeds when the first command fails (webdataset issue 411)."""
_NO_PROGRAM = (126, 127)
"""Exit statuses of a shell for a program that cannot be started: trying again would not help."""
_END_BLOCK = bytes(512)


def pipe_state(location: str, access: Access) -> FileState:
    """Runs the command unless its output is cached; the version is the hash of the output.

    Raises:
        DataError: the command failed at every attempt, or its output is not a whole tar file.
    """
    cache = shard_cache(access.cache_dir, access.cache_gib)
    return cache.open(location, lambda path: _run(location, path, access), lambda path: _state(location, path))


def open_pipe(state: FileState, access: Access) -> LocalFile:
    """The output of the command, run again where it is not cached any more.

    Raises:
        DataError: as `pipe_state`; also when the output differs from the indexed one.
    """

    def produce(path: Path) -> None:
        _run(state.location, path, access)
        if _state(state.location, path) != state:
            raise DataError(
                f"'{state.location}' writes other bytes than when it was indexed; start again to index it anew"
            )

    cache = shard_cache(access.cache_dir, access.cache_gib)
    return cache.open(state.location, produce, lambda path: LocalFile(str(path), state.location))


def _run(location: str, path: Path, access: Access) -> None:
    """Writes the output of the command to `path`; repeats the command until it succeeds."""
    for attempt in range(access.num_retries + 1):
        if attempt:
            time.sleep(min(_LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** (attempt - 1)))
        with path.open("w+b") as output:
            command = (*_SHELL, location.removeprefix(PIPE))
            done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.PIPE)
            size = output.seek(0, 2)
            output.seek(max(0, size - len(_END_BLOCK)))
            is_whole = output.read() == _END_BLOCK  # a tar file ends with blocks of zeros
        if done.returncode == 0 and is_whole:
            return
        last_line = " ".join(done.stderr.decode("utf-8", "replace").strip().splitlines()[-1:])
        failure = f"exit status {done.returncode}: {last_line}"
        if done.returncode == 0:
            failure = f"the {size:,} bytes it wrote are no whole tar file"
        if done.returncode in _NO_PROGRAM:
            break
    raise DataError(f"'{shown(location)}' cannot be read: attempt {attempt + 1} failed with {failure}")


def _state(location: str, path: Path) -> FileState:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return FileState(location, file.tell(), digest)
