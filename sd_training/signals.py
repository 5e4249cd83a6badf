"""Signals to a run. The handlers only record them; `callbacks/preemption.py` acts.

SIGTERM   preemption, torchrun, `kill`: save and end with status 75
SIGUSR1   SLURM's warning before the time limit: the same
SIGUSR2   save now and continue
SIGINT    Ctrl-C: save and end with status 130, announced at once; the second one kills at once
"""

import os
import signal
import threading
import time
from contextlib import suppress
from types import FrameType
from typing import Any, NoReturn

from sd_training.errors import EXIT_INTERRUPTED, EXIT_STOPPED
from sd_training.log import TIME_FORMAT, is_main_process

_STOP = (signal.SIGTERM, signal.SIGUSR1)
_SAVE = (signal.SIGUSR2,)
FOR_THE_TRAINING_PROCESS = {*_STOP, *_SAVE, signal.SIGINT, signal.SIGHUP}
"""SLURM and a terminal send them to every process of a run; its loader processes must not receive them."""

_WARNINGS = (signal.SIGUSR1, *_SAVE)
"""Recorded from the start on, because they must not kill. The others end a process that has nothing to save yet."""
_AT_CTRL_C = "Ctrl-C: saving after this optimizer step, then ending; press Ctrl-C again to end at once without saving"
_STDERR = 2


class StopSignals:
    """Signals that this process has received. Handlers are Python's: the main thread runs them between bytecodes."""

    def __init__(self) -> None:
        self.started_s = time.monotonic()
        """When the program began [s of `time.monotonic`]."""
        self.status = 0
        """0, or the exit status that the strongest signal so far requests: `EXIT_STOPPED` or `EXIT_INTERRUPTED`."""
        self.num_saves_asked = 0
        """Number of signals so far that requested a save."""
        self._before: dict[int, Any] = {}

    def expect_warning(self) -> None:
        """From the start of the program on, the warning before the time limit is recorded and does not kill.

        Once all is saved it means nothing any more and is ignored: the interpreter, when it is taken down, puts the
        deadly default in the place of every handler of its own (`_PySignal_Fini` of CPython).
        """
        for number in _WARNINGS:
            self._handle(number)
            if number in self._before:
                self._before[number] = signal.SIG_IGN

    def listen(self) -> None:
        """From the first optimizer step on, every signal is recorded."""
        for number in (*_STOP, *_SAVE):
            self._handle(number)
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as where a shell started it in the background
            self._handle(signal.SIGINT)

    def restore(self) -> None:
        """Restores the former handlers, unless a signal was received: then another one must not disturb the shutdown.
        SIGTERM ends the process again, because a launcher may need it to."""
        if self.status:
            return
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def leave(self, status: int) -> NoReturn:
        """Ends the process with `status`. A launcher that ends all processes when the first one has ended sends
        SIGTERM, which must not change the status of the others."""
        for number in (*_STOP, *_SAVE, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        raise SystemExit(status)

    def _handle(self, number: int) -> None:
        if threading.current_thread() is threading.main_thread():
            before = signal.signal(number, self._note)
            self._before.setdefault(number, signal.SIG_DFL if before is None else before)

    def _note(self, number: int, _: FrameType | None) -> None:
        if number in _SAVE:
            self.num_saves_asked += 1
        elif number != signal.SIGINT:
            self.status = max(self.status, EXIT_STOPPED)
        elif self.status == EXIT_INTERRUPTED:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        else:
            self.status = EXIT_INTERRUPTED
            if is_main_process():
                # Not by `sys.stderr`: the handler may interrupt a write to it, and a nested one is refused. On a line
                # of its own: the terminal shows `^C`, or a bar.
                start = "\n" if os.isatty(_STDERR) else ""
                with suppress(OSError):
                    os.write(_STDERR, f"{start}{time.strftime(TIME_FORMAT)} {_AT_CTRL_C}\n".encode())
