from typing import Any

import pytest
import torch

from sd_training.errors import ConfigError
from sd_training.export.samplers import SAMPLERS, make_sampler
from tests import makers


def config(**changes: Any) -> dict[str, Any]:
    return dict(makers.tiny_pipeline(**changes).scheduler.config)


@pytest.mark.parametrize("name", SAMPLERS)
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


@pytest.mark.parametrize("name", ["Euler", "FlowMatchEulerDiscreteScheduler", "os.system"])
def test_only_allowed_names(name: str) -> None:
    with pytest.raises(ConfigError, match="is not one of DDIMScheduler"):
        make_sampler(config(), name)
