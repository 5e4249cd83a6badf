"""Time spent training, without the time spent saving and drawing, which the hang watch is told of."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from sd_training.watch.hang_watch import HangWatch


class Stopwatch:
    """Runs from its making; stands still inside `paused`.

    Args:
        watch: told what is done meanwhile; null: nobody is.
    """

    def __init__(self, watch: HangWatch | None = None) -> None:
        self.watch = watch
        self._start_s = time.perf_counter()
        self._paused_s = 0.0

    @contextmanager
    def paused(self, section: str) -> Iterator[None]:
        """The time inside does not count.

        Args:
            section: of the hang watch, `save` or `validate`.
        """
        began_s = time.perf_counter()
        try:
            if self.watch is None:
                yield
            else:
                with self.watch.inside(section):
                    yield
        finally:
            self._paused_s += time.perf_counter() - began_s

    def lap_s(self) -> float:
        """Seconds of training since the last lap; starts the next one."""
        now_s = time.perf_counter()
        elapsed_s = now_s - self._start_s - self._paused_s
        self._start_s, self._paused_s = now_s, 0.0
        return max(elapsed_s, 1e-9)
