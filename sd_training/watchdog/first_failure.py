"""Several processes end together: the first failure is noted in the run folder, and the others end with its status.

When one process fails, those that wait for it fail as well, with errors of the network that hide the cause, or wait for
ever. The note `first_failure.json` says which rank failed first, and why; nobody else adds a traceback. The status also
goes to a file for the batch file that started the run: srun returns the highest status of all processes, so that of one
that had to be killed hides the cause.
"""

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

log = get_logger(__name__)

STATUS_FILE_VARIABLE = "SD_TRAINING_STATUS_FILE"
"""Environment variable of a file, of one start of a run, that gets its status."""
_START_VARIABLES = (
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"),
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
)
"""Variables that all processes of one start of a run have in common."""
_NETWORK_ERROR = re.compile(
    r"gloo|nccl|Connection (?:reset|closed|refused)|Broken pipe|recv.*bytes|TCPStore|socket", re.IGNORECASE
)
"""In the text of an error of torch: a collective, or the store of the processes, lost another process."""
_NOTE_WAIT_S = 10.0
"""A process that fails because another one does waits this long for its note."""
_MAX_REASON = 500
"""Characters of the first failure's text in another rank's message."""


@dataclass(frozen=True)
class Failure:
    """Why a process ended."""

    rank: int
    status: int
    text: str
    start: str
    """Which start of the run it was."""


class FirstFailure:
    """The note `first_failure.json` of a run folder. One that is older than this process, or has other variables of
    the launcher, is of an earlier start.

    Args:
        run_dir: the run folder.
        rank: of this process.
        environment: of this process; the launcher may still add to it.
    """

    def __init__(self, run_dir: Path, rank: int, environment: Mapping[str, str] = os.environ) -> None:
        self.path = run_dir / "first_failure.json"
        self.rank = rank
        self.environment = environment
        self._process_start_ns = _process_start_ns()

    def clear(self) -> None:
        """By rank 0, at its start."""
        self.path.unlink(missing_ok=True)

    def claim(self, status: int, text: str, rank: int | None = None) -> bool:
        """Writes the note; whether this process is the first. A folder that cannot be written is no obstacle.

        Args:
            rank: the process that ended, where that one left no note; null: this one.
        """
        note = json.dumps(asdict(Failure(self.rank if rank is None else rank, status, text, self._start())))
        try:
            try:
                _write_once(self.path, note)
            except OSError:
                if self._current() is not None:
                    raise
                self.clear()  # a note of an earlier start; not cleared first: that could remove one of this moment
                _write_once(self.path, note)
        except OSError:
            return self.of_another() is None
        return True

    def of_another(self) -> Failure | None:
        """The first failure of this start of the run, if it was another process's."""
        failure = self._current()
        return failure if failure is not None and failure.rank != self.rank else None

    def is_own(self) -> bool:
        """Whether this process was the first, and could write its note."""
        failure = self._current()
        return failure is not None and failure.rank == self.rank

    def wait_for_another(self, limit_s: float, peers: Mapping[int, int] = MappingProxyType({})) -> Failure | None:
        """As `of_another`, for a process that failed because of another one, which may be about to write its note.

        Args:
            limit_s: longest wait.
            peers: rank → process id of the others on this machine. One that is gone without a note gets one here.
        """
        end_s = time.monotonic() + limit_s
        while (failure := self.of_another()) is None and time.monotonic() < end_s:
            for rank, pid in peers.items():
                if (how := _how_it_ended(pid)) is not None and self.of_another() is None:
                    self.claim(EXIT_UNEXPECTED, f"it ended without a message{how}", rank)
            time.sleep(0.1)
        return failure

    def _current(self) -> Failure | None:
        try:
            if self.path.stat().st_mtime_ns < self._process_start_ns:
                return None
            failure = Failure(**json.loads(self.path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None
        return failure if failure.start == self._start() else None

    def _start(self) -> str:
        return " ".join(self.environment.get(name, "") for name in _START_VARIABLES)


def write_status(status: int) -> None:
    """Writes the status to the file that `STATUS_FILE_VARIABLE` names, unless it is 0 or another process has written
    one: the first failure counts.

    To be called before anything that a launcher may not wait for. Where the file cannot be written, the launcher's own
    status is left.
    """
    path = os.environ.get(STATUS_FILE_VARIABLE)
    if path and status:
        with suppress(OSError):
            _write_once(Path(path), f"{status}\n")


def is_network_error(error: BaseException) -> bool:
    """Whether an error is what a process meets when another one of the run has ended; RuntimeError is what torch raises
    in a collective, also inside a backward pass."""
    return isinstance(error, (RuntimeError, ConnectionError)) and _NETWORK_ERROR.search(str(error)) is not None


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
        first_failure: note of the process that fails first.
        is_child: started by rank 0, which Lightning kills at once when a child ends with another status than 0.
        local_peers: gives rank and process id of the others on this machine.
        run_log: gets what is printed here.

    Raises:
        SystemExit: another process failed first, or this is a child; what there is to print has been printed.
    """
    try:
        yield
    except Exception as error:
        # Launchers send SIGTERM to processes that outlive another one; this one still has something to print.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        status = error.exit_status if isinstance(error, UserError) else EXIT_UNEXPECTED
        other = first_failure.wait_for_another(_NOTE_WAIT_S, local_peers()) if is_network_error(error) else None
        text = redacted(f"{type(error).__name__}: {error}")
        if other is None and not first_failure.claim(status, text):
            other = first_failure.of_another()
        write_status(status if other is None else other.status)
        if other is not None:
            # The lowest of the other ranks names the first one; that one has printed its mistakes itself.
            if other.status == EXIT_UNEXPECTED and first_failure.rank == int(other.rank == 0):
                reason = " ".join(other.text.split())
                log.error(f"rank {other.rank} failed first, so the others end too: {reason:.{_MAX_REASON}}")
            raise SystemExit(0 if is_child else other.status) from None
        write_torchrun_error(text)
        # A mistake that all ranks make is otherwise printed by rank 0, which has just left it to this rank.
        is_printed_here = isinstance(error, UserError) and not is_main_process() and first_failure.is_own()
        if not is_child and not is_printed_here:
            raise
        if isinstance(error, UserError):
            print_error(error)
        else:
            sys.excepthook(type(error), error, error.__traceback__)  # the one without secrets
        if run_log is not None:
            run_log.add_exception(error)
        raise SystemExit(0 if is_child else status) from None


def _write_once(path: Path, text: str) -> None:
    """Writes a whole file, by one process only.

    Raises:
        OSError: it is there already (`FileExistsError`), or cannot be written.
    """
    partial = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        try:
            os.link(partial, path)
        except OSError:  # a file system without links
            if path.exists():
                raise
            os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _stat_fields(pid: int | str) -> list[str]:
    """Fields of `/proc/PID/stat` after the name of the command, state first."""
    return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()


def _process_start_ns() -> int:
    """When this process was started [ns since 1970]; now where the system does not say."""
    try:
        ticks = int(_stat_fields("self")[19])
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        age_s = 0.0
    return time.time_ns() - int(age_s * 1e9)


def _how_it_ended(pid: int) -> str | None:
    """Null while the process runs, and where the system does not say; else what it knows, such as ", with status 3"."""
    try:
        fields = _stat_fields(pid)
    except OSError:
        return "" if Path("/proc/self").exists() else None
    if fields[0] not in ("Z", "X"):
        return None
    code = int(fields[-1])  # of wait(2); 0 where this process may not know it
    return f", by signal {code & 0x7F}" if code & 0x7F else f", with status {code >> 8}" if code else ""
