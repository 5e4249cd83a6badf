from typing import Any

import diffusers
import pytest
import torch

from sd_training.errors import ConfigError
from sd_training.export.draw import SAMPLERS, make_sampler, samplers_for
from tests import makers


def config(**changes: Any) -> dict[str, Any]:
    return dict(makers.tiny_pipeline(**changes).scheduler.config)


@pytest.mark.parametrize("name", samplers_for({}))
def test_noise_schedule_and_prediction_type_carry_over(name: str) -> None:
    sampler = make_sampler(config(prediction_type="v_prediction"), name)
    assert type(sampler).__name__ == name
    assert sampler.config.prediction_type == "v_prediction" and sampler.config.beta_end == 0.012
    expected = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64).square()
    torch.testing.assert_close(sampler.betas.double(), expected, rtol=1e-5, atol=0)


def test_a_sampler_that_would_drop_zero_snr_is_refused() -> None:
    zero_snr = config(prediction_type="v_prediction", rescale_betas_zero_snr=True)
    assert make_sampler(zero_snr, "EulerDiscreteScheduler").config.rescale_betas_zero_snr
    with pytest.raises(ConfigError, match="PNDMScheduler: cannot follow this model's rescale_betas_zero_snr"):
        make_sampler(zero_snr, "PNDMScheduler")


@pytest.mark.parametrize("name", ["Euler", "SchedulerMixin", "os.system"])
def test_only_allowed_names(name: str) -> None:
    with pytest.raises(ConfigError, match="is not one of DDIMScheduler"):
        make_sampler(config(), name)


FLOWS = {
    "FlowMatchEulerDiscreteScheduler": {"shift": 3.0},
    "UniPCMultistepScheduler": {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0},
}


@pytest.mark.parametrize("own", FLOWS)
def test_samplers_of_flow_models_start_where_the_model_was_trained(own: str) -> None:
    config = dict(getattr(diffusers, own)(**FLOWS[own]).config)
    for name in samplers_for(config):
        sampler = make_sampler(config, name)
        sampler.set_timesteps(10)
        # shift 3 of σ = ½ is ¾: half of the steps are spent above it.
        assert sampler.sigmas[0] > 0.99 and 0.7 < float(sampler.sigmas[len(sampler.sigmas) // 2]) < 0.8, name


def test_samplers_of_other_models_are_refused() -> None:
    edm = dict(diffusers.EDMEulerScheduler(sigma_data=1.0).config)
    assert make_sampler(edm, "EDMDPMSolverMultistepScheduler").config.sigma_data == 1.0
    for config, name in ((edm, "DDIMScheduler"), ({"shift": 1.0}, "DDIMScheduler"), ({}, "EDMEulerScheduler")):
        with pytest.raises(ConfigError, match=f"{name}: cannot follow this model; use one of"):
            make_sampler(config, name)
    by_tokens = {"shift": 1.0, "use_dynamic_shifting": True}
    with pytest.raises(ConfigError, match="cannot follow this model's shift by tokens"):
        make_sampler(by_tokens, "UniPCMultistepScheduler")
    assert len(set(SAMPLERS)) == len(SAMPLERS)


@pytest.mark.parametrize("name", ["FlowMatchEulerDiscreteScheduler", "FlowMatchHeunDiscreteScheduler"])
def test_pipelines_that_scale_the_input_need_a_sampler_that_can(name: str) -> None:
    config = dict(diffusers.UniPCMultistepScheduler(**FLOWS["UniPCMultistepScheduler"]).config)
    assert make_sampler(config, name, "StableDiffusion3Pipeline")
    with pytest.raises(ConfigError, match=f"{name}: StableDiffusionPipeline has its scheduler scale what"):
        make_sampler(config, name, "StableDiffusionPipeline")


def test_flux_chooses_its_own_levels() -> None:
    config = dict(diffusers.FlowMatchEulerDiscreteScheduler().config)
    assert make_sampler(config, "UniPCMultistepScheduler", "FluxPipeline").config.use_flow_sigmas
    with pytest.raises(ConfigError, match="FluxPipeline gives it levels of its own; use FlowMatchEuler"):
        make_sampler(config, "FlowMatchHeunDiscreteScheduler", "FluxPipeline")
