"""Ends a run in which a process failed or makes no progress: all processes end, with one cause and one status.

A process marks what it is about to do: start, data, step, save or validate, each with a limit of its own. A thread
measures how long it stays there; it never queries or waits for a device. A process that stays too long writes the
stacks of its threads, notes its failure in the run folder, so that the others write theirs, and ends with status 87.

When one process fails, those that wait for it fail as well, with errors of the network that hide the cause, or wait
forever. `first_failure.json` records which rank failed first, and why; other ranks print no traceback. The status is
also written to a file for the batch file that started the run: srun returns the highest status of all processes, so
the status of a process that had to be killed hides the cause.
"""

import json
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

from sd_training.cli import print_error, write_torchrun_error
from sd_training.errors import EXIT_HANG, EXIT_UNEXPECTED, TakenOverError, UserError
from sd_training.log import FOR_FILE, STARTED_NS, TIME_FORMAT, RunLog, get_logger, is_main_process, redacted

log = get_logger(__name__)

STATUS_FILE_VARIABLE = "SD_TRAINING_STATUS_FILE"
"""Environment variable of a file, of one start of a run, that gets its status."""
_NETWORK_ERROR = re.compile(
    r"gloo|nccl|Connection (?:reset|closed|refused)|Broken pipe|recv.*bytes|TCPStore|socket", re.IGNORECASE
)
"""In the text of an error of torch: a collective, or the store of the processes, lost another process."""
_NOTE_WAIT_S = 10.0
"""A process that fails because another one does waits this long for its note."""
_FIRST_ENDS_S = 10.0
"""The process that failed first has this long to print its traceback and to end before another one ends."""
_LAUNCHER_LOOKS_S = 0.3
"""torchrun checks ten times a second which processes have ended."""
_MAX_REASON = 500
"""Characters of the first failure's text in another rank's message."""
PEERS_S = 3.0
"""Between the note and the exit, so that the others see the note and write their stacks."""
OWN_END_S = 20.0
"""A process whose peer failed for another reason than a hang has this long to end by itself."""
_WRITING_S = 5.0
"""A hanging file system, or a stderr without a reader, must not keep the process from ending."""


@dataclass(frozen=True)
class Failure:
    """Why a process ended."""

    rank: int
    status: int
    text: str


