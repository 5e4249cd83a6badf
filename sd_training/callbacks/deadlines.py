"""When a process must have ended, without anybody sending a signal: `experiment.max_hours`, and SLURM's time limit."""

import time
from collections.abc import Mapping

SLURM_END_VARIABLE = "SLURM_JOB_END_TIME"
"""Environment variable of the job's end [s since 1970], set by SLURM where the job has a time limit."""

UNMEASURED_SAVE_S = 10.0
"""What a save is taken to need before there was one."""


class Deadlines:
    """The nearest of the limits.

    Args:
        max_hours: allowed running time of this start; null: none.
        started_s: when the program began [s of `time.monotonic`].
        environment: of this process.
        leave_s: what the process may need after its last save until it has ended.
    """

    def __init__(
        self, max_hours: float | None, started_s: float, environment: Mapping[str, str], leave_s: float = 0.0
    ) -> None:
        self.leave_s = leave_s
        self._ends_s = [] if max_hours is None else [started_s + 3600 * max_hours]
        end = environment.get(SLURM_END_VARIABLE, "")
        if end.isdigit():
            self._ends_s.append(time.monotonic() + int(end) - time.time())

    def is_near(self, save_s: float, step_s: float, num_in_flight: int = 0) -> bool:
        """Whether what must still be done no longer fits twice, the way out once.

        Args:
            save_s: the longest save so far; 0: unmeasured.
            step_s: the longest time between two optimizer steps so far.
            num_in_flight: saves that must be waited for before the last one.
        """
        needed_s = (2 + num_in_flight) * (save_s or UNMEASURED_SAVE_S) + 2 * step_s + self.leave_s
        return bool(self._ends_s) and min(self._ends_s) - time.monotonic() < needed_s
