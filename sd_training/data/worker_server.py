"""Loader processes are forked from a small server process, never from the training process.

A child of the training process would keep a copy of its memory alive: weights, optimizer and EMA are written in place
at the next step, so every page of them would exist twice (measured: resuming a UNet of 860 million parameters on a CPU
took 10 GiB more, and was killed). It would also inherit the locks of the threads that CUDA, NCCL and remote storage
run, in whatever state they are.

SLURM and a terminal send their signals to every process of a run. The server, and the loader processes after it, are
started with these blocked: they must go on until the training process has saved.
"""

import multiprocessing
import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import BaseContext
from pathlib import Path

from sd_training.errors import ConfigError
from sd_training.stop_signals import FOR_THE_TRAINING_PROCESS

_ROOT = Path(__file__).resolve().parents[2]

_PRELOADED = ["sd_training.data.worker_imports"]
"""Imported once by the server, so that its children start at once."""

_LOOK_EVERY_S = 1.0


def worker_context() -> BaseContext:
    """How loader processes are started; starts the server unless it runs."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    with _importable(), _signals_blocked(FOR_THE_TRAINING_PROCESS - {signal.SIGINT, signal.SIGTERM}):
        resource_tracker.ensure_running()  # blocks SIGINT and SIGTERM for itself, and unblocks them afterwards
        with _signals_blocked(FOR_THE_TRAINING_PROCESS):
            _start()
    return context


@contextmanager
def _importable() -> Iterator[None]:
    """The server looks for what it preloads in its own path only, which knows nothing of ours."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(_ROOT), before)))
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


@contextmanager
def _signals_blocked(numbers: set[signal.Signals]) -> Iterator[None]:
    """A process started inside never gets these signals; this one gets them afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def obey_only(pid: int) -> None:
    """In a loader process: ends it when the process `pid` says so by SIGTERM, or is gone; nobody else's SIGTERM does.

    torch ends a loader process that hangs by SIGTERM, and notices a lost parent by the parent's id, which is the
    server's here. The sender of a signal is only known to who waits for it.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, FOR_THE_TRAINING_PROCESS)

    def wait() -> None:
        while _is_alive(pid):
            received = signal.sigtimedwait({signal.SIGTERM}, _LOOK_EVERY_S)
            if received is not None and received.si_pid == pid:
                break
        os._exit(0)

    threading.Thread(target=wait, daemon=True, name="sigterm").start()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _start() -> None:
    """The server listens on a socket in the folder for temporary files.

    Raises:
        ConfigError: that folder's name leaves no room in the 108 characters that Linux has for a socket's.
    """
    try:
        forkserver.ensure_running()
    except OSError as error:
        if "too long" not in str(error):
            raise
        folder = tempfile.gettempdir()
        raise ConfigError(
            f"TMPDIR: {folder} is too long for a socket in it; use a folder of at most 60 characters"
        ) from error
