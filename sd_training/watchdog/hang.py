"""Ends a run in which a process makes no progress, and writes the stacks of every process.

A process marks what it is about to do: start, data, step, save or validate, each with a limit of its own. A thread
measures how long it stays there; it neither asks nor waits for a device. A process that stays too long writes the
stacks of its threads, notes its failure in the run folder, so that the others write theirs, and ends with status 87.

The thread needs Python's lock. Where something holds that for longer than the limit, faulthandler's own thread, which
does not need it, writes the stacks to stderr; the process then ends when the lock is released, or by its peers or its
launcher.
"""

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NoReturn

from sd_training.errors import EXIT_HANG
from sd_training.log import FOR_FILE, get_logger
from sd_training.watchdog.first_failure import Failure, FirstFailure, write_status

log = get_logger(__name__)

PEERS_S = 3.0
"""Between the note and the exit, so that the others see the note and write their stacks."""
OWN_END_S = 20.0
"""A process whose peer failed for another reason than a hang has this long to end by itself."""
_STDERR = 2
_WRITING_S = 5.0
"""A file system that hangs, or a stderr that nobody reads, must not keep the process from ending."""
_LOCK_HELD_S = 5.0
"""Beyond the limit, until faulthandler takes the lock for lost."""


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
        self.limits_s = limits_s
        self.run_dir = run_dir
        self.rank = rank
        self.status = status
        self.first_failure = FirstFailure(run_dir, rank)
        self.local_peers: Mapping[int, int] = {}
        """Rank → process id of the others on this machine."""
        self._current = _Section("start", 0)
        self._tick_s = min([1.0, *(limit / 5 for limit in limits_s.values() if limit is not None)])
        self._is_over = threading.Event()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Measures inside; the first section is `start`."""
        self._current = _Section("start", 0)
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
            if limit_s is None:
                faulthandler.cancel_dump_traceback_later()
            elif stay.awake_s > limit_s:
                self._end(stay, limit_s)
            else:
                faulthandler.dump_traceback_later(limit_s + _LOCK_HELD_S, file=_STDERR)
        faulthandler.cancel_dump_traceback_later()

    def _end(self, stay: _Section, limit_s: float) -> NoReturn:
        text = (
            f"rank {self.rank} stayed more than watch.{stay.section}_s={limit_s:g} s in section {stay.section} after "
            f"optimizer step {stay.step:,}"
        )
        shown = f"error: {text}; stacks follow, and those of all ranks are in {self.run_dir / 'hangs'}\n{stacks()}"

        def write_note() -> None:
            self.first_failure.claim(EXIT_HANG, text)
            self._write_stacks(text)

        try:
            # The run folder may be what does not answer, so each has a thread of its own.
            in_log = partial(log.error, text, extra=FOR_FILE)
            _within(_WRITING_S, lambda: write_status(EXIT_HANG), write_note, lambda: _print(shown), in_log)
            for pid in self.local_peers.values():
                # One that somebody stopped (SIGSTOP) continues, sees the note and ends; it would keep its device.
                with suppress(OSError):  # it has ended
                    os.kill(pid, signal.SIGCONT)
            time.sleep(PEERS_S)
        finally:
            os._exit(self.status)

    def _watch_others(self) -> None:
        """A thread of its own: a file system that hangs must not stop the measuring."""
        while not self._is_over.wait(self._tick_s):
            end = self.first_failure.of_another()
            if end is not None:
                self._follow(end)

    def _follow(self, end: Failure) -> None:
        if end.status == EXIT_HANG:
            try:
                _within(_WRITING_S, lambda: write_status(EXIT_HANG), lambda: self._write_stacks(end.text))
            finally:
                os._exit(self.status)
        # The first process may have found the note to be of an earlier start, and cleared it.
        if not self._is_over.wait(OWN_END_S) and self.first_failure.of_another() == end:
            os._exit(end.status if self.status else 0)

    def _write_stacks(self, text: str) -> None:
        path = self.run_dir / "hangs" / f"rank-{self.rank}.txt"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as stream:
                stream.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n{stacks()}\n")
        except OSError as error:
            _print(f"{path} cannot be written: {error}")


def stacks() -> str:
    """Stacks of all threads, the innermost call first. faulthandler keeps Python's lock while it writes; a write that
    does not return would stop the process for good."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines = []
    for ident, frame in sys._current_frames().items():
        lines.append(f"Thread {ident:#x} ({names.get(ident, 'not of Python')}):")
        inner: FrameType | None = frame
        while inner is not None:
            lines.append(f'  File "{inner.f_code.co_filename}", line {inner.f_lineno} in {inner.f_code.co_name}')
            inner = inner.f_back
    return "\n".join(lines)


def _print(text: str) -> None:
    """To stderr, whatever is behind it."""
    with suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def _within(limit_s: float, *acts: Callable[[], None]) -> None:
    """Each in a thread; waits for them, but no longer than the limit."""
    threads = [threading.Thread(target=act, daemon=True) for act in acts]
    end_s = time.monotonic() + limit_s
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end_s - time.monotonic()))
