"""Loader processes: how they start, which signals they obey, what happens when one dies.

They are forked from a small server process, never from the training process. A child of the training process would keep
a copy of its memory alive: weights, optimizer and EMA are written in place at the next step, so every page of them
would exist twice (measured: resuming a UNet of 860 million parameters on a CPU took 10 GiB more, and was killed). It
would also inherit the locks of the threads that CUDA, NCCL and remote storage run, in whatever state they are.

SLURM and a terminal send their signals to every process of a run. The server, and the loader processes after it, are
started with these blocked: they must continue until the training process has saved.
"""

import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from sd_training.errors import ConfigError, DataError
from sd_training.log import get_logger, global_rank, write_incident
from sd_training.signals import FOR_THE_TRAINING_PROCESS

log = get_logger(__name__)

MAX_DEATHS = 3
"""Within `WINDOW_STEPS`; more is no accident."""
WINDOW_STEPS = 1000
_ROOT = Path(__file__).resolve().parents[2]
_PRELOADED = [
    "sd_training.data.loader",
    "sd_training.data.sources.arrow",
    "sd_training.data.sources.tar",
    "transformers.models.clip.tokenization_clip",
]
"""Imported once by the server, so that its children start at once."""
_CHECK_EVERY_S = 1.0
_EXIT_STATUS_AFTER_S = 2.0
"""The exit status of a process is known a moment after its connections have closed."""


def worker_context() -> BaseContext:
    """How loader processes are started; starts the server unless it runs.

    Raises:
        ConfigError: the folder for temporary files leaves no room in the 108 characters that Linux has for the name of
            the server's socket.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    with _importable(), _signals_blocked(FOR_THE_TRAINING_PROCESS - {signal.SIGINT, signal.SIGTERM}):
        resource_tracker.ensure_running()  # blocks SIGINT and SIGTERM for itself, and unblocks them afterwards
        with _signals_blocked(FOR_THE_TRAINING_PROCESS):
            try:
                forkserver.ensure_running()
            except OSError as error:
                if "too long" not in str(error):
                    raise
                folder = tempfile.gettempdir()
                raise ConfigError(
                    f"TMPDIR: {folder} is too long for a socket in it; use a folder of at most 60 characters"
                ) from error
    return context


@contextmanager
def _importable() -> Iterator[None]:
    """The server imports what it preloads from PYTHONPATH only, not from this process' `sys.path`."""
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


def start_worker(environment: dict[str, str], parent: int, _: int) -> None:
    """Runs first in a loader process: one thread, the training process' environment, and no signals but SIGTERM from
    the training process `parent`.

    torch ends a loader process that hangs by SIGTERM, and notices a lost parent by the parent's id, which is the
    server's here. The sender of a signal is only known to a thread that waits for it. The server may have an older
    environment, without the keys of remote storage.
    """
    os.environ.update(environment)
    torch.set_num_threads(1)
    signal.pthread_sigmask(signal.SIG_BLOCK, FOR_THE_TRAINING_PROCESS)

    def end_with_parent() -> None:
        while _is_alive(parent):
            received = signal.sigtimedwait({signal.SIGTERM}, _CHECK_EVERY_S)
            if received is not None and received.si_pid == parent:
                break
        os._exit(0)

    threading.Thread(target=end_with_parent, daemon=True, name="sigterm").start()


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


class WorkerDeaths:
    """Counts loader processes that died, and raises when there are too many.

    What a loader process reads is a function of the position, so nothing is lost with one: its micro-batches are
    requested again.

    Args:
        run_dir: its `incidents/` gets a file for each; None writes nothing.
    """

    def __init__(self, run_dir: Path | None) -> None:
        self.run_dir = run_dir
        self._steps = deque[int]()

    def explain(self, workers: Sequence[BaseProcess], step: int, error: Exception) -> None:
        """Returns where a loader process has died and the loader may be built again.

        Args:
            workers: loader processes of a loader that raised `error`.
            step: optimizer step that waits for data.

        Raises:
            Exception: `error` itself, when all of them live.
            DataError: too many died.
        """
        how = _how_one_ended(workers)
        if how is None:
            raise error
        while self._steps and self._steps[0] <= step - WINDOW_STEPS:
            self._steps.popleft()
        self._steps.append(step)
        if self.run_dir is not None:
            write_incident(self.run_dir, f"loader-rank{global_rank()}", step, how=how)
        if len(self._steps) > MAX_DEATHS:
            raise DataError(
                f"loader processes died {len(self._steps)} times within {WINDOW_STEPS:,} optimizer steps, the last "
                f"{how} at step {step:,}; SIGKILL often means that the machine ran out of memory: lower system.workers "
                "or system.batch_size"
            )
        log.error(f"a loader process {how} at optimizer step {step:,}; the loader starts again there, nothing is lost")


def _how_one_ended(workers: Sequence[BaseProcess]) -> str | None:
    """How the first dead one ended; None where all live."""
    end_s = time.monotonic() + _EXIT_STATUS_AFTER_S
    while workers:
        for worker in workers:
            if not worker.is_alive():
                code = worker.exitcode
                if code is not None and code < 0:
                    return f"was killed by {signal.Signals(-code).name}"
                if code == 255:  # multiprocessing's status of a process whose server is gone
                    return "was lost with the server it was forked from"
                return f"ended with status {code}"
        if time.monotonic() > end_s:
            break
        time.sleep(0.05)
    return None
