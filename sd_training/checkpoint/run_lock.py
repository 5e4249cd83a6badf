"""One writer per run folder: a file lock for starts on one machine, start numbers for those on several. Needs no torch.

RUN/writer.lock      locked by the process that writes, as long as it lives; a second start on the machine is refused
RUN/writers/7.json   one small file per start, made exclusively; the highest number owns the folder
RUN/start.lock       locked while a start takes the folder: of several at once on a machine, one gets it

Some network file systems show a lock to all machines, and a node that is cut off keeps its lock. So a lock refuses only
where the newest start records that it is of this machine; else the file is replaced by one that the new start has
locked.

A process that a scheduler gave up but that still lives (stopped, or cut off) finds a higher number than its own before
it publishes or deletes anything, and ends. Between that check and its rename there is a moment; so names of
half-written folders carry the number, and a start removes those of others after it took the folder: then the rename
finds nothing to rename. On network file systems a check may be as old as the client's cache of folders (NFS: up to 60 s
by default); schedulers wait longer before they give a node up.
"""

import errno
import fcntl
import json
import os
import secrets
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sd_training.errors import ConfigError, TakenOverError
from sd_training.log import get_logger

log = get_logger(__name__)

_LOCK = "writer.lock"
_START_LOCK = "start.lock"
_START_WAIT_S = 5.0
"""A start that is stopped while it takes the folder makes others wait for so long."""
_CLAIMS = "writers"
_held_locks: dict[str, int] = {}
"""Descriptor of the lock by run folder, of this process: a later run in it takes over from an earlier one."""


@dataclass(frozen=True)
class RunLock:
    """The right to write in a run folder, until another start takes it.

    Attributes:
        run_dir: the run folder; None for folders that no other process writes in.
        number: of this start, from 1.
        token: distinguishes this start from any other one.
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
            OSError: the folder cannot be read.
        """
        if self.run_dir is None:
            return
        newest = max(_numbers(self.run_dir), default=0)
        owner = _claim_of(self.run_dir, newest)
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
"""For folders that no other process writes in."""


def acquire_run_lock(run_dir: Path) -> RunLock:
    """Takes the folder over from whichever start had it before.

    Args:
        run_dir: exists.

    Raises:
        ConfigError: a process of this machine writes there; names it.
        OSError: the folder cannot be written.
    """
    (run_dir / _CLAIMS).mkdir(exist_ok=True)
    start_lock, end_s = os.open(run_dir / _START_LOCK, os.O_RDWR | os.O_CREAT, 0o644), time.monotonic() + _START_WAIT_S
    try:
        with suppress(OSError):  # a file system without locks
            while not _try_lock(start_lock) and time.monotonic() < end_s:
                time.sleep(0.05)
        while True:
            newest = max(_numbers(run_dir), default=0)
            is_locked = _lock(run_dir / _LOCK, run_dir)
            if not is_locked:
                _refuse_if_here(run_dir, newest)
            run_lock = RunLock(run_dir, newest + 1, secrets.token_hex(8))
            try:
                _write_claim(run_dir, run_lock)
                if not is_locked:  # the lock of a machine that is lost: replaced by one that this process has
                    own = run_dir / f"{_LOCK}.{run_lock.number}"
                    _lock(own, run_dir)
                    os.replace(own, run_dir / _LOCK)
                run_lock.check()
                break
            except (FileExistsError, TakenOverError):
                continue  # another start at this very moment; the later one has it
    finally:
        os.close(start_lock)
    for older in _numbers(run_dir):
        if older < run_lock.number:
            _claim_path(run_dir, older).unlink(missing_ok=True)
    return run_lock


def _lock(path: Path, run_dir: Path) -> bool:
    """Whether no other process has the file locked; also where the file system has no locks."""
    _unlock(run_dir)
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)  # not inherited by programs that this one starts
    try:
        is_ours = _try_lock(handle)
    except OSError as error:
        log.info(f"{run_dir}: no locks there ({error.strerror}); a second start takes this run over")
        os.close(handle)
        return True
    if is_ours:
        _held_locks[os.path.realpath(run_dir)] = handle
    else:
        os.close(handle)
    return is_ours


def _try_lock(handle: int) -> bool:
    """Whether no other process has it locked; then this process has.

    Raises:
        OSError: the file system has no locks.
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True


def _unlock(run_dir: Path) -> None:
    handle = _held_locks.pop(os.path.realpath(run_dir), None)
    if handle is not None:
        os.close(handle)


def _refuse_if_here(run_dir: Path, number: int) -> None:
    """Another process has the lock, and `number` is the newest start. One that does not record its machine is of this
    one."""
    owner = _claim_of(run_dir, number)
    if owner.get("boot_id") in (None, _boot_id()):
        raise ConfigError(
            f"experiment.name: {_described(number, owner)} writes in {run_dir} and still lives; end it first (it may "
            "be stopped), or choose another experiment.name"
        )
    log.warning(f"{run_dir}: {_described(number, owner)} still has it locked; it is taken over from that machine")


def _boot_id() -> str:
    """Distinguishes machines, and the boots of one; containers of one machine share it. The name of the machine where
    the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()


def _write_claim(run_dir: Path, run_lock: RunLock) -> None:
    path = _claim_path(run_dir, run_lock.number)
    owner = {
        "token": run_lock.token,
        "host": socket.gethostname(),
        "boot_id": _boot_id(),
        "pid": os.getpid(),
        "job_id": os.environ.get("SLURM_JOB_ID"),
    }
    with path.open("x", encoding="utf-8") as file:
        try:
            file.write(json.dumps(owner))
            file.flush()
            os.fsync(file.fileno())
        except OSError:
            path.unlink(missing_ok=True)
            raise


def _claim_path(run_dir: Path, number: int) -> Path:
    return run_dir / _CLAIMS / f"{number}.json"


def _claim_of(run_dir: Path, number: int) -> dict[str, Any]:
    """What a start records of itself; nothing when it cannot be read."""
    try:
        owner = json.loads(_claim_path(run_dir, number).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return owner if isinstance(owner, dict) else {}


def _numbers(run_dir: Path) -> list[int]:
    """Of the starts with a claim, in no order; none where the folder is missing. `Path.glob` would find none either in
    a folder that cannot be read."""
    try:
        names = os.listdir(run_dir / _CLAIMS)
    except FileNotFoundError:
        return []
    return [int(name.removesuffix(".json")) for name in names if name.removesuffix(".json").isdecimal()]


def _described(number: int, owner: dict[str, Any]) -> str:
    if not owner:
        return f"start {number}" if number else "an unknown start"
    job = f", SLURM job {owner['job_id']}" if owner.get("job_id") else ""
    return f"start {number} (process {owner.get('pid')} on {owner.get('host')}{job})"
