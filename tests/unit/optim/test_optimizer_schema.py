"""Rules between the options of optimizer and schedule."""

from typing import Any

import pytest

from sd_training.config.optimizer_schema import LRScheduleConfig, LRScheduleParams, optimizer_problems
from tests.unit.optim.toy import NAMES, config


def schedule(name: Any = "constant", **params: Any) -> LRScheduleConfig:
    return LRScheduleConfig(scheduler=name, params=LRScheduleParams(**params))


@pytest.mark.parametrize("name", NAMES)
def test_every_optimizer_is_right_with_its_usual_values(name: str) -> None:
    rate = {"learning_rate": 1.0} if name == "prodigy" else {}
    assert optimizer_problems(config(name, weight_decay=0.1, **rate), schedule()) == []


@pytest.mark.parametrize(
    ("name", "options", "start"),
    [
        (
            "adamw",
            {"momentum": 0.9},
            "optimizer.params.momentum: is 0.9, but nothing reads it with optimizer.name",
        ),
        ("muon", {"d0": 1e-4}, "optimizer.params.d0: is 0.0001, but nothing reads it"),
        ("lion", {"d_coef": 2.0}, "optimizer.params.d_coef: is 2.0, but nothing reads it"),
        ("lion", {"epsilon": 1e-6}, "optimizer.params.epsilon: is 1e-06, but nothing reads it"),
        ("adafactor", {"beta1": 0.5}, "optimizer.params.beta1: is 0.5, but nothing reads it"),
        ("adafactor", {"beta2": 0.5}, "optimizer.params.beta2: is 0.5, but nothing reads it"),
        ("muon", {"stochastic_rounding": True}, "optimizer.stochastic_rounding: is true, but muon cannot do it"),
        (
            "prodigy",
            {"learning_rate": 1.0, "rates_by_part": {"text_encoder": 1.0}},
            "optimizer.rates_by_part: prodigy",
        ),
        ("prodigy", {}, "optimizer.params.learning_rate: is 0.0001, but prodigy multiplies"),
        (
            "adamw",
            {"learning_rate": 0, "rates_by_part": {"a": 1e-6}},
            "optimizer.params.learning_rate: is 0, but",
        ),
        ("schedule_free_adamw", {"beta1": 0.0}, "optimizer.params.beta1: is 0, but schedule_free_adamw"),
    ],
)
def test_a_wrong_combination_is_one_sentence(name: str, options: dict[str, Any], start: str) -> None:
    (problem,) = optimizer_problems(config(name, **options), schedule())
    assert problem.startswith(start)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("muon", {"momentum": 0.9, "beta1": 0.8, "epsilon": 1e-6}),
        ("prodigy", {"learning_rate": 0.5, "d0": 1e-4, "d_coef": 2.0}),
        ("adamw", {"stochastic_rounding": True, "rates_by_part": {"text_encoder": 1e-6}, "beta1": 0.0}),
        ("lion", {"beta1": 0.95, "beta2": 0.99}),
    ],
)
def test_right_combinations_pass(name: str, options: dict[str, Any]) -> None:
    assert optimizer_problems(config(name, **options), schedule()) == []


@pytest.mark.parametrize(
    ("name", "params", "start"),
    [
        ("constant", {"end_factor": 0.1}, "lr_scheduler.params.end_factor: is 0.1, but nothing reads it"),
        ("inverse_sqrt", {"end_factor": 0.1}, "lr_scheduler.params.end_factor: is 0.1, but nothing reads it"),
        ("cosine", {"power": 2.0}, "lr_scheduler.params.power: is 2.0, but nothing reads it"),
        ("wsd", {"reference_length": 5}, "lr_scheduler.params.reference_length: is 5, but nothing reads it"),
        ("linear", {"decay_length": 5}, "lr_scheduler.params.decay_length: is 5, but nothing reads it"),
        ("linear", {"decay_shape": "linear"}, "lr_scheduler.params.decay_shape: is linear, but nothing reads it"),
        ("linear", {"warmup_images": 5, "warmup_length": 7}, "lr_scheduler.params.warmup_images: is 5, but"),
    ],
)
def test_a_schedule_that_does_not_read_an_option_is_named(name: str, params: dict[str, Any], start: str) -> None:
    (problem,) = optimizer_problems(config("adamw"), schedule(name, **params))
    assert problem.startswith(start)


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("linear", {"end_factor": 0.1, "warmup_images": 4000}),
        ("CosineWithWarmup", {"end_factor": 0.1}),
        ("polynomial", {"power": 2.0, "end_factor": 0.1}),
        ("inverse_sqrt", {"reference_length": 100, "warmup_length": 3}),
        ("wsd", {"decay_length": 10, "decay_shape": "linear", "end_factor": 0.1}),
    ],
)
def test_a_schedule_with_its_own_options_passes(name: str, params: dict[str, Any]) -> None:
    assert optimizer_problems(config("adamw"), schedule(name, **params)) == []


def test_schedule_free_wants_a_constant_schedule_and_no_ema() -> None:
    problems = optimizer_problems(config("schedule_free_adamw"), schedule("cosine"), use_ema=True)
    assert [problem.partition(":")[0] for problem in problems] == ["lr_scheduler.scheduler", "model.use_ema"]
    assert optimizer_problems(config("adamw"), schedule("cosine"), use_ema=True) == []


def test_prodigys_rate_is_looked_for_where_it_is_taken_from() -> None:
    assert optimizer_problems(config("prodigy"), schedule(learning_rate=1.0)) == []
    (problem,) = optimizer_problems(config("prodigy", learning_rate=1.0), schedule(learning_rate=1e-4))
    assert problem.startswith("lr_scheduler.params.learning_rate: is 0.0001, but prodigy")
