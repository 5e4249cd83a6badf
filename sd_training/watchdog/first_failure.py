"""Which process of a run ended first, and why: the others end with its status and have nothing to add.

When one process fails, those that wait for it fail as well, with errors of the network that hide the cause, or wait for
ever. So the first one leaves a note in the run folder.

How one of several processes ends: the first one says why, all have its status, nobody else adds a traceback.

The status that a run ends with, for the batch file that started it.

srun gives the highest status of all processes, so that of one that has to be killed after the others have ended hides
theirs.
"""

import fcntl
import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType

from sd_training.cli import print_error, write_torchrun_error
from sd_training.errors import EXIT_UNEXPECTED, UserError
from sd_training.log import RunLog, get_logger, is_main_process
from sd_training.redaction import redacted

_OF_A_START = (
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
)
"""Variables that all processes of one start of a run have in common."""


@dataclass(frozen=True)
class Failure:
    """Why a process ended."""

    rank: int
    status: int
    text: str
    start: str
    """Which start of the run it was."""


class FirstFailure:
    """The file `first_failure.json` of a run folder.

    Args:
        run_dir: the run folder.
        rank: of this process.
        environment: of this process; the launcher may still add to it.
    """

    def __init__(self, run_dir: Path, rank: int, environment: Mapping[str, str] = os.environ) -> None:
        self.path = run_dir / "first_failure.json"
        self.rank = rank
        self.environment = environment
        stamp = self._stamp()
        self._before = stamp if stamp is not None and stamp[1] < _started_ns() else None
        """A note that is older than this process is of an earlier start, which may have had the same variables. A newer
        one may be of a process that failed while this one imported its libraries."""

    def clear(self) -> None:
        """By the first process, at its start."""
        self.path.unlink(missing_ok=True)

    def claim(self, status: int, text: str, rank: int | None = None) -> bool:
        """Whether this process is the first; then it is written down. A folder that cannot be written stops nobody.

        Args:
            rank: the process that ended, where that one left no note; null: this one.
        """
        end = Failure(self.rank if rank is None else rank, status, text, self._start())
        partial = self.path.with_name(f".{self.path.name}.{self.rank}")
        try:
            partial.write_text(json.dumps(asdict(end)), encoding="utf-8")
            try:
                with _alone_in(self.path.parent):
                    if self._current() is None:
                        self.clear()  # a note of an earlier start
                    os.link(partial, self.path)  # whole at once, and by one process only
            finally:
                partial.unlink()
        except OSError:
            return self.of_another() is None
        return True

    def of_another(self) -> Failure | None:
        """The first end of this start of the run, if it was another process's."""
        end = self._current()
        return end if end is not None and end.rank != self.rank else None

    def is_own(self) -> bool:
        """Whether this process has written down that it was the first."""
        end = self._current()
        return end is not None and end.rank == self.rank

    def wait_for_another(self, limit_s: float, peers: Mapping[int, int] = MappingProxyType({})) -> Failure | None:
        """The same, for a process that failed because of another one, which may be about to write it down.

        Args:
            limit_s: longest wait.
            peers: rank → process id of the others on this machine. One that is gone and left no note is noted here.
        """
        end_s = time.monotonic() + limit_s
        while (end := self.of_another()) is None and time.monotonic() < end_s:
            for rank, pid in peers.items():
                if (status := _ended(pid)) is not None and self.of_another() is None:
                    self.claim(EXIT_UNEXPECTED, f"it ended without saying why{status}", rank)
            time.sleep(0.1)
        return end

    def _current(self) -> Failure | None:
        if self._stamp() == self._before:
            return None
        end = self._stored()
        return end if end is not None and end.start == self._start() else None

    def _stored(self) -> Failure | None:
        try:
            return Failure(**json.loads(self.path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    def _stamp(self) -> tuple[int, int] | None:
        """Which file it is; null: none."""
        try:
            found = self.path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns

    def _start(self) -> str:
        return " ".join(self.environment.get(name, "") for name in _OF_A_START)


def _started_ns() -> int:
    """When this process was started [ns since 1970]; now where the system does not say."""
    try:
        ticks = int(
            Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19]
        )
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        age_s = 0.0
    return time.time_ns() - int(age_s * 1e9)


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Processes of one machine enter one after the other, where the file system has locks: else two that fail at once
    both remove an old note, and the second one the note of the first as well."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _ended(pid: int) -> str | None:
    """Null while the process runs; else what the system still tells of its end, such as ", with status 3"."""
    try:
        os.kill(pid, 0)
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except (ProcessLookupError, FileNotFoundError) as error:
        return "" if isinstance(error, ProcessLookupError) or Path("/proc/self").exists() else None
    if fields[0] not in ("Z", "X"):
        return None
    code = int(fields[-1])  # of wait(2); 0 where this process may not know it
    return f", by signal {code & 0x7F}" if code & 0x7F else f", with status {code >> 8}" if code else ""


STATUS_FILE_VARIABLE = "SD_TRAINING_STATUS_FILE"
"""Environment variable of a file, of one start of a run, that gets its status."""


def write_status(status: int) -> None:
    """Writes it down, unless it is 0 or another process has told one: the first end says why.

    To be called before anything that a launcher may not wait for. A file that cannot be written stops nobody: the
    launcher's own status is left.
    """
    path = os.environ.get(STATUS_FILE_VARIABLE)
    if path and status:
        with suppress(OSError):
            _write_once(Path(path), f"{status}\n")


def _write_once(path: Path, text: str) -> None:
    partial = path.with_name(f"{path.name}.{socket.gethostname()}.{os.getpid()}")
    try:
        with partial.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        try:
            os.link(partial, path)  # whole at once, and by one process only
        except FileExistsError:
            return
        except OSError:  # a file system without links
            if not path.exists():
                os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


log = get_logger(__name__)

_OTHER_S = 10.0
"""A process that fails because another one does learns of it within this time."""
_OF_THE_NETWORK = re.compile(
    r"gloo|nccl|Connection (?:reset|closed|refused)|Broken pipe|recv.*bytes|TCPStore|socket", re.IGNORECASE
)
"""In the text of an error of torch: a collective, or the store of the processes, lost another one."""
_MAX_REASON = 500
"""Of what the first one said, in the sentence of another [characters]."""


def is_network_error(error: BaseException) -> bool:
    """Whether an error is what a process meets when another one of the run has ended; RuntimeError is what torch raises
    in a collective, also inside a backward pass."""
    return isinstance(error, (RuntimeError, ConnectionError)) and _OF_THE_NETWORK.search(str(error)) is not None


@contextmanager
def exit_together(
    first_failure: FirstFailure,
    *,
    is_child: bool,
    local_peers: Callable[[], Mapping[int, int]] = lambda: MappingProxyType({}),
    run_log: RunLog | None = None,
) -> Iterator[None]:
    """Around everything that several processes do together.

    Args:
        first_failure: note of the process that ends first.
        is_child: started by the first process, which is killed at once when a child ends with another status than 0.
        local_peers: gives rank and process id of the others on this machine.
        run_log: gets what is printed here.

    Raises:
        SystemExit: another process ended first, or this is a child; what there is to say has been said.
    """
    try:
        yield
    except Exception as error:
        # Launchers end by SIGTERM who outlives another process; this one still has to say something.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        status = error.exit_status if isinstance(error, UserError) else EXIT_UNEXPECTED
        other = first_failure.wait_for_another(_OTHER_S, local_peers()) if is_network_error(error) else None
        text = redacted(f"{type(error).__name__}: {error}")
        if other is None and not first_failure.claim(status, text):
            other = first_failure.of_another()
        write_status(status if other is None else other.status)
        if other is not None:
            _name(other, first_failure.rank)
            raise SystemExit(0 if is_child else other.status) from None
        write_torchrun_error(text)
        # A mistake of all is else told by the first process, which has just left it to this one.
        is_left_to_this = isinstance(error, UserError) and not is_main_process() and first_failure.is_own()
        if not is_child and not is_left_to_this:
            raise
        if isinstance(error, UserError):
            print_error(error)
        else:
            sys.excepthook(type(error), error, error.__traceback__)  # the one without secrets
        if run_log is not None:
            run_log.add_exception(error)
        raise SystemExit(0 if is_child else status) from None


def _name(end: Failure, rank: int) -> None:
    """The lowest of the other ranks says who ended first. Mistakes are sentences, which that one has said itself."""
    if end.status == EXIT_UNEXPECTED and rank == int(end.rank == 0):
        said = " ".join(end.text.split())
        log.error(f"rank {end.rank} ended first, so the others end too: {said:.{_MAX_REASON}}")
