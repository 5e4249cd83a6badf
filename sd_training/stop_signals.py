"""Signals that ask a run to stop. The handlers only take a note; `callbacks/preemption.py` acts on it.

SIGTERM   preemption, torchrun, `kill`: save and end with status 75
SIGUSR1   SLURM's warning before the time limit: the same
SIGINT    Ctrl-C: save and end with status 130; the second one kills at once
"""

import os
import signal
import threading
from types import FrameType
from typing import Any, NoReturn

STOPPED = 75
"""Exit status: stopped by a signal, saved, start me again. EX_TEMPFAIL of sysexits.h, which nothing else here uses."""
INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells give it: a person stopped the run, nothing should start it again."""

_TO_BE_STARTED_AGAIN = (signal.SIGTERM, signal.SIGUSR1)


class StopSignals:
    """What this process was asked to do. Handlers are Python's, so the main thread runs them between two bytecodes."""

    def __init__(self) -> None:
        self.status = 0
        """0, or the exit status that the strongest signal so far asks for: `STOPPED` or `INTERRUPTED`."""
        self._before: dict[int, Any] = {}

    def expect_warning(self) -> None:
        """From the start of the program on, the warning before the time limit is noted and kills nothing.

        SIGTERM and Ctrl-C still end a process that has nothing to save yet.
        """
        self._handle(signal.SIGUSR1)

    def listen(self) -> None:
        """From the first optimizer step on, every signal is noted."""
        for number in _TO_BE_STARTED_AGAIN:
            self._handle(number)
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as in the background of a shell
            self._handle(signal.SIGINT)

    def restore(self) -> None:
        """The handlers of before, unless a signal came: then another one must not break the way out."""
        if self.status:
            return
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def leave(self, status: int) -> NoReturn:
        """Ends the process with `status`. A launcher that ends all processes when the first one has ended sends
        SIGTERM, which must not change the status of the others on their last metres."""
        for number in (*_TO_BE_STARTED_AGAIN, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        raise SystemExit(status)

    def _handle(self, number: int) -> None:
        if threading.current_thread() is threading.main_thread():
            before = signal.signal(number, self._note)
            self._before.setdefault(number, signal.SIG_DFL if before is None else before)

    def _note(self, number: int, _: FrameType | None) -> None:
        if number != signal.SIGINT:
            self.status = max(self.status, STOPPED)
        elif self.status == INTERRUPTED:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        else:
            self.status = INTERRUPTED
