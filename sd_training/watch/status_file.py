"""What a run ends with, for who started it: the status for the batch file, the reason for torchrun.

srun gives the highest status of all processes, so that of one that has to be killed after the others have ended hides
theirs.
"""

import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

STATUS_FILE_VARIABLE = "SD_TRAINING_STATUS_FILE"
"""Environment variable of a file, of one start of a run, that gets its status."""

_TORCHRUN_VARIABLE = "TORCHELASTIC_ERROR_FILE"
"""Environment variable of a file, of one process, whose text torchrun shows as the cause of the failure."""


def tell_status(status: int) -> None:
    """Writes it down, unless it is 0 or another process has told one: the first end says why.

    To be called before anything that a launcher may not wait for. A file that cannot be written stops nobody: the
    launcher's own status is left.
    """
    path = os.environ.get(STATUS_FILE_VARIABLE)
    if path and status:
        with suppress(OSError):
            _write_once(Path(path), f"{status}\n")


def tell_torchrun(text: str) -> None:
    """Writes down why this process ends, in one line; without it torchrun says where to read about tracebacks."""
    path = os.environ.get(_TORCHRUN_VARIABLE)
    if path:
        extra = {"timestamp": str(int(time.time()))}
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}), encoding="utf-8")


def _write_once(path: Path, text: str) -> None:
    partial = path.with_name(f"{path.name}.{socket.gethostname()}.{os.getpid()}")
    try:
        with partial.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        try:
            os.link(partial, path)  # whole at once, and by one process only
        except FileExistsError:
            return
        except OSError:  # a file system without links
            if not path.exists():
                os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
