"""Loggers beside `metrics.csv`, in a thread of their own: whatever happens to them, training neither waits nor ends."""

import queue
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

from PIL import Image
from pytorch_lightning.loggers import Logger

from sd_training.log import get_logger

log = get_logger(__name__)

MAX_WAITING = 1000
"""Calls kept for a logger that is behind; later ones are lost to it."""
TAKING_LEAVE_S = 30.0
"""At the end of a run what waits is written within this time, or left."""

_Call = Callable[[Logger], Any]
_Picture = Callable[[Logger, str, Image.Image, int], Any]


class BackgroundLogger(Logger):
    """Passes calls on. The first failure is told in one warning; what cannot be done then is left out.

    Args:
        title: how a warning calls it.
        make: makes the logger; called in the thread.
        log_picture: shows a picture in it, by (logger, tag, picture, optimizer step).
        close: ends it, after the last call.
        leave_s: how long the end of a run waits for it.
    """

    def __init__(
        self,
        title: str,
        make: Callable[[], Logger],
        log_picture: _Picture,
        close: _Call = lambda logger: logger.finalize("success"),
        leave_s: float = TAKING_LEAVE_S,
    ) -> None:
        super().__init__()
        self.title = title
        self._make, self._show, self._close, self._leave_s = make, log_picture, close, leave_s
        self._calls = queue.Queue[_Call | None](MAX_WAITING)
        self._has_failed = False
        self._is_behind = False
        self._thread: threading.Thread | None = None
        self.companions: Sequence[BackgroundLogger] = ()
        """They begin to take leave when this one does."""
        self._must_have_left_s: float | None = None
        """When the wait for it ends [s of `time.monotonic`], once it was told to end."""
        self.is_left = False
        """Whether it failed, or the run ended while it was busy; then it may keep the process from ending."""

    @property
    def name(self) -> str:
        """Its title."""
        return self.title

    @property
    def version(self) -> str:
        """Lightning asks; nothing depends on it."""
        return ""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        """Numbers of an optimizer step."""
        self._pass_on(lambda logger: logger.log_metrics(metrics, step))

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """The configuration."""
        self._pass_on(lambda logger: logger.log_hyperparams(params, *args, **kwargs))

    def log_picture(self, tag: str, picture: Image.Image, step: int) -> None:
        """A picture of an optimizer step."""
        self._pass_on(lambda logger: self._show(logger, tag, picture, step))

    def save(self) -> None:
        """Lightning calls it from time to time."""
        self._pass_on(lambda logger: logger.save())

    def finalize(self, status: str) -> None:
        """Waits a while for what is still to be written."""
        for one in (self, *self.companions):
            one._begin_to_leave()
        if self._thread is None or self._must_have_left_s is None:
            return
        self._thread.join(max(0.0, self._must_have_left_s - time.monotonic()))
        if self._thread.is_alive():
            self.is_left = True
            self._warn(f"is still busy after {self._leave_s:g} s, so it is left")
        self._thread = self._must_have_left_s = None

    def _begin_to_leave(self) -> None:
        if self._thread is not None and self._must_have_left_s is None:
            self._put(None)
            self._must_have_left_s = time.monotonic() + self._leave_s

    def _pass_on(self, call: _Call) -> None:
        if self._has_failed:
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, daemon=True, name=f"logger {self.title}")
            self._thread.start()
        self._put(call)

    def _put(self, call: _Call | None) -> None:
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            if not self._is_behind:
                self._is_behind = True
                self._warn("is behind, so it misses some")

    def _work(self) -> None:
        """The thread: one call after the other, until one fails or the end is asked for."""
        try:
            logger = self._make()
            while (call := self._calls.get()) is not None:
                call(logger)
            self._close(logger)
        # Whatever a logger raises, and SystemExit of one that thinks it is alone, is not the run's business.
        except BaseException as error:
            self._has_failed = self.is_left = True
            self._warn(f"failed and is left out from now on ({type(error).__name__}: {_first_line(error)})")

    def _warn(self, what: str) -> None:
        log.warning(f"the logger {self.title} {what}; training goes on, and metrics.csv holds every number")


def leave_together(loggers: Sequence[BackgroundLogger]) -> None:
    """The end of a run waits for all of them as long as for one."""
    for logger in loggers:
        logger.companions = [other for other in loggers if other is not logger]


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else ""
