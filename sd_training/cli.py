"""How every command of the project ends: a user's mistake is a sentence on stderr and a status, never a traceback."""

import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from sd_training.errors import UserError
from sd_training.rank_log import is_main_process
from sd_training.redaction import for_terminal, hide_in_tracebacks

_OTHERS_CANNOT_WRITE = 0o002
_FIRST_SAYS_IT_S = 3.0
_READER_GONE = 128 + signal.SIGPIPE
"""Exit status of a command in a pipeline whose reader has ended."""
_STDOUT = 1
_TORCHRUN_VARIABLE = "TORCHELASTIC_ERROR_FILE"
"""Environment variable of a file, of one process, whose text torchrun shows as the cause of the failure."""


def run_cli(main: Callable[[], None]) -> None:
    """Runs a command's `main`.

    Raises:
        SystemExit: the status of a `UserError` (each of its lines printed as "error: ..."), 130 after Ctrl-C;
            other exceptions are defects of the program and keep their traceback.
    """
    os.umask(os.umask(0o077) | _OTHERS_CANNOT_WRITE)
    hide_in_tracebacks()
    try:
        main()
    except UserError as error:
        if not is_main_process():
            _leave_it_to_the_first(error.exit_status)
        print_error(error)
        tell_torchrun(str(error))
        raise SystemExit(error.exit_status) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    except BrokenPipeError:
        if not _is_reader_gone():
            raise
        raise SystemExit(_READER_GONE) from None
    finally:
        _is_reader_gone()


def _is_reader_gone() -> bool:
    """Whether stdout is a pipe that nobody reads, as after `| head -1`; then what is left for it goes nowhere."""
    try:
        print(end="", flush=True)
    except BrokenPipeError:
        pass
    except OSError as error:
        raise SystemExit(f"error: stdout cannot be written: {error.strerror}") from None
    poll = select.poll()
    poll.register(_STDOUT, 0)
    if not any(event & select.POLLERR for _, event in poll.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), _STDOUT)
    return True


def print_error(error: UserError) -> None:
    """Each line of it, as "error: ..."."""
    with suppress(OSError):  # the log may lie on the disk that is full
        for line in str(error).splitlines():
            print(f"error: {for_terminal(line)}", file=sys.stderr, flush=True)


def tell_torchrun(text: str) -> None:
    """Writes down why this process ends; without it torchrun says where to read about tracebacks."""
    path = os.environ.get(_TORCHRUN_VARIABLE)
    if path:
        extra = {"timestamp": str(int(time.time()))}
        with suppress(OSError):
            said = {"message": {"message": for_terminal(text), "extraInfo": extra}}
            Path(path).write_text(json.dumps(said), encoding="utf-8")


def _leave_it_to_the_first(status: int) -> None:
    """A mistake that all processes of a run make is told by the first one: when that has ended, its launcher ends the
    others by SIGTERM. Who is still there after a while has a mistake of its own to tell."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(status))
    time.sleep(_FIRST_SAYS_IT_S)
