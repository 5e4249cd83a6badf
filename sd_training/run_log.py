"""`train.log` in the run folder: what the run said on the terminal, over all of its starts.

The first process writes every line, the others their warnings and errors; ranks and secrets are marked and hidden as on
the terminal. A line is one write at the end of the file, opened for it alone, so that ranks on other machines can write
too and nothing is held open. Nothing that the disk does ends the run: lines that cannot be written are lost.
"""

import logging
import os
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sd_training.errors import UserError
from sd_training.rank_log import LineFormatter, get_logger, is_main_process

log = get_logger(__name__)

FILE_NAME = "train.log"
MAX_BYTES = 32 * 2**20
"""A larger file becomes `train.log.1`, in place of the one before: both take at most twice as much."""
_MAX_EARLY = 1000
"""Lines that are kept until the run folder is this process's [count]."""


class RunLog(logging.Handler):
    """Collects lines from its making on, and writes them once there is a run folder."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(LineFormatter())
        self._path: Path | None = None
        self._check: Callable[[], None] = lambda: None
        self._early: deque[str] = deque(maxlen=_MAX_EARLY)
        self._is_failing = self._is_cut = False

    def open(self, run_dir: Path, check: Callable[[], None]) -> None:
        """Lines so far and from now on go to the file in `run_dir`, which the first process has made.

        Args:
            check: raises where another start has taken the folder over; then nothing is written any more.
        """
        self._path, self._check = run_dir / FILE_NAME, check
        early, self._early = self._early, deque(maxlen=_MAX_EARLY)
        for line in early:
            self._write(line)

    def filter(self, record: logging.LogRecord) -> bool:
        """Before the folder is known, all ranks warn of the same things."""
        return is_main_process() or record.levelno >= (logging.ERROR if self._path is None else logging.WARNING)

    def emit(self, record: logging.LogRecord) -> None:
        """As one line, or the lines of a block."""
        line = self.format(record)
        if self._path is None:
            self._early.append(line)
        else:
            self._write(line)

    @contextmanager
    def kept(self) -> Iterator["RunLog"]:
        """Inside, lines are collected and written; an exception that ends the run is added."""
        root = logging.getLogger("sd_training")
        root.addHandler(self)
        try:
            yield self
        except KeyboardInterrupt:
            self.add("interrupted")
            raise
        except Exception as error:
            self.add_exception(error)
            raise
        finally:
            root.removeHandler(self)

    def add_exception(self, error: Exception) -> None:
        """A mistake of the user without its traceback."""
        is_mistake = isinstance(error, UserError)
        self.add(str(error) if is_mistake else "".join(traceback.format_exception(error)).rstrip())

    def add(self, text: str) -> None:
        """An error that was, or will be, told on the terminal by other means."""
        self.handle(log.makeRecord(log.name, logging.ERROR, "", 0, text, (), None))

    def _write(self, line: str) -> None:
        assert self._path is not None
        try:
            self._check()
            _append(self._path, f"{line}\n".encode(errors="replace"), after_cut=self._is_cut)
            self._is_failing = self._is_cut = False
            if is_main_process() and self._path.stat().st_size > MAX_BYTES:
                os.replace(self._path, self._path.with_name(f"{FILE_NAME}.1"))
        except (UserError, FileNotFoundError):
            return  # the next save ends this process, on all ranks; or the first process has not made the folder yet
        except OSError as error:
            self._is_cut = True
            if not self._is_failing:
                self._is_failing = True  # before the warning, which comes here as well
                log.warning(f"{self._path} cannot be written ({error.strerror}); lines until it can are lost there")


def _append(path: Path, line: bytes, *, after_cut: bool) -> None:
    """
    Args:
        after_cut: the line before may have been written in part.

    Raises:
        OSError: it could not be written, or not all of it.
    """
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        line = b"\n" + line if after_cut else line
        while line:
            line = line[os.write(handle, line) :]
    finally:
        os.close(handle)
