"""Loader processes that end before their work is done: killed for memory, or with the server they are forked from.

What a loader process reads is a function of the position, so nothing is lost with one: the micro-batches that were
under way are asked for again.
"""

import signal
import time
from collections import deque
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

from sd_training.errors import DataError
from sd_training.incident_log import note_incident
from sd_training.rank_log import get_logger

log = get_logger(__name__)

MAX_DEATHS = 3
"""Within `WINDOW_STEPS`; more is no accident."""
WINDOW_STEPS = 1000
_SETTLES_S = 2.0
"""The end of a process is known a moment after its connections have closed."""


class WorkerDeaths:
    """Counts them, and says when it is too much.

    Args:
        run_dir: its `incidents.jsonl` gets a line for each; None writes nothing.
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
        how = _how_they_ended(workers)
        if not how:
            raise error
        while self._steps and self._steps[0] <= step - WINDOW_STEPS:
            self._steps.popleft()
        self._steps.append(step)
        if self.run_dir is not None:
            note_incident(self.run_dir, "loader process died", step, how=how)
        if len(self._steps) > MAX_DEATHS:
            raise DataError(
                f"loader processes died {len(self._steps)} times within {WINDOW_STEPS:,} optimizer steps, the last "
                f"{how} at step {step:,}; SIGKILL often means that the machine ran out of memory: lower system.workers "
                "or system.batch_size"
            )
        log.error(f"a loader process {how} at optimizer step {step:,}; the loader starts again there, nothing is lost")


def _how_they_ended(workers: Sequence[BaseProcess]) -> str:
    """Of the first one that has; empty where all live."""
    end_s = time.monotonic() + _SETTLES_S
    while workers:
        for worker in workers:
            if not worker.is_alive():
                return _reason(worker.exitcode)
        if time.monotonic() > end_s:
            break
        time.sleep(0.05)
    return ""


def _reason(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return f"was killed by {signal.Signals(-exit_code).name}"
    if exit_code == 255:  # what multiprocessing says of a process whose server is gone
        return "was lost with the server it was forked from"
    return f"ended with status {exit_code}"
