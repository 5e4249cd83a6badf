"""One writer per run folder: a lock for starts on one machine, a fence for those on several.

RUN/writer.lock      locked by the process that writes, as long as it lives; a second start on the machine is refused
RUN/writers/7.json   one small file per start, made exclusively; the highest number owns the folder

A process that a scheduler gave up but that still lives (a zombie: stopped, or cut off) finds a higher number than its
own before it publishes or deletes anything, and ends. Between that look and its rename there is a moment; so names of
half-written folders carry the number, and a start removes those of others after it took the folder: then the rename
finds nothing to rename. On network file systems a look may be as old as the client's cache of folders (NFS: up to 60 s
by default); schedulers wait longer before they give a node up. Needs no torch.
"""

import errno
import fcntl
import json
import os
import secrets
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sd_training.errors import ConfigError, TakenOverError
from sd_training.rank_log import get_logger

log = get_logger(__name__)

_LOCK = "writer.lock"
_CLAIMS = "writers"
_locks: dict[str, int] = {}
"""Descriptor of the lock by run folder, of this process: a later run in it takes over from an earlier one."""


@dataclass(frozen=True)
class Fence:
    """The right to write in a run folder, until another start takes it.

    Attributes:
        run_dir: the run folder; none for folders that nobody contests.
        number: of this start, from 1.
        token: tells this start from any other one.
    """

    run_dir: Path | None = None
    number: int = 0
    token: str = ""

    @property
    def suffix(self) -> str:
        """Ends the names of what this start has half written."""
        return f"-{self.number}" if self.number else ""

    def check(self) -> None:
        """To be called before anything is published or deleted.

        Raises:
            TakenOverError: naming the start that has the folder now.
            OSError: it cannot be found out.
        """
        if self.run_dir is None:
            return
        newest = max(_numbers(self.run_dir), default=0)
        owner = _read(self.run_dir, newest)
        if newest != self.number or owner.get("token") != self.token:
            raise TakenOverError(
                f"{self.run_dir}: {_described(newest, owner)} has taken this run over from start {self.number}; this "
                "process ends without writing anything more"
            )

    def release(self) -> None:
        """Lets another start on this machine have the folder."""
        if self.run_dir is not None:
            _unlock(self.run_dir)


UNFENCED = Fence()
"""For folders that one process alone knows."""


def take(run_dir: Path) -> Fence:
    """Takes the folder over from whoever had it before.

    Args:
        run_dir: exists.

    Raises:
        ConfigError: a process of this machine writes there; names it.
        OSError: the folder cannot be written.
    """
    _lock(run_dir)
    (run_dir / _CLAIMS).mkdir(exist_ok=True)
    while True:
        number = max(_numbers(run_dir), default=0) + 1
        fence = Fence(run_dir, number, secrets.token_hex(8))
        try:
            _claim(fence)
            fence.check()
        except (FileExistsError, TakenOverError):
            continue  # another start at this very moment; the later one has it
        break
    for older in _numbers(run_dir):
        if older < number:
            _path(run_dir, older).unlink(missing_ok=True)
    return fence


def _claim(fence: Fence) -> None:
    assert fence.run_dir is not None
    path = _path(fence.run_dir, fence.number)
    owner = {
        "token": fence.token,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "job_id": os.environ.get("SLURM_JOB_ID"),
        "restart_count": os.environ.get("SLURM_RESTART_COUNT"),
        "started_unix_s": int(time.time()),
    }
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        os.write(handle, json.dumps(owner).encode())
        os.fsync(handle)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(handle)


def _lock(run_dir: Path) -> None:
    _unlock(run_dir)
    handle = os.open(run_dir / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)  # not inherited by programs that this one starts
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            number = max(_numbers(run_dir), default=0)
            raise ConfigError(
                f"experiment.name: {_described(number, _read(run_dir, number))} writes in {run_dir} and still lives; "
                "end it first (it may be stopped), or choose another experiment.name"
            ) from None
        log.info(f"{run_dir}: no locks there ({error.strerror}); a second start takes this run over")
        return
    _locks[os.path.realpath(run_dir)] = handle


def _unlock(run_dir: Path) -> None:
    handle = _locks.pop(os.path.realpath(run_dir), None)
    if handle is not None:
        os.close(handle)


def _path(run_dir: Path, number: int) -> Path:
    return run_dir / _CLAIMS / f"{number}.json"


def _numbers(run_dir: Path) -> list[int]:
    try:
        names = os.listdir(run_dir / _CLAIMS)
    except FileNotFoundError:
        return []
    return [int(name.removesuffix(".json")) for name in names if name.removesuffix(".json").isdecimal()]


def _read(run_dir: Path, number: int) -> dict[str, Any]:
    """What a start says of itself; nothing when it cannot be read."""
    try:
        owner = json.loads(_path(run_dir, number).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return owner if isinstance(owner, dict) else {}


def _described(number: int, owner: dict[str, Any]) -> str:
    if not owner:
        return f"start {number}" if number else "nobody known"
    job = f", SLURM job {owner['job_id']}" if owner.get("job_id") else ""
    return f"start {number} (process {owner.get('pid')} on {owner.get('host')}{job})"
