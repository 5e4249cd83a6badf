"""Learning-rate schedules at their corners."""

import math

import pytest

from sd_training.optim.lr_schedules import lr_schedule


def test_constant_with_warmup_follows_sd_training() -> None:
    schedule = lr_schedule("ConstantWithWarmup", warmup_steps=4, num_steps=100)
    assert [schedule(step) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_cosine_falls_from_the_end_of_the_warmup_to_the_end_of_the_run() -> None:
    schedule = lr_schedule("CosineWithWarmup", warmup_steps=10, num_steps=110)
    assert schedule(9) == 1.0
    assert schedule(10) == 1.0
    assert schedule(60) == pytest.approx(0.5)
    assert schedule(35) == pytest.approx(0.5 * (1 + math.cos(math.pi / 4)))
    assert schedule(110) == pytest.approx(0.0)
    assert schedule(500) == pytest.approx(0.0)


@pytest.mark.parametrize("name", ["ConstantWithWarmup", "CosineWithWarmup"])
def test_no_warmup_starts_at_the_peak(name: str) -> None:
    assert lr_schedule(name, warmup_steps=0, num_steps=10)(0) == 1.0


def test_cosine_with_a_warmup_as_long_as_the_run_does_not_divide_by_zero() -> None:
    assert lr_schedule("CosineWithWarmup", warmup_steps=10, num_steps=10)(9) == 1.0


def test_unknown_schedule_is_named() -> None:
    with pytest.raises(ValueError, match="'Linear' is not one of"):
        lr_schedule("Linear", warmup_steps=0, num_steps=1)
