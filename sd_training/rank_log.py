"""Log lines on stderr with the time, from the first process only, so that 64 ranks do not say a thing 64 times."""

import logging
import os
import sys
from collections.abc import Callable

from sd_training.redaction import for_terminal

TIME_FORMAT = "%Y-%m-%d %H:%M:%S"
_ROOT = logging.getLogger("sd_training")


def global_rank() -> int:
    """Rank of this process by the launcher's variables (torchrun, SLURM); 0 when started alone."""
    for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK"):
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return 0


def is_main_process() -> bool:
    """Whether this is the first process of the run."""
    return global_rank() == 0


class LineFormatter(logging.Formatter):
    """`2026-01-31 12:00:00 rank 3: warning: text`; rank 0 and information have no mark. What is logged may come from
    outside (names of samples, messages of libraries), so secrets are hidden."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(message)s", TIME_FORMAT)

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Part of `format`, which adds a traceback where the record has one."""
        rank = "" if is_main_process() else f"rank {global_rank()}: "
        level = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
        record.message = f"{rank}{level}{record.message}"
        return super().formatMessage(record)

    def format(self, record: logging.LogRecord) -> str:
        """The whole record."""
        return for_terminal(super().format(record))


class _Console(logging.StreamHandler):
    """Errors come from every rank, warnings and information from the first one only. A stderr that takes nothing, such
    as a file on a full disk, costs the line."""

    write_beside: Callable[[str], None] | None = None
    """Writes a line above a progress bar; null: there is none."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not is_for_file(record) and (record.levelno >= logging.ERROR or is_main_process())

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if self.write_beside is None:
                self.stream.write(self.format(record) + self.terminator)
                self.flush()
            else:
                self.write_beside(self.format(record))
        except OSError:
            return
        except Exception:
            self.handleError(record)


_console = _Console(sys.stderr)
_console.setFormatter(LineFormatter())
FOR_FILE = {"is_for_file": True}
"""`extra` of a record that a terminal shows in another way, such as progress."""


def is_for_file(record: logging.LogRecord) -> bool:
    """Whether a record was logged with `FOR_FILE`."""
    return "is_for_file" in vars(record)


def write_lines_by(write: Callable[[str], None] | None) -> None:
    """While a progress bar is on the terminal, lines are written by it; null: there is none any more."""
    _console.write_beside = write


def get_logger(name: str) -> logging.Logger:
    """Logger of a module. The handler is put on the package's root logger once."""
    if not _ROOT.handlers:
        _ROOT.addHandler(_console)
        _ROOT.setLevel(logging.INFO)
        _ROOT.propagate = False
    return logging.getLogger(name if name.startswith("sd_training") else f"sd_training.{name}")
