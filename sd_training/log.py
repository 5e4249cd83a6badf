"""The output of a run for people: lines on stderr and in `train.log`, and one file per incident; all without secrets.

On the terminal rank 0 prints everything, the others their errors, so that 64 ranks do not print the same line 64 times.
`train.log` in the run folder has these lines over all starts, and the warnings of all ranks. A line is one write at the
end of the file, opened for it alone, so that ranks on other machines can write too. A failing disk does not end
the run: lines that cannot be written are lost.

Four kinds of secrets are masked: values of environment variables whose name looks like a secret's, texts registered
with `note_secret` (`wandb.api_key`), user, password and query of URLs, and the value of an HTTP `Authorization` header.

Import before torch, diffusers and transformers: they read the settings of `quiet_libraries` once.
"""

import functools
import json
import logging
import os
import re
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from sd_training.errors import UserError

TIME_FORMAT = "%Y-%m-%d %H:%M:%S"
STARTED_NS = time.time_ns()
"""When this process began [ns since 1970], to a fraction of a second: a command imports this module first."""


# --- Secrets ---

HIDDEN = "(hidden)"
_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL", re.IGNORECASE)
_MIN_CHARACTERS = 8
"""A shorter value of the environment is not masked; masking `1` or `true` everywhere would hide the message."""
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{0,30}://)(?:[^\s/'\"<>]*@)?([^\s'\"<>?]*)(\?[^\s'\"<>]*)?")
"""A password may contain an `@`: everything before the last one is user and password."""
_AUTHORIZATION = re.compile(r"(?i)(\bauthorization[ \t]{0,9}:[ \t]{0,9})(?:[a-z]+[ \t]+)?[^\s'\"]+")
_WITHOUT_QUERY = ("s3://", "gs://")
"""In these `?` is part of a name, or a wildcard."""
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
_noted: set[str] = set()


@functools.lru_cache(maxsize=1024)
def is_secret_name(name: str) -> bool:
    """Whether an environment variable is named like a secret."""
    return _SECRET_NAME.search(name) is not None


def note_secret(text: str | None) -> None:
    """Masks this text from now on, in this process."""
    if text:
        _noted.add(text)


def _known_secrets() -> list[str]:
    """The longest first, because one may be part of another."""
    named = (value for name, value in os.environ.items() if is_secret_name(name))
    return sorted({*_noted, *(value for value in named if len(value) >= _MIN_CHARACTERS)}, key=len, reverse=True)


def redacted(text: str, secrets: Sequence[str] | None = None) -> str:
    """`text` without secrets, those of the environment and of `note_secret` if none are given."""
    for secret in _known_secrets() if secrets is None else secrets:
        text = text.replace(secret, HIDDEN)
    return _AUTHORIZATION.sub(rf"\1{HIDDEN}", _URL.sub(_without_credentials, text))


def _without_credentials(url: re.Match[str]) -> str:
    scheme, rest, query = url[1], url[2], url[3] or ""
    return f"{scheme}{rest}{f'?{HIDDEN}' if query and not scheme.lower().startswith(_WITHOUT_QUERY) else query}"


