import time

import pytest

from sd_training.callbacks.preemption import SLURM_END_VARIABLE, UNMEASURED_SAVE_S, Deadlines


@pytest.mark.parametrize(("save_s", "step_s", "needed_s"), [(0, 0, 2 * UNMEASURED_SAVE_S), (30, 5, 70)])
def test_what_is_left_must_fit_twice(save_s: float, step_s: float, needed_s: float) -> None:
    now_s = time.monotonic()
    for spare_s, is_near in ((-1, True), (1, False)):
        deadlines = Deadlines(2.0, now_s + needed_s + spare_s - 7200, {})
        assert deadlines.is_near(save_s, step_s) == is_near


def test_a_save_in_the_background_must_fit_beside_the_last_one() -> None:
    now_s = time.monotonic()
    for spare_s, is_near in ((-1, True), (1, False)):
        deadlines = Deadlines(2.0, now_s + 100 + spare_s - 7200, {})
        assert deadlines.is_near(30, 5, num_in_flight=1) == is_near


def test_what_comes_after_the_save_must_fit_as_well() -> None:
    now_s = time.monotonic()
    for spare_s, is_near in ((-1, True), (1, False)):
        deadlines = Deadlines(2.0, now_s + 70 + 90 + spare_s - 7200, {}, shutdown_s=90)
        assert deadlines.is_near(30, 5) == is_near


def test_the_nearest_end_counts() -> None:
    now_s = time.monotonic()
    for left_s, is_near in ((10, True), (1000, False)):
        job = {SLURM_END_VARIABLE: str(int(time.time()) + left_s)}
        assert Deadlines(None, now_s, job).is_near(0, 0) == is_near
        assert Deadlines(2.0, now_s, job).is_near(0, 0) == is_near
        assert Deadlines(10 / 3600, now_s, job).is_near(0, 0)


@pytest.mark.parametrize("end", ["", "UNLIMITED"])
def test_no_limit(end: str) -> None:
    assert not Deadlines(None, 0.0, {SLURM_END_VARIABLE: end}).is_near(1e9, 1e9)
