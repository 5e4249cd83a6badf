"""Products that make no sense are refused, each by the option that is wrong."""

from typing import Any

import pytest

from sd_training.config.check import objective_problems
from sd_training.config.schema import (
    PRESETS,
    LossConfig,
    LossWeightingConfig,
    ObjectiveConfig,
    ShiftConfig,
    TimestepDensityConfig,
    with_preset,
)


def weighting(name: Any, **options: Any) -> dict[str, Any]:
    return {"loss_weighting": LossWeightingConfig(name=name, **options)}


def density(name: Any, **options: Any) -> dict[str, Any]:
    return {"timestep_density": TimestepDensityConfig(name=name, **options)}


INVALID: list[tuple[str, dict[str, Any], str]] = [
    # prediction type, options, the option that the problem names
    ("epsilon", {"rescale_betas_zero_snr": True}, "rescale_betas_zero_snr"),
    ("flow_prediction", {"rescale_betas_zero_snr": True}, "rescale_betas_zero_snr"),
    ("edm", {"rescale_betas_zero_snr": True, **density("log_normal")}, "rescale_betas_zero_snr"),
    ("epsilon", weighting("sigma_sqrt"), "loss_weighting.name"),
    ("v_prediction", weighting("cosmap"), "loss_weighting.name"),
    ("sample", weighting("edm"), "loss_weighting.name"),
    ("flow_prediction", weighting("edm"), "loss_weighting.name"),
    ("edm", {**weighting("sigma_sqrt"), **density("log_normal")}, "loss_weighting.name"),
    ("edm", {}, "timestep_density.name"),
    ("edm", density("logit_normal"), "timestep_density.name"),
    ("epsilon", density("log_normal"), "timestep_density.name"),
    ("flow_prediction", density("log_normal"), "timestep_density.name"),
    ("epsilon", {"sigma_data": 0.5}, "sigma_data"),
    ("flow_prediction", {"sigma_data": 0.5}, "sigma_data"),
    ("epsilon", {"shift": ShiftConfig(mode="static", value=3.0)}, "shift.mode"),
    ("v_prediction", {"shift": ShiftConfig(mode="tokens")}, "shift.mode"),
    ("edm", {"shift": ShiftConfig(mode="static", value=3.0), **density("log_normal")}, "shift.mode"),
    ("flow_prediction", {"offset_noise": 0.1}, "offset_noise"),
    # Options that nothing would read.
    ("epsilon", {**weighting("constant", gamma=3.0)}, "loss_weighting.gamma"),
    ("epsilon", {**weighting("min_snr", p2_k=2.0)}, "loss_weighting.p2_k"),
    ("epsilon", {"loss": LossConfig(huber_delta=0.3)}, "loss.huber_delta"),
    ("epsilon", {**density("mode", mean=1.0)}, "timestep_density.mean"),
    ("flow_prediction", {"shift": ShiftConfig(mode="tokens", value=3.0)}, "shift.value"),
    ("flow_prediction", {"shift": ShiftConfig(mode="static", base_shift=0.7)}, "shift.base_shift"),
    # Values out of range.
    ("epsilon", density("uniform", low=0.7, high=0.3), "timestep_density.low"),
    (
        "epsilon",
        {"loss": LossConfig(name="huber", huber_delta=2.0, huber_schedule="exponential")},
        "loss.huber_delta",
    ),
    ("epsilon", {"snr_gamma": 5.0, **weighting("p2")}, "snr_gamma"),
    ("epsilon", {"snr_gamma": 4.0, **weighting("min_snr", gamma=3.0)}, "snr_gamma"),
    ("epsilon", {"snr_gamma": 5.0, **weighting(None, gamma=3.0)}, "snr_gamma"),
]


@pytest.mark.parametrize(("prediction", "options", "named"), INVALID)
def test_invalid_product_is_refused(prediction: Any, options: dict[str, Any], named: str) -> None:
    problems = objective_problems(with_preset(ObjectiveConfig(prediction_type=prediction, **options)))
    assert any(problem.startswith(f"objective.{named}:") for problem in problems), problems


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_accepted(preset: Any) -> None:
    assert objective_problems(with_preset(ObjectiveConfig(preset=preset))) == []
