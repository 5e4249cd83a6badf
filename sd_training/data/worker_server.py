"""Loader processes are forked from a small server process, never from the training process.

A child of the training process would keep a copy of its memory alive: weights, optimizer and EMA are written in place
at the next step, so every page of them would exist twice (measured: resuming a UNet of 860 million parameters on a CPU
took 10 GiB more, and was killed). It would also inherit the locks of the threads that CUDA, NCCL and remote storage
run, in whatever state they are.
"""

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.context import BaseContext
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]

_PRELOADED = ["sd_training.data.worker_imports"]
"""Imported once by the server, so that its children start at once."""


def worker_context() -> BaseContext:
    """How loader processes are started; starts the server unless it runs."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    with _importable():
        forkserver.ensure_running()
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
