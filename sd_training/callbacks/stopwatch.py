"""Time spent training, without the time spent saving and drawing."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Stopwatch:
    """Runs from its making; stands still inside `paused`."""

    def __init__(self) -> None:
        self._start_s = time.perf_counter()
        self._paused_s = 0.0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The time inside does not count."""
        began_s = time.perf_counter()
        try:
            yield
        finally:
            self._paused_s += time.perf_counter() - began_s

    def lap_s(self) -> float:
        """Seconds of training since the last lap; starts the next one."""
        now_s = time.perf_counter()
        elapsed_s = now_s - self._start_s - self._paused_s
        self._start_s, self._paused_s = now_s, 0.0
        return max(elapsed_s, 1e-9)
