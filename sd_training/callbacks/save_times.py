"""When the last save was, how long one takes, and whether one is asked for beside those of every so many steps."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class SaveTimes:
    """Shared by who asks (`Preemption`) and who saves (`Saves`)."""

    def __init__(self) -> None:
        self.is_asked = False
        """Whether all ranks are to save after this optimizer step."""
        self.last_step = -1
        """Optimizer steps completed when this start of the run saved last; -1: not yet. The same on all ranks."""
        self.longest_s = 0.0
        """The longest save so far."""
        self._last_end_s = time.monotonic()

    @property
    def since_last_s(self) -> float:
        """Time since the last save, or since this start of the run."""
        return time.monotonic() - self._last_end_s

    @contextmanager
    def saving(self, step: int) -> Iterator[None]:
        """Around a save. One that fails counts as well: the next is due when it would be, not at once."""
        began_s = time.monotonic()
        try:
            yield
        finally:
            self._last_end_s = time.monotonic()
            self.last_step = step
            self.longest_s = max(self.longest_s, self._last_end_s - began_s)
