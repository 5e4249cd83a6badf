"""One writer per run folder: a lock for starts on one machine, a run_lock for those on several.

RUN/writer.lock      locked by the process that writes, as long as it lives; a second start on the machine is refused
RUN/writers/7.json   one small file per start, made exclusively; the highest number owns the folder
RUN/start.lock       locked while a start takes the folder: of several at once on a machine, one gets it

Some network file systems show a lock to all machines, and a node that is cut off keeps its lock. So a lock refuses only
where the newest start says that it is of this machine; else the file is replaced by one that the new start has locked.

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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sd_training.errors import ConfigError, TakenOverError
from sd_training.log import get_logger

log = get_logger(__name__)

_LOCK = "writer.lock"
_TAKING = "start.lock"
_TAKING_S = 5.0
"""A start that is stopped while it takes the folder keeps others waiting for so long."""
_CLAIMS = "writers"
_held_locks: dict[str, int] = {}
"""Descriptor of the lock by run folder, of this process: a later run in it takes over from an earlier one."""


@dataclass(frozen=True)
class RunLock:
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


NO_LOCK = RunLock()
"""For folders that one process alone knows."""


def acquire_run_lock(run_dir: Path) -> RunLock:
    """Takes the folder over from whoever had it before.

    Args:
        run_dir: exists.

    Raises:
        ConfigError: a process of this machine writes there; names it.
        OSError: the folder cannot be written.
    """
    with _one_at_a_time(run_dir):
        return _take(run_dir)


def _take(run_dir: Path) -> RunLock:
    (run_dir / _CLAIMS).mkdir(exist_ok=True)
    while True:
        newest = max(_numbers(run_dir), default=0)
        is_locked = _lock(run_dir)
        if not is_locked:
            _refuse_if_here(run_dir, newest)
        run_lock = RunLock(run_dir, newest + 1, secrets.token_hex(8))
        try:
            _claim(run_lock)
            if not is_locked:
                _replace_lock(run_dir, run_lock.number)
            run_lock.check()
        except (FileExistsError, TakenOverError):
            continue  # another start at this very moment; the later one has it
        break
    for older in _numbers(run_dir):
        if older < run_lock.number:
            _path(run_dir, older).unlink(missing_ok=True)
    return run_lock


@contextmanager
def _one_at_a_time(run_dir: Path) -> Iterator[None]:
    """Starts on one machine wait for each other here; where there are no locks, they do not."""
    end_s = time.monotonic() + _TAKING_S
    handle = os.open(run_dir / _TAKING, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        with suppress(OSError):
            while not _flock(handle) and time.monotonic() < end_s:
                time.sleep(0.05)
        yield
    finally:
        os.close(handle)


def _claim(run_lock: RunLock) -> None:
    assert run_lock.run_dir is not None
    path = _path(run_lock.run_dir, run_lock.number)
    owner = {
        "token": run_lock.token,
        "host": socket.gethostname(),
        "boot_id": _boot_id(),
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


def _lock(run_dir: Path) -> bool:
    """Whether nobody else has it; also where there are no locks."""
    _unlock(run_dir)
    handle = os.open(run_dir / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)  # not inherited by programs that this one starts
    try:
        is_ours = _flock(handle)
    except OSError as error:
        os.close(handle)
        log.info(f"{run_dir}: no locks there ({error.strerror}); a second start takes this run over")
        return True
    if is_ours:
        _held_locks[os.path.realpath(run_dir)] = handle
    else:
        os.close(handle)
    return is_ours


def _flock(handle: int) -> bool:
    """Whether nobody else has it locked; then this process has.

    Raises:
        OSError: there are no locks.
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True


def _refuse_if_here(run_dir: Path, number: int) -> None:
    """Somebody has the lock, and this start is the newest one."""
    owner = _read(run_dir, number)
    if _is_here(owner):
        raise ConfigError(
            f"experiment.name: {_described(number, owner)} writes in {run_dir} and still lives; end it first (it may "
            "be stopped), or choose another experiment.name"
        )
    log.warning(f"{run_dir}: {_described(number, owner)} still has it locked; it is taken over from that machine")


def _is_here(owner: dict[str, Any]) -> bool:
    """Whether a start is of this machine, since its last boot. One that does not say so is."""
    theirs, ours = owner.get("boot_id"), _boot_id()
    if theirs and ours:
        return bool(theirs == ours)  # containers have names of their own
    return owner.get("host") in (None, socket.gethostname())


def _boot_id() -> str | None:
    """Tells machines, and the boots of one, apart; null where the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return None


def _replace_lock(run_dir: Path, number: int) -> None:
    """By one that this process has; `number` is that of this start."""
    beside = run_dir / f"{_LOCK}.{number}"
    handle = os.open(beside, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        _flock(handle)
        os.replace(beside, run_dir / _LOCK)
    except OSError:
        os.close(handle)
        beside.unlink(missing_ok=True)
        raise
    _held_locks[os.path.realpath(run_dir)] = handle


def _unlock(run_dir: Path) -> None:
    handle = _held_locks.pop(os.path.realpath(run_dir), None)
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
