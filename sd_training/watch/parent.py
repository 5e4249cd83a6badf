"""Ends a process that another one started for itself, when that one is gone. Needs no torch: it counts from the start.

A process that dies by kill -9 or for lack of memory cannot end what it started. What it leaves would train on, on the
same device, beside the next start of the run.
"""

import os
import signal
import threading
import time

PARENT_VARIABLE = "SD_TRAINING_PARENT"
"""Environment variable of a process that is to end with the one of this number."""
_LOOK_EVERY_S = 0.5


def end_with_parent() -> None:
    """From now on, where the environment asks for it. The processes that this one has started end as well."""
    parent = os.environ.pop(PARENT_VARIABLE, "")
    if parent.isdigit():
        threading.Thread(target=_wait, args=(int(parent),), daemon=True, name="parent").start()


def _wait(parent: int) -> None:
    """A process whose parent is gone is given another one."""
    while os.getppid() == parent:
        time.sleep(_LOOK_EVERY_S)
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
