"""Files and folders that survive a crash: flush, replace, remove; errors with the cause of a failed write. Needs no
torch."""

import errno
import os
import re
import shutil
import stat
from pathlib import Path

_NOT_EXECUTABLE = 0o666
_SYSTEM_ERROR = re.compile(r"\bos error (\d+)|\bcode: (\d+)")


def make_empty_folder(folder: Path) -> None:
    """Makes an empty folder; whatever had the name before is removed."""
    remove_durably(folder)
    folder.mkdir(parents=True)


def flush_folder(folder: Path) -> None:
    """Makes renames, creations and removals inside `folder` durable."""
    _flush(folder)


def flush_file(path: Path) -> None:
    """Makes a file durable, and as accessible as its folder is.

    Writers disagree about permissions: safetensors makes files that only the owner can read, others follow the umask.
    """
    path.chmod(stat.S_IMODE(path.parent.stat().st_mode) & _NOT_EXECUTABLE)
    _flush(path)


def flush_tree(folder: Path) -> None:
    """Makes everything below `folder` durable, and files as accessible as their folders are."""
    for path in sorted(folder.rglob("*"), reverse=True):  # a folder after what it holds
        if path.is_dir():
            flush_folder(path)
        else:
            flush_file(path)
    flush_folder(folder)


def forget_cached(path: Path) -> None:
    """Asks the system to drop its copy of a flushed file, so that reading it again reads the disk."""
    if hasattr(os, "posix_fadvise"):
        with path.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def remove_durably(path: Path) -> None:
    """Removes a file, a link (not what it points to) or a folder; nothing happens when it does not exist.

    Raises:
        OSError: it could not be removed.
    """
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def remove_quietly(path: Path) -> None:
    """`remove_durably` while another error is on its way up: that one is the one to report."""
    try:
        remove_durably(path)
    except OSError:
        shutil.rmtree(path, ignore_errors=True)


def replace_text(path: Path, text: str) -> None:
    """Writes a small file beside `path` and renames it, so that `path` is whole after a kill or on a full disk: the new
    one or the one before. Links are followed; a device or a pipe is written to, as a rename would put an end to it.

    Raises:
        OSError: it could not be written; nothing is left beside.
    """
    path = path.resolve()
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    beside = path.with_name(f"{path.name}.partial")
    try:
        beside.write_text(text, encoding="utf-8")
        _flush(beside)
        os.replace(beside, path)
    except OSError:
        remove_quietly(beside)
        raise


def system_error(error: Exception) -> OSError | None:
    """The system's error inside one of safetensors or tokenizers, which have it in their text only; None for others."""
    found = _SYSTEM_ERROR.search(str(error))
    return None if found is None else OSError(int(found[1] or found[2]), str(error))


def write_failure(what: str, folder: Path, error: BaseException) -> OSError:
    """The error to raise when `what` could not be written: names the folder, the cause and the free space [GiB]."""
    number = error.errno if isinstance(error, OSError) and error.errno else errno.EIO
    cause = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    try:
        existing = next(path for path in (folder, *folder.absolute().parents) if os.path.exists(path))
        free = f"{shutil.disk_usage(existing).free / 2**30:.2f} GiB are free there"
    except OSError as unknown:
        free = f"free space unknown ({unknown})"
    return OSError(number, f"{what} could not be written to {folder}: {cause}; {free}")


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
