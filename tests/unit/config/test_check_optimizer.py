"""Rules between the options of optimizer and schedule."""

from typing import get_args

import pytest

from sd_training.config.load import load_config
from sd_training.config.schema import OptimizerName
from tests.unit.config.loading import BASE, only

BF16 = ("model.bf16_weights=true", "optimizer.stochastic_rounding=true")


def words(name: str, schedule: str = "constant", **params: object) -> list[str]:
    chosen = [f"optimizer.name={name}", f"lr_scheduler.scheduler={schedule}"]
    return [*BASE, *chosen, *(f"{key.replace('__', '.')}={value}" for key, value in params.items())]


@pytest.mark.parametrize("name", get_args(OptimizerName))
def test_every_optimizer_is_right_with_its_usual_values(name: str) -> None:
    rate = {"optimizer__params__learning_rate": 1.0} if name == "prodigy" else {}
    load_config(words(name, optimizer__params__weight_decay=0.1, **rate))


@pytest.mark.parametrize(
    ("name", "options", "start"),
    [
        ("adamw", {"params__momentum": 0.9}, "params.momentum: is 0.9, but is only read with optimizer.name=muon, not"),
        ("muon", {"params__d0": 1e-4}, "params.d0: is 0.0001, but is only read with optimizer.name=prodigy"),
        ("lion", {"params__d_coef": 2.0}, "params.d_coef: is 2.0, but is only read"),
        ("lion", {"params__epsilon": 1e-6}, "params.epsilon: is 1e-06, but is only read with optimizer.name=adamw, "),
        ("adafactor", {"params__beta1": 0.5}, "params.beta1: is 0.5, but is only read"),
        ("adafactor", {"params__beta2": 0.5}, "params.beta2: is 0.5, but is only read"),
        (
            "prodigy",
            {"params__learning_rate": 1.0, "rates_by_part": "{text_encoder: 1.0}"},
            "rates_by_part: prodigy",
        ),
        ("prodigy", {}, "params.learning_rate: is 0.0001, but prodigy multiplies"),
        ("adamw", {"params__learning_rate": 0, "rates_by_part": "{a: 1e-6}"}, "params.learning_rate: is 0, but"),
        (
            "adamw",
            {"stochastic_rounding": "true"},
            "stochastic_rounding: is true, but is only read with model.bf16_weights",
        ),
    ],
)
def test_a_wrong_combination_is_one_sentence(name: str, options: dict[str, object], start: str) -> None:
    given = {f"optimizer__{key}": value for key, value in options.items()}
    assert only(*words(name, **given)).startswith(f"optimizer.{start}")


def test_other_optimizers_do_not_round_stochastically() -> None:
    line = only(*words("muon"), *BF16)
    assert line.startswith("optimizer.stochastic_rounding: is true, but is only read with optimizer.name=adamw, not")
    load_config([*words("adamw"), *BF16])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("muon", {"params__momentum": 0.9, "params__beta1": 0.8, "params__epsilon": 1e-6}),
        ("prodigy", {"params__learning_rate": 0.5, "params__d0": 1e-4, "params__d_coef": 2.0}),
        ("adamw", {"rates_by_part": "{text_encoder: 1e-6}", "params__beta1": 0.0}),
        ("lion", {"params__beta1": 0.95, "params__beta2": 0.99}),
    ],
)
def test_right_combinations_pass(name: str, options: dict[str, object]) -> None:
    load_config(words(name, **{f"optimizer__{key}": value for key, value in options.items()}))


@pytest.mark.parametrize(
    ("name", "params", "start"),
    [
        ("constant", {"end_factor": 0.1}, "end_factor: is 0.1, but is only read with lr_scheduler.scheduler=linear, "),
        ("inverse_sqrt", {"end_factor": 0.1}, "end_factor: is 0.1, but is only read"),
        ("cosine", {"power": 2.0}, "power: is 2.0, but is only read"),
        ("wsd", {"reference_length": 5}, "reference_length: is 5, but is only read"),
        ("linear", {"decay_length": 5}, "decay_length: is 5, but is only read"),
        ("linear", {"decay_shape": "linear"}, 'decay_shape: is "linear", but is only read'),
    ],
)
def test_a_schedule_that_does_not_read_an_option_is_named(name: str, params: dict[str, object], start: str) -> None:
    given = {f"lr_scheduler__params__{key}": value for key, value in params.items()}
    assert only(*words("adamw", name, **given)).startswith(f"lr_scheduler.params.{start}")


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
def test_a_schedule_with_its_own_options_passes(name: str, params: dict[str, object]) -> None:
    load_config(words("adamw", name, **{f"lr_scheduler__params__{key}": value for key, value in params.items()}))


def test_prodigys_rate_is_looked_for_where_it_is_taken_from() -> None:
    load_config(words("prodigy", lr_scheduler__params__learning_rate=1.0))
    rates = {"optimizer__params__learning_rate": 1.0, "lr_scheduler__params__learning_rate": 1e-4}
    assert only(*words("prodigy", **rates)).startswith("lr_scheduler.params.learning_rate: is 0.0001, but prodigy")
