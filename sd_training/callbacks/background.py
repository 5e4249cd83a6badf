"""One piece of work beside the training, and its end."""

import threading
from collections.abc import Callable


class Background:
    """Runs one piece of work at a time in a thread."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    @property
    def is_busy(self) -> bool:
        """Whether there is work that nobody has waited for."""
        return self._thread is not None

    @property
    def is_running(self) -> bool:
        """Whether the work is still under way."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, act: Callable[[], None]) -> None:
        """Begins; the work before must have been waited for."""
        assert self._thread is None, "one at a time"
        # Not to be waited for by the interpreter: a process that dies may leave others without an answer.
        self._thread = threading.Thread(target=self._run, args=(act,), name="save", daemon=True)
        self._thread.start()

    def wait(self, limit_s: float | None = None) -> None:
        """Until the work is done; nothing to do is done.

        Raises:
            TimeoutError: it takes longer.
            Exception: what the work raised.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return
        thread.join(limit_s)
        if thread.is_alive():
            raise TimeoutError(f"it was not written within {limit_s:.0f} s")
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _run(self, act: Callable[[], None]) -> None:
        try:
            act()
        except BaseException as error:
            self._failure = error
