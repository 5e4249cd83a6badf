"""The status that a run ends with, for the batch file that started it.

srun gives the highest status of all processes, so that of one that has to be killed after the others have ended hides
theirs.
"""

import os
import socket
from contextlib import suppress
from pathlib import Path

STATUS_FILE_VARIABLE = "SD_TRAINING_STATUS_FILE"
"""Environment variable of a file, of one start of a run, that gets its status."""


def tell_status(status: int) -> None:
    """Writes it down, unless it is 0 or another process has told one: the first end says why.

    To be called before anything that a launcher may not wait for. A file that cannot be written stops nobody: the
    launcher's own status is left.
    """
    path = os.environ.get(STATUS_FILE_VARIABLE)
    if path and status:
        with suppress(OSError):
            _write_once(Path(path), f"{status}\n")


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
