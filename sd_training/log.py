"""Log lines on stderr and in `train.log`, without secrets; and the libraries' advice kept out of them.

On the terminal rank 0 prints everything, the others their errors, so that 64 ranks do not print a line 64 times.
`train.log` in the run folder has these lines over all starts, and the warnings of all ranks. A line is one write at the
end of the file, opened for it alone, so that ranks on other machines can write too. No failure of the disk ends the
run: lines that cannot be written are lost.

Import before torch, diffusers and transformers: they read the settings of `quiet_libraries` once.
"""

import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sd_training.errors import UserError
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
    """Whether this is rank 0 of the run."""
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
    """Errors of every rank, warnings and information of rank 0. A line that stderr does not take, such as a file on a
    full disk, is lost."""

    write_beside: Callable[[str], None] | None = None
    """Writes a line above a progress bar; null: there is none."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not is_for_file(record) and (record.levelno >= logging.ERROR or is_main_process())

    def emit(self, record: logging.LogRecord) -> None:
        """To the console."""
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


log = get_logger(__name__)


class RunLog(logging.Handler):
    """Collects lines from its construction on, and writes them once there is a run folder."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(LineFormatter())
        self._path: Path | None = None
        self._check: Callable[[], None] = lambda: None
        self._early: list[str] = []

    def open(self, run_dir: Path, check: Callable[[], None]) -> None:
        """Lines so far and from now on go to the file in `run_dir`, which rank 0 has made.

        Args:
            check: raises where another start has taken the folder over; then nothing is written any more.
        """
        self._path, self._check = run_dir / "train.log", check
        early, self._early = self._early, []
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
        """An error that is printed on the terminal by other means."""
        self.handle(log.makeRecord(log.name, logging.ERROR, "", 0, text, (), None))

    def _write(self, line: str) -> None:
        assert self._path is not None
        try:
            self._check()
            with self._path.open("a", encoding="utf-8", errors="replace") as stream:
                stream.write(f"{line}\n")
        except (UserError, OSError):
            return  # a full disk, or another start owns the folder: the next save says so


_ERRORS_ONLY = (
    # Lightning sets the level of its top loggers when it is imported; the ones below it, which speak, keep theirs.
    "pytorch_lightning.utilities.rank_zero",
    "lightning_fabric.utilities.rank_zero",
    "lightning_fabric.utilities.distributed",  # "Initializing distributed: GLOBAL_RANK: 0", from every rank
    "pytorch_lightning.trainer.connectors.checkpoint_connector",
    "xformers",  # a block of advice when its extension was built for another PyTorch, used or not
    "bitsandbytes.backends.cpu.ops",  # "pip install kernels", for 4-bit weights, which nothing here uses
)
_ADVICE = (
    # DDP copies such a gradient, as it did before it had views: 1×1 convolutions in channels_last on some CPUs.
    "Grad strides do not match bucket view strides",
    # A pipeline is asked for its type as diffusers before 0.40 knows it.
    "`torch_dtype` is deprecated",
    "This DataLoader will create",  # more loader processes than cores, which is what waiting for storage needs
)
_LIGHTNING = r"pytorch_lightning|lightning_fabric"
"""Its warnings are about how it is called, which is no matter of the user's: workers, intervals, old names."""


def quiet_libraries() -> None:
    """Errors only from the libraries; what the user has set stays."""
    for name in ("TRANSFORMERS_VERBOSITY", "DIFFUSERS_VERBOSITY"):
        os.environ.setdefault(name, "error")
    for name in _ERRORS_ONLY:
        logging.getLogger(name).setLevel(logging.ERROR)
    for message in _ADVICE:
        warnings.filterwarnings("ignore", message=message)
    warnings.filterwarnings("ignore", module=_LIGHTNING)
