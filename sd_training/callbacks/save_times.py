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
        self.sealed_step = -1
        """Optimizer steps of the newest checkpoint that this start has sealed; -1: none. A save that failed, or that is
        still being written in the background, is not here."""
        self._longest_s = 0.0
        self._last_end_s = time.monotonic()
        self._in_flight_since_s: float | None = None

    @property
    def since_last_s(self) -> float:
        """Time since the last save, or since this start of the run."""
        return time.monotonic() - self._last_end_s

    @property
    def longest_s(self) -> float:
        """The longest save so far, from its beginning until it was sealed and exported; one that is being written in
        the background counts with the time that it has taken."""
        since_s = self._in_flight_since_s
        return max(self._longest_s, 0.0 if since_s is None else time.monotonic() - since_s)

    @property
    def num_in_flight(self) -> int:
        """Saves that are being written in the background; the last save of a run waits for them."""
        return int(self._in_flight_since_s is not None)

    @contextmanager
    def saving(self, step: int, *, is_written_later: bool) -> Iterator[None]:
        """Around a save. One that fails counts as well: the next is due when it would be, not at once.

        Args:
            step: optimizer steps completed.
            is_written_later: in the background; `written` says when.
        """
        began_s = time.monotonic()
        try:
            yield
        finally:
            self._last_end_s = time.monotonic()
            self.last_step = step
            if not is_written_later:
                self._longest_s = max(self._longest_s, self._last_end_s - began_s)

    def in_flight(self, began_s: float) -> None:
        """From now on a save is written in the background.

        Args:
            began_s: when its copies were begun [s of `time.monotonic`].
        """
        self._in_flight_since_s = began_s

    def written(self) -> None:
        """It is no longer; called by the thread that wrote it, however that ended."""
        self._longest_s, self._in_flight_since_s = self.longest_s, None