def redacted_values(value: Any, secrets: Sequence[str] | None = None) -> Any:
    """Containers with `redacted` keys and texts. JSON is redacted before it is encoded: encoding escapes characters."""
    secrets = _known_secrets() if secrets is None else secrets
    if isinstance(value, dict):
        return {redacted_values(key, secrets): redacted_values(item, secrets) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [redacted_values(item, secrets) for item in value]
    return redacted(value, secrets) if isinstance(value, str) else value


def for_terminal(text: str) -> str:
    """`redacted`, with control characters and marks of writing direction escaped; newlines and tabs stay."""
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", redacted(text))


def hide_in_tracebacks() -> None:
    """From now on tracebacks of this process, and of its threads, are printed without secrets."""

    def show(*found: Any) -> None:
        sys.stderr.write(for_terminal("".join(traceback.format_exception(*found))))

    sys.excepthook = show
    threading.excepthook = lambda found: show(*found[:3])


# --- Lines ---

FOR_FILE = {"is_for_file": True}
"""`extra` of a record that a terminal shows in another way, such as progress."""


def global_rank() -> int:
    """Rank of this process by the launcher's variables (torchrun, SLURM); 0 when started alone."""
    for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK"):
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return 0


def is_main_process() -> bool:
    """Whether this is rank 0 of the run."""
    return global_rank() == 0


class _LogHandler(logging.Handler):
    """Writes `2026-01-31 12:00:00 rank 3: warning: text`; rank 0 and information have no mark."""

    def format(self, record: logging.LogRecord) -> str:
        rank = "" if is_main_process() else f"rank {global_rank()}: "
        level = "" if record.levelno < logging.WARNING else f"{record.levelname.lower()}: "
        return for_terminal(
            f"{time.strftime(TIME_FORMAT, time.localtime(record.created))} {rank}{level}{record.getMessage()}"
        )


class _Console(_LogHandler):
    """Errors of every rank, warnings and information of rank 0. A line that cannot be written to stderr, for example
    to a file on a full disk, is lost."""

    stream: TextIO = sys.stderr
    write_beside: Callable[[str], None] | None = None
    """Writes a line above a progress bar; None: there is no bar."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Before the lock is taken: a blocked terminal must not keep lines out of the file."""
        return "is_for_file" not in vars(record) and (record.levelno >= logging.ERROR or is_main_process())

    def emit(self, record: logging.LogRecord) -> None:
        """To the console, if it is open."""
        with suppress(OSError, ValueError, AttributeError):
            if self.write_beside is not None:
                self.write_beside(self.format(record))
            else:
                self.stream.write(f"{self.format(record)}\n")
                self.stream.flush()


_ROOT = logging.getLogger("sd_training")
_ROOT.setLevel(logging.INFO)
_ROOT.propagate = False
_console = _Console()
_ROOT.addHandler(_console)


def write_lines_by(write: Callable[[str], None] | None) -> None:
    """While a progress bar is on the terminal, it writes the lines; None: there is no bar any more."""
    _console.write_beside = write


def get_logger(name: str) -> logging.Logger:
    """Logger of a module."""
    return logging.getLogger(name if name.startswith("sd_training") else f"sd_training.{name}")


log = get_logger(__name__)


class RunLog(_LogHandler):
    """Collects lines from its construction on, and writes them once there is a run folder."""

    def __init__(self) -> None:
        super().__init__()
        self._path: Path | None = None
        self._check: Callable[[], None] = lambda: None
        self._early: list[str] = []

    def open(self, run_dir: Path, check: Callable[[], None]) -> None:
        """Lines so far and from now on go to the file in `run_dir`, which rank 0 has made.

        Args:
            check: raises where another start has taken the folder over; then nothing is written any more.
        """
        self._path, self._check = run_dir / "train.log", check
        if self._early:
            self._write(self._path, "\n".join(self._early))
            self._early.clear()

    def emit(self, record: logging.LogRecord) -> None:
        """As one line, or the lines of a block. Before the folder is known, all ranks give the same warnings."""
        if not is_main_process() and record.levelno < (logging.ERROR if self._path is None else logging.WARNING):
            return
        if self._path is None:
            self._early.append(self.format(record))
        else:
            self._write(self._path, self.format(record))

    @contextmanager
    def kept(self) -> Iterator["RunLog"]:
        """Inside, lines are collected and written; an exception that ends the run is added."""
        _ROOT.addHandler(self)
        try:
            yield self
        except (Exception, KeyboardInterrupt) as error:
            self.add_exception(error)
            raise
        finally:
            _ROOT.removeHandler(self)

    def add_exception(self, error: BaseException) -> None:
        """An error that is printed on the terminal by other means; a mistake of the user without its traceback."""
        text = str(error) if isinstance(error, UserError) else "".join(traceback.format_exception(error)).rstrip()
        text = "interrupted" if isinstance(error, KeyboardInterrupt) else text
        self.handle(log.makeRecord(log.name, logging.ERROR, "", 0, text, (), None))

    def _write(self, path: Path, lines: str) -> None:
        with suppress(UserError, OSError):  # a full disk, or another start owns the folder: the next save reports it
            self._check()
            with path.open("a", encoding="utf-8", errors="replace") as stream:
                stream.write(f"{lines}\n")


# --- Incidents ---

MAX_INCIDENTS = 1000
"""Per run; later incidents are only logged."""


def incident_path(run_dir: Path, step: int, kind: str) -> Path:
    """The file of an incident."""
    return run_dir / "incidents" / f"step={step}.{kind}.json"


def write_incident(run_dir: Path, kind: str, step: int, **details: Any) -> None:
    """Describes an event that the user should look at. Values may come from outside (names of samples, error messages)
    or be infinite: they are written as printable JSON. The same event again, after a resume, replaces its file.
    A file that cannot be written is logged: a full disk does not end the run.

    Args:
        run_dir: the run folder.
        kind: what happened, in one word; part of the file's name.
        step: optimizer steps completed before the step in question.
        details: further entries.
    """
    path = incident_path(run_dir, step, kind)
    entry = {"kind": kind, "optimizer_step": step, "time_unix_s": int(time.time()), **details}
    try:
        path.parent.mkdir(exist_ok=True)
        if path.exists() or sum(1 for _ in path.parent.glob("step=*.json")) < MAX_INCIDENTS:
            partial = path.with_name(f".{path.name}.{os.getpid()}")
            # Infinite numbers are not valid JSON; they are written as text.
            plain = json.loads(json.dumps(entry, default=str), parse_constant=lambda word: str(float(word)))
            partial.write_text(json.dumps(redacted_values(plain), indent=1) + "\n", encoding="utf-8")
            os.replace(partial, path)
    except OSError as error:
        log.error(f"{path} cannot be written: {error.strerror}")


# --- Libraries ---

_ERRORS_ONLY = (
    # Lightning sets the level of its top loggers when it is imported; the loggers below them, which print, keep theirs.
    "pytorch_lightning.utilities.rank_zero",
    "lightning_fabric.utilities.rank_zero",
    "lightning_fabric.utilities.distributed",  # "Initializing distributed: GLOBAL_RANK: 0", from every rank
    "pytorch_lightning.trainer.connectors.checkpoint_connector",
    "xformers",  # a block of advice when its extension was built for another PyTorch, used or not
    "bitsandbytes.backends.cpu.ops",  # "pip install kernels", for 4-bit weights, which nothing here uses
    "torchao",  # extensions that were built for another PyTorch, used or not
    "torch.utils._pytree",  # how torchao registers its enumerations
)
_ADVICE = (
    # DDP copies such a gradient, as it did before it had views: 1×1 convolutions in channels_last on some CPUs.
    "Grad strides do not match bucket view strides",
    # A pipeline is asked for its type as diffusers before 0.40 knows it.
    "`torch_dtype` is deprecated",
    "This DataLoader will create",  # more loader processes than cores, which is what waiting for storage needs
)
_LIGHTNING = r"pytorch_lightning|lightning_fabric"
"""Its warnings are about how this package calls it, which the user cannot change: workers, intervals, old names."""


def quiet_libraries() -> None:
    """Only errors of the libraries are shown; settings of the user are kept."""
    for name in ("TRANSFORMERS_VERBOSITY", "DIFFUSERS_VERBOSITY"):
        os.environ.setdefault(name, "error")
    for name in _ERRORS_ONLY:
        logging.getLogger(name).setLevel(logging.ERROR)
    for message in _ADVICE:
        warnings.filterwarnings("ignore", message=message)
    warnings.filterwarnings("ignore", module=_LIGHTNING)
