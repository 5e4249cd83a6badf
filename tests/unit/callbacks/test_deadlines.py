import math
import time
from types import SimpleNamespace
from typing import Any

import pytest

from sd_training.callbacks.base import RunState
from sd_training.callbacks.preemption import SLURM_END_VARIABLE, UNMEASURED_SAVE_S, Preemption, deadline_s
from sd_training.errors import EXIT_STOPPED
from sd_training.signals import StopSignals
from tests.unit.callbacks.test_save import config_of


@pytest.mark.parametrize(
    ("is_asynchronous", "save_s", "step_s", "reserved_s", "needed_s"),
    [(False, 0, 0, 0, 2 * UNMEASURED_SAVE_S), (False, 30, 5, 0, 70), (True, 30, 5, 0, 100), (False, 30, 5, 90, 160)],
)
def test_what_is_left_must_fit(
    is_asynchronous: bool, save_s: float, step_s: float, reserved_s: float, needed_s: float
) -> None:
    trainer: Any = SimpleNamespace(is_global_zero=True)
    for spare_s, status in ((-1, EXIT_STOPPED), (1, 0)):
        end_s, state = time.monotonic() + needed_s + spare_s, RunState(longest_save_s=save_s)
        config = config_of(checkpoint={"asynchronous": is_asynchronous})
        preemption = Preemption(StopSignals(), config, state, end_s, reserved_s)
        preemption._longest_step_s = step_s
        assert preemption.requested_status(trainer) == status


def test_the_nearest_end_counts() -> None:
    now_s = time.monotonic()
    job = {SLURM_END_VARIABLE: str(int(time.time()) + 100)}
    for max_hours, left_s in ((None, 100), (2.0, 100), (10 / 3600, 10)):
        assert deadline_s(max_hours, now_s, job) - now_s == pytest.approx(left_s, abs=2)


@pytest.mark.parametrize("end", ["", "UNLIMITED"])
def test_no_limit(end: str) -> None:
    assert deadline_s(None, 0.0, {SLURM_END_VARIABLE: end}) == math.inf
