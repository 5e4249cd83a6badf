"""Runs a loop in a forked process and ends it with SIGKILL at a random moment, as a preempted machine does."""

import os
import select
import signal
import time
from collections.abc import Callable

import torch


def killed_after(seconds: float, work: Callable[[Callable[[int], None]], None]) -> list[int]:
    """Forks, runs `work(done)`, kills it `seconds` after its first sign of life, and returns what it reported as done.

    Args:
        seconds: from the moment `work` begins to the kill [s].
        work: loops for ever; it calls `done(n)` with 0 <= n < 2^32 after each finished piece.
    """
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(read_end)
            torch.set_num_threads(1)  # the threads of the parent's pool do not exist here: waiting for them is for ever
            os.write(write_end, b"ready...")
            work(lambda number: os.write(write_end, b"%08x" % number) and None)
        finally:
            os._exit(1)  # `work` ended: a test must not go on in two processes
    os.close(write_end)
    try:
        assert os.read(read_end, 8) == b"ready..."
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), "the loop ended by itself"
        return _numbers(read_end)
    finally:
        os.close(read_end)


def _numbers(read_end: int) -> list[int]:
    content = b""
    while select.select([read_end], [], [], 0)[0] and (more := os.read(read_end, 1 << 16)):
        content += more
    return [int(content[i : i + 8], 16) for i in range(0, len(content) - len(content) % 8, 8)]
