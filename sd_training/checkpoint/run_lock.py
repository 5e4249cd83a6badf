"""One writer per run folder: a file lock for starts on one machine, a claim for those on several. Needs no torch.

RUN/writer.json          the newest start, which owns the folder; replaced by each start
RUN/writer-BOOT.lock     locked by the process of one machine (its boot id) that writes, as long as it lives: a second
                         start on the machine is refused. Other machines, some of which may be lost but still hold a
                         lock on a network file system, have files of their own.

A process that a scheduler gave up but that still lives (stopped, or cut off) finds another claim than its own before it
publishes or deletes anything, and ends. Between that check and its rename there is a moment; so names of half-written
folders carry the start's token, and a start removes those of others after it took the folder: then the rename finds
nothing to rename. On network file systems a check may be as old as the client's cache of folders (NFS: up to 60 s by
default); schedulers wait longer before they give a node up.
"""

import errno
import fcntl
import json
import os
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sd_training.checkpoint.atomic_io import replace_text
from sd_training.errors import ConfigError, TakenOverError
from sd_training.log import get_logger

log = get_logger(__name__)

CLAIM = "writer.json"
_held_locks: dict[str, int] = {}
"""Descriptor of the lock by run folder, of this process: a later run in it takes over from an earlier one."""


@dataclass(frozen=True)
class RunLock:
    """The right to write in a run folder, until another start takes it.

    Attributes:
        run_dir: the run folder; None for folders that no other process writes in.
        token: distinguishes this start from any other one.
    """

    run_dir: Path | None = None
    token: int = 0

    @property
    def suffix(self) -> str:
        """Ends the names of what this start has half written."""
        return f"-{self.token}" if self.token else ""

    def check(self) -> None:
        """To be called before anything is published or deleted.

        Raises:
            TakenOverError: naming the start that has the folder now.
            OSError: the folder cannot be read.
        """
        if self.run_dir is None:
            return
        owner = _owner(self.run_dir)
        if owner.get("token") != self.token:
            raise TakenOverError(
                f"{self.run_dir}: {_described(owner)} has taken this run over; this process ends without writing "
                "anything more"
            )

    def release(self) -> None:
        """Lets another start on this machine have the folder."""
        if self.run_dir is not None and (handle := _held_locks.pop(os.path.realpath(self.run_dir), None)) is not None:
            os.close(handle)


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
    run_lock, boot = RunLock(run_dir, secrets.randbits(48) + 1), _boot_id()
    run_lock.release()
    handle = os.open(run_dir / f"writer-{boot}.lock", os.O_RDWR | os.O_CREAT, 0o644)  # closed in programs started here
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _held_locks[os.path.realpath(run_dir)] = handle
    except OSError as error:
        os.close(handle)
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise ConfigError(
                f"experiment.name: {_described(_owner(run_dir))} writes in {run_dir} and still lives; end it first (it "
                "may be stopped), or choose another experiment.name"
            ) from error
        log.info(f"{run_dir}: no locks there ({error.strerror}); a second start takes this run over")
    claim = {"token": run_lock.token, "host": socket.gethostname(), "pid": os.getpid()}
    replace_text(run_dir / CLAIM, json.dumps(claim | {"job_id": os.environ.get("SLURM_JOB_ID")}) + "\n")
    return run_lock


def _boot_id() -> str:
    """Distinguishes machines, and the boots of one; containers of one machine share it. The name of the machine where
    the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()


def _owner(run_dir: Path) -> dict[str, Any]:
    """What the newest start records of itself; nothing where there is none or it was damaged."""
    try:
        owner = json.loads((run_dir / CLAIM).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return owner if isinstance(owner, dict) else {}


def _described(owner: dict[str, Any]) -> str:
    job = f", SLURM job {owner['job_id']}" if owner.get("job_id") else ""
    return f"another start (process {owner['pid']} on {owner['host']}{job})" if "pid" in owner else "another start"
