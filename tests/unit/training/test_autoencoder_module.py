"""The measured spread of the latents, from which a measured scaling factor follows."""

import pytest
import torch

from sd_training.config.schema import LRScheduleConfig, OptimizerConfig
from sd_training.optim import Optimization, lr_schedule
from sd_training.training import AutoencoderModule
from tests.tiny_parts import tiny_vae


def test_latents_that_are_not_finite_are_left_out() -> None:
    schedule = lr_schedule(LRScheduleConfig(), num_steps=10, global_batch=2)
    module = AutoencoderModule(tiny_vae(), 1e-6, Optimization(OptimizerConfig(), 1e-4, schedule))
    assert module.latent_statistics() is None
    latents = 3 + 4 * torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    module._measure(latents)
    before = module.latent_statistics()
    assert before == pytest.approx((latents.mean().item(), latents.std().item()), rel=0.01)
    for bad in (float("nan"), float("inf")):
        poisoned = latents.clone()
        poisoned[0, 0, 0, 0] = bad
        module._measure(poisoned)
        assert module.latent_statistics() == before
    module._measure(2 * latents)
    assert module.latent_statistics() > before
