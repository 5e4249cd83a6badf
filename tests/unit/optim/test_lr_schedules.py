"""Learning-rate schedules against their formulas and at their corners."""

import math
from typing import Any, get_args

import pytest

from sd_training.config.schema import LRScheduleConfig, LRScheduleParams, ScheduleName
from sd_training.errors import ConfigError
from sd_training.optim import LRSchedule, lr_schedule


def schedule(name: Any, num_steps: int = 110, global_batch: int = 4, **params: Any) -> LRSchedule:
    params = {"warmup_length": 10} | params
    options = LRScheduleConfig(scheduler=name, params=LRScheduleParams(**params))
    return lr_schedule(options, num_steps=num_steps, global_batch=global_batch)


@pytest.mark.parametrize("name", ["constant", "ConstantWithWarmup"])
def test_constant_with_warmup_follows_sd_training(name: str) -> None:
    factors = [schedule(name, warmup_length=4)(step) for step in range(6)]
    assert factors == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("name", ["cosine", "CosineWithWarmup"])
def test_cosine_falls_from_the_end_of_the_warmup_to_the_end_of_the_run(name: str) -> None:
    cosine = schedule(name)
    assert cosine(9) == 1.0
    assert cosine(10) == 1.0
    assert cosine(60) == pytest.approx(0.5)
    assert cosine(35) == pytest.approx(0.5 * (1 + math.cos(math.pi / 4)))
    assert cosine(110) == pytest.approx(0.0)
    assert cosine(500) == pytest.approx(0.0)


def reference(name: str, step: int, num_steps: int, warmup: int, p: dict[str, Any]) -> float:
    """The formulas, with x in float64 and no clamping but the run's own ends."""
    end = p.get("end_factor", 0.0)
    warm = min(1.0, (step + 1) / warmup) if warmup else 1.0
    if name == "inverse_sqrt":
        return warm / math.sqrt(max(step / p["reference_length"], 1))
    if step < warmup:
        return warm
    if name == "wsd":
        start = num_steps - p["decay_length"]
        x = max(0, step - start) / p["decay_length"]
        return end + (1 - end) * (1 - (x if p["decay_shape"] == "linear" else x**0.5))
    x = (step - warmup) / (num_steps - warmup)
    shape = {"linear": 1 - x, "polynomial": (1 - x) ** p.get("power", 1.0), "cosine": math.cos(math.pi * x / 2) ** 2}
    return end + (1 - end) * shape[name]


@pytest.mark.parametrize("warmup", [0, 7])
@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("linear", {}),
        ("linear", {"end_factor": 0.1}),
        ("cosine", {"end_factor": 0.25}),
        ("polynomial", {"power": 2.5, "end_factor": 0.05}),
        ("polynomial", {"power": 0.5}),
        ("inverse_sqrt", {"reference_length": 20}),
        ("wsd", {"decay_length": 30, "decay_shape": "linear"}),
        ("wsd", {"decay_length": 30, "decay_shape": "1-sqrt", "end_factor": 0.1}),
    ],
)
def test_every_step_agrees_with_the_formula(name: str, params: dict[str, Any], warmup: int) -> None:
    found = schedule(name, num_steps=80, warmup_length=warmup, **params)
    for step in range(80):
        assert found(step) == pytest.approx(reference(name, step, 80, warmup, params), abs=1e-12)


def test_inverse_sqrt_halves_at_four_times_the_reference() -> None:
    found = schedule("inverse_sqrt", warmup_length=0, reference_length=100)
    assert [found(step) for step in (0, 100, 400, 10_000)] == pytest.approx([1, 1, 0.5, 0.1])


@pytest.mark.parametrize("name", get_args(ScheduleName))
def test_every_schedule_is_pure_and_stays_between_0_and_1(name: str) -> None:
    found = schedule(name)
    backwards = [found(step) for step in reversed(range(140))]
    assert backwards[::-1] == [found(step) for step in range(140)]
    assert all(0 <= factor <= 1 for factor in backwards)
    assert max(backwards) == 1.0


@pytest.mark.parametrize("name", get_args(ScheduleName))
def test_no_warmup_starts_at_the_peak(name: str) -> None:
    assert schedule(name, warmup_length=0)(0) == 1.0


@pytest.mark.parametrize("name", get_args(ScheduleName))
@pytest.mark.parametrize("warmup", [1, 10, 11])
def test_a_run_no_longer_than_its_warmup_does_not_divide_by_zero(name: str, warmup: int) -> None:
    assert schedule(name, num_steps=10, warmup_length=warmup)(9) == min(1.0, 10 / warmup) if warmup > 1 else True
    assert 0 <= schedule(name, num_steps=1, warmup_length=warmup)(0) <= 1


@pytest.mark.parametrize(("images", "steps"), [(40, 10), (41, 11), (1, 1)])
def test_a_warmup_in_images_is_counted_in_global_batches(images: int, steps: int) -> None:
    found = schedule("constant", warmup_images=images, warmup_length=500)
    assert found(0) == 1 / steps
    assert found(steps - 1) == 1.0
    assert steps == 1 or found(steps - 2) < 1.0


def test_wsd_decays_over_a_fifth_of_the_run_when_not_told_otherwise() -> None:
    found = schedule("wsd", num_steps=1000)
    assert found(800) == 1.0
    assert found(801) < 1.0
    assert found(1000) == 0.0


def test_a_decay_that_does_not_fit_is_an_error() -> None:
    assert schedule("wsd", decay_length=100)(10) == 1.0
    with pytest.raises(ConfigError, match=r"lr_scheduler\.params\.decay_length: 101 steps after 10 of warm-up"):
        schedule("wsd", decay_length=101)
