"""Shared by all command lines: a user's mistake ends in a message on stderr and a status, never in a traceback; how a
process with a process group ends; and threads and memory of a process that computes on the CPU."""

import argparse
import atexit
import ctypes
import errno
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from sd_training.errors import EXIT_INTERRUPTED, ConfigError, UserError
from sd_training.log import for_terminal, get_logger, hide_in_tracebacks, is_main_process

log = get_logger(__name__)

_OTHERS_CANNOT_WRITE = 0o002
_RANK0_PRINTS_S = 3.0
_READER_GONE = 128 + signal.SIGPIPE
"""Exit status of a command in a pipeline whose reader has ended."""
_STDOUT = 1
_TORCHRUN_VARIABLE = "TORCHELASTIC_ERROR_FILE"
"""Environment variable of a file, of one process, whose text torchrun shows as the cause of the failure."""
_KEPT_BYTES = {-1: 2**31 - 1, -3: 2**25}
"""M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of glibc's mallopt, the largest values that it takes. By default memory goes
back to the system as soon as a network without gradients has run, and its pages are faulted in again one by one at the
next run: encoding took a third of its time for that."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_UNUSABLE = ("EACCES", "EPERM", "EROFS", "ENOENT", "EEXIST", "ENOTDIR", "EISDIR", "ENOTEMPTY", "ENAMETOOLONG")
"""Errors of the system that a user can mend."""
_QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""What a container may use: quota and period [µs], or "max"."""


def run_cli(main: Callable[[], None], *, explains_files: bool = True) -> None:
    """Runs a command's `main`. A process that then has a process group ends here (see `end_process`).

    Args:
        explains_files: a file that cannot be read or written is the user's mistake as well. Not in a training, which
            checks what it is given: what happens hours later needs its traceback.

    Raises:
        SystemExit: the status of a `UserError` (each of its lines printed as "error: ..."), 130 after Ctrl-C; other
            exceptions are defects of the program and keep their traceback.
    """
    try:
        _run(main, explains_files)
    except SystemExit as end:
        if isinstance(end.code, int) and _has_group():
            end_process(end.code)
        raise
    if _has_group():
        end_process(0)


def _has_group() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def end_process(status: int) -> NoReturn:
    """Ends this process as the interpreter would, its threads, then what is registered for the end, but takes no
    objects apart. Threads of gloo drop the tensors of a collective, for which they need the interpreter's lock; one
    that waits for it while the interpreter is taken down is ended by CPython, and aborts the process (SIGABRT)."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # a full disk, closed, none
            stream.flush()
    os._exit(status)


def _run(main: Callable[[], None], explains_files: bool) -> None:
    os.umask(os.umask(0o077) | _OTHERS_CANNOT_WRITE)
    hide_in_tracebacks()
    try:
        main()
    except BrokenPipeError:
        if not _is_reader_gone():
            raise
        raise SystemExit(_READER_GONE) from None
    except (UserError, OSError) as raised:
        error = raised if isinstance(raised, UserError) else _mistake(raised) if explains_files else None
        if error is None:
            raise
        if not is_main_process():
            # A mistake that all ranks make is printed by rank 0; its launcher then ends the others by SIGTERM. A rank
            # that is still alive after the wait prints its own error.
            status = error.exit_status
            signal.signal(signal.SIGTERM, lambda *_: os._exit(status))
            time.sleep(_RANK0_PRINTS_S)
        print_error(error)
        write_torchrun_error(str(error))
        raise SystemExit(error.exit_status) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(EXIT_INTERRUPTED) from None
    finally:
        _is_reader_gone()


def _mistake(error: OSError) -> UserError | None:
    """The mistake behind an error of the system: of a file that its message names, or a full disk."""
    is_full, file = error.errno in _FULL, error.filename2 or error.filename
    if not is_full and (file is None or errno.errorcode.get(error.errno or 0) not in _UNUSABLE):
        return None
    said, remedy = f"{file}: " * (file is not None), "free space" if is_full else "correct the path, give access to it"
    return UserError(f"{said}{error.strerror}; {remedy}, or name another place")


def _is_reader_gone() -> bool:
    """Whether stdout is a pipe without a reader, as after `| head -1`; the remaining output is then discarded."""
    with suppress(OSError):
        print(end="", flush=True)
    poll = select.poll()
    poll.register(_STDOUT, 0)
    if not any(event & select.POLLERR for _, event in poll.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), _STDOUT)
    return True


def check_counts(args: argparse.Namespace, *names: str) -> None:
    """Raises ConfigError with every option of these that is given, but is not 1 or more."""
    given = {name.replace("_", "-"): getattr(args, name) for name in names}
    if small := [f"--{name}: is {n}; give 1 or more" for name, n in given.items() if n is not None and n < 1]:
        raise ConfigError(small)


def print_error(error: UserError) -> None:
    """Prints each line of it, as "error: ..."; indented ones go on from the line before."""
    with suppress(OSError):  # the log may be on a full disk
        for line in str(error).splitlines():
            print(f"{'' if line.startswith('  ') else 'error: '}{for_terminal(line)}", file=sys.stderr, flush=True)


def write_torchrun_error(text: str) -> None:
    """Gives torchrun the reason why this process ends; without it torchrun prints advice about tracebacks."""
    if path := os.environ.get(_TORCHRUN_VARIABLE):
        message = {"message": for_terminal(text), "extraInfo": {"timestamp": str(int(time.time()))}}
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": message}), encoding="utf-8")


def set_passive_wait() -> None:
    """OpenMP threads that wait for each other sleep. By default they spin, and one that has lost its core to another
    process then delays all the others. Call before torch is imported: OpenMP reads this once."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def prepare_cpu(processes: int) -> None:
    """Before networks run on the CPU: gives this process, and those started from it, an equal share of the cores, and
    lets it keep what tensors have freed. One core is left to the loader and to other programs; OMP_NUM_THREADS set by
    the user or torchrun is kept.

    Args:
        processes: that compute on this machine.
    """
    keep_freed_memory()
    if "OMP_NUM_THREADS" in os.environ:
        return
    import torch  # train.py reports mistakes before it is imported

    cores = _usable_cores()
    threads = max(1, (cores - 1) // processes)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)
    shared = f"cores: {cores}, processes: {processes}"
    log.info(f"threads per process: {threads} ({shared}); OMP_NUM_THREADS chooses another")


def keep_freed_memory() -> None:
    """Lets this process keep what tensors on the CPU have freed, for the next ones."""
    with suppress(OSError, AttributeError):  # not glibc
        libc = ctypes.CDLL(None)
        for option, num_bytes in _KEPT_BYTES.items():
            libc.mallopt(option, num_bytes)


def _usable_cores() -> int:
    """Cores that this process may be scheduled on, or fewer by the quota of its container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = _QUOTA.read_text(encoding="ascii").split()
        return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):
        return cores