class FirstFailure:
    """The note `first_failure.json` of a run folder. One that is older than this process is of an earlier start.

    Args:
        run_dir: the run folder.
        rank: of this process.
    """

    def __init__(self, run_dir: Path, rank: int) -> None:
        self.path = run_dir / "first_failure.json"
        self.rank = rank
        self.local_peers: Mapping[int, int] = {}
        """Rank → process id of the others on this machine."""
        self.check_owner: Callable[[], object] = lambda: None
        """Raises TakenOverError when another start has the folder: its processes would take the note for theirs."""

    def clear(self) -> None:
        """By rank 0, at its start."""
        self.path.unlink(missing_ok=True)

    def claim(self, status: int, text: str, rank: int | None = None) -> bool:
        """Writes the note; returns whether this call wrote it. A folder that cannot be written, or that belongs to
        another start, is not an error.

        Args:
            rank: the process that ended, if it left no note; None: this one.
        """
        note = json.dumps(asdict(Failure(self.rank if rank is None else rank, status, text)))
        with suppress(OSError, TakenOverError):
            self.check_owner()
            try:
                _write_once(self.path, note)
            except OSError:
                if self._current() is not None:
                    return False
                self.clear()  # a note of an earlier start; not cleared first: that could remove one of this moment
                _write_once(self.path, note)
            return True
        return False

    def of_another(self) -> Failure | None:
        """The first failure of this start of the run, if it was another process's."""
        failure = self._current()
        return failure if failure is not None and failure.rank != self.rank else None

    def wait_for_another(self, limit_s: float) -> Failure | None:
        """As `of_another`, for a process that failed because of another one, which may be about to write its note. A
        process of this machine that ended without a note gets one here.

        Args:
            limit_s: longest wait.
        """
        end_s = time.monotonic() + limit_s
        while (failure := self.of_another()) is None and time.monotonic() < end_s:
            for rank, pid in self.local_peers.items():
                if _has_ended(pid):
                    self.claim(EXIT_UNEXPECTED, "it ended without a message", rank)
            time.sleep(0.1)
        return failure

    def _current(self) -> Failure | None:
        try:
            if self.path.stat().st_mtime_ns < STARTED_NS:
                return None
            return Failure(**json.loads(self.path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None


def write_status(status: int) -> None:
    """Writes the status to the file that `STATUS_FILE_VARIABLE` names, unless it is 0 or another process has written
    one: the first failure counts.

    To be called before anything that a launcher may not wait for. If the file cannot be written, the launcher's own
    status applies.
    """
    path = os.environ.get(STATUS_FILE_VARIABLE)
    if path and status:
        with suppress(OSError):
            _write_once(Path(path), f"{status}\n")


def _write_once(path: Path, text: str) -> None:
    """Writes a whole file, by one process only.

    Raises:
        OSError: it is there already (`FileExistsError`), or cannot be written.
    """
    partial_file = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")
    try:
        partial_file.write_text(text, encoding="utf-8")
        os.link(partial_file, path)
    finally:
        partial_file.unlink(missing_ok=True)


def _has_ended(pid: int) -> bool:
    """True also before its parent has collected its status; false where the system cannot report it."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
        return state in ("Z", "X")
    except OSError:
        return Path("/proc/self").exists()


def is_network_error(error: BaseException) -> bool:
    """Whether an error is what a process meets when another one of the run has ended; RuntimeError is what torch raises
    in a collective, also inside a backward pass."""
    return isinstance(error, (RuntimeError, ConnectionError)) and _NETWORK_ERROR.search(str(error)) is not None


@contextmanager
def exit_together(first_failure: FirstFailure, *, is_child: bool, run_log: RunLog | None = None) -> Iterator[None]:
    """Around everything that several processes do together.

    Args:
        first_failure: note of the process that fails first.
        is_child: started by rank 0, which Lightning kills at once when a child ends with another status than 0.
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
        text = redacted(f"{type(error).__name__}: {error}")
        other = first_failure.wait_for_another(_NOTE_WAIT_S) if is_network_error(error) else None
        is_first = other is None and first_failure.claim(status, text)
        if not is_first:
            other = other or first_failure.of_another()
        write_status(status if other is None else other.status)
        if other is not None:
            # The lowest of the other ranks names the first one, which has printed its own error.
            if other.status == EXIT_UNEXPECTED and first_failure.rank == int(other.rank == 0):
                reason = " ".join(other.text.split())
                log.error(f"rank {other.rank} failed first, so the others end too: {reason:.{_MAX_REASON}}")
            if not is_child:
                _wait_for_end(first_failure.local_peers.get(other.rank))
            raise SystemExit(0 if is_child else other.status) from None
        write_torchrun_error(text)
        # A mistake that all ranks make is otherwise printed by rank 0, which has just left it to this rank.
        if not is_child and not (isinstance(error, UserError) and is_first and not is_main_process()):
            raise
        if isinstance(error, UserError):
            print_error(error)
        else:
            sys.excepthook(type(error), error, error.__traceback__)  # the one without secrets
        if run_log is not None:
            run_log.add_exception(error)
        raise SystemExit(0 if is_child else status) from None


def _wait_for_end(pid: int | None) -> None:
    """Lets a process of this machine that failed first end first: torchrun takes the one whose end it sees first for
    the cause."""
    if pid is not None:
        end_s = time.monotonic() + _FIRST_ENDS_S
        while not _has_ended(pid) and time.monotonic() < end_s:
            time.sleep(0.05)
        time.sleep(_LAUNCHER_LOOKS_S)


@dataclass
class _Section:
    """The section that a process is in."""

    section: str
    step: int
    awake_s: float = 0.0
    """How long, without the time in which the process was stopped as a whole, as SLURM does to suspend a job."""


class HangWatch:
    """One per process. Marking a section costs an assignment; nothing else happens outside of `running`.

    Args:
        limits_s: section → longest stay; null: no limit.
        run_dir: the run folder; stacks go to `hangs/rank-R.txt` in it.
        rank: of this process.
        status: what the process ends with after a hang.
    """

    def __init__(
        self, limits_s: Mapping[str, float | None], run_dir: Path, rank: int = 0, status: int = EXIT_HANG
    ) -> None:
        self.limits_s, self.run_dir, self.rank, self.status = limits_s, run_dir, rank, status
        self.first_failure = FirstFailure(run_dir, rank)
        self._current = _Section("start", 0)
        self._tick_s = min([1.0, *(limit / 5 for limit in limits_s.values() if limit is not None)])
        self._is_over = threading.Event()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Measures inside; the first section is `start`."""
        for act in (self._measure, self._watch_others):
            threading.Thread(target=act, daemon=True, name="hang watch").start()
        try:
            yield
        finally:
            self._is_over.set()

    def enter(self, section: str, step: int) -> None:
        """This process is now in `section`.

        Args:
            step: optimizer steps completed.
        """
        self._current = _Section(section, step)

    @contextmanager
    def inside(self, section: str) -> Iterator[None]:
        """A section inside another one, whose time stands still."""
        outer = self._current
        self._current = _Section(section, outer.step)
        try:
            yield
        finally:
            self._current = outer

    def _measure(self) -> None:
        """Time that this thread sleeps beyond its tick does not count: the whole process was stopped."""
        last_s = time.monotonic()
        while not self._is_over.wait(self._tick_s):
            now_s, stay = time.monotonic(), self._current
            stay.awake_s += min(now_s - last_s, 2 * self._tick_s)
            last_s = now_s
            limit_s = self.limits_s.get(stay.section)
            if limit_s is not None and stay.awake_s > limit_s:
                self._end(stay, limit_s)

    def _end(self, stay: _Section, limit_s: float) -> NoReturn:
        text = (
            f"rank {self.rank} stayed more than watch.{stay.section}_s={limit_s:g} s in section {stay.section} after "
            f"optimizer step {stay.step:,}"
        )
        shown = f"{text}; stacks follow, and those of all ranks are in {self.run_dir / 'hangs'}\n{_stacks()}"
        try:
            # The run folder or stderr may be what hangs, so each is written by its own thread.
            acts = (partial(self.first_failure.claim, EXIT_HANG, text), partial(self._write_stacks, text))
            prints = (partial(_print, f"error: {redacted(shown)}"), partial(log.error, text, extra=FOR_FILE))
            _within(_WRITING_S, partial(write_status, EXIT_HANG), *acts, *prints)
            for pid in self.first_failure.local_peers.values():
                # One that somebody stopped (SIGSTOP) continues, sees the note and ends; it would keep its device.
                with suppress(OSError):  # it has ended
                    os.kill(pid, signal.SIGCONT)
            time.sleep(PEERS_S)
        finally:
            os._exit(self.status)

    def _watch_others(self) -> None:
        """In a separate thread: a hanging file system must not stop the measuring."""
        while not self._is_over.wait(self._tick_s):
            end = self.first_failure.of_another()
            if end is None:
                continue
            if end.status == EXIT_HANG:
                try:
                    _within(_WRITING_S, partial(write_status, EXIT_HANG), partial(self._write_stacks, end.text))
                finally:
                    os._exit(self.status)
            # The first process may have found the note to be of an earlier start, and cleared it.
            if not self._is_over.wait(OWN_END_S) and self.first_failure.of_another() == end:
                os._exit(end.status if self.status else 0)

    def _write_stacks(self, text: str) -> None:
        path = self.run_dir / "hangs" / f"rank-{self.rank}.txt"
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as stream:
                stream.write(f"{time.strftime(TIME_FORMAT)} {text}\n{_stacks()}\n")


def _stacks() -> str:
    """Stacks of all threads, the innermost call first. faulthandler keeps Python's lock while it writes; a write that
    does not return would stop the process for good."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines = []
    for ident, frame in sys._current_frames().items():
        lines.append(f"Thread {ident:#x} ({names.get(ident, 'not of Python')}):")
        calls = ((inner.f_code, line) for inner, line in traceback.walk_stack(frame))
        lines += [f'  File "{code.co_filename}", line {line} in {code.co_name}' for code, line in calls]
    return "\n".join(lines)


def _print(text: str) -> None:
    with suppress(OSError, ValueError, AttributeError):  # AttributeError: there is no stderr
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def _within(limit_s: float, *acts: Callable[[], object]) -> None:
    """Each in a thread; waits for them, but no longer than the limit."""
    threads = [threading.Thread(target=act, daemon=True) for act in acts]
    end_s = time.monotonic() + limit_s
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end_s - time.monotonic()))
