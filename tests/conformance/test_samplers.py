"""One-step and whole-run parity between the training parameterisation and the exported sampler."""

from typing import Any

import pytest

from sd_training.build.models import objective_of
from sd_training.config.schema import ModelConfig, ObjectiveConfig, PartConfig
from sd_training.errors import ConfigError
from sd_training.export.additions import SAMPLERS
from sd_training.models.schedulers import load_schedulers
from tests.conformance import sampler_checks
from tests.conformance.cases import Parts, schedulers_for
from tests.conformance.reference import Setting
from tests.conformance.sampler_checks import EXPORTS, Export


def _name(value: Any) -> str:
    return value.name if isinstance(value, Export) else str(value)


@pytest.mark.parametrize("export", EXPORTS, ids=_name)
def test_ideal_denoiser_draws_the_gaussian(export: Export) -> None:
    sampler_checks.check_gaussian(export)


@pytest.mark.parametrize("name", [name for name in SAMPLERS if name != "LCMScheduler"])  # that is for distilled models
def test_every_sampler_that_may_be_chosen_draws_the_gaussian(name: str) -> None:
    sampler_checks.check_chosen_sampler(name)


@pytest.mark.parametrize(("export", "index"), sampler_checks.one_steps(), ids=_name)
def test_one_step_is_the_training_parameterisation(export: Export, index: int) -> None:
    sampler_checks.check_one_step(export, index)


def test_flow_samplers_visit_the_levels_of_the_shift() -> None:
    sampler_checks.check_levels_of_flow_samplers()


@pytest.mark.parametrize("sampler", ["DDIMScheduler", "DDPMScheduler", None])
def test_latents_are_not_clipped(sampler: str | None) -> None:
    assert not schedulers_for(Setting(), sampler).sampler.config.clip_sample


@pytest.mark.parametrize("sampler", ["PNDMScheduler", "EulerAncestralDiscreteScheduler"])
def test_samplers_without_sample_prediction_are_refused(sampler: str) -> None:
    with pytest.raises(ConfigError, match=sampler):
        schedulers_for(Setting(prediction="sample"), sampler)


@pytest.mark.parametrize("sampler", ["EDMEulerScheduler", "EDMDPMSolverMultistepScheduler"])
@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction", "sample"])
def test_edm_samplers_of_discrete_models_are_refused(sampler: str, prediction: str) -> None:
    with pytest.raises(ConfigError, match=sampler):
        schedulers_for(Setting(prediction=prediction), sampler)


@pytest.mark.parametrize(
    "sampler", ["FlowMatchEulerDiscreteScheduler", "HeunDiscreteScheduler", "LMSDiscreteScheduler", "PNDMScheduler"]
)
def test_samplers_without_zero_snr_are_refused(sampler: str) -> None:
    with pytest.raises(ConfigError, match=sampler):
        schedulers_for(Setting(prediction="v_prediction", schedule="zero_snr_scaled_linear"), sampler)


@pytest.mark.parametrize("sampler", ["DDIMScheduler", "EulerDiscreteScheduler", "FlowMatchEulerDiscreteScheduler"])
def test_samplers_of_other_worlds_are_refused_for_edm(sampler: str) -> None:
    with pytest.raises(ConfigError, match=sampler):
        schedulers_for(Setting(prediction="edm", schedule="edm"), sampler)


def test_dynamic_shifting_of_the_scheduler_is_what_training_shifts_by() -> None:
    flux = {"use_dynamic_shifting": True, "shift": 3.0}
    part = PartConfig(target="FlowMatchEulerDiscreteScheduler", params=flux)
    options = ObjectiveConfig(prediction_type="flow_prediction")
    schedulers = load_schedulers(ModelConfig(noise_scheduler_training=part), options, has_unet=False)
    objective: Any = objective_of(Parts(schedulers, 2))  # type: ignore[arg-type]
    assert schedulers.sampler.config.use_dynamic_shifting == (objective.shift(256) != objective.shift(4096))
