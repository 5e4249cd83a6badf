"""The autoencoder in a precision that it can stand."""

import logging

import pytest
import torch

from sd_training.config.schema import ModelConfig, ObjectiveConfig, PartConfig
from sd_training.models.encoders import Encoders
from sd_training.models.families.stable_diffusion import StableDiffusion
from sd_training.models.schedulers import load_schedulers
from tests import makers


def family_with(gain: float) -> StableDiffusion:
    """The first convolution's output is `gain` times as large, and the encoder's result is the same: norms follow."""
    pipeline = makers.tiny_pipeline()
    with torch.no_grad():
        pipeline.vae.encoder.conv_in.weight.mul_(gain)
    noise = ModelConfig(noise_scheduler_training=PartConfig(target="DDPMScheduler", params={"beta_end": 0.012}))
    parts = {name: getattr(pipeline, name) for name in ("vae", "text_encoder", "tokenizer", "unet")}
    return StableDiffusion(parts, load_schedulers(noise, ObjectiveConfig(), has_unet=True))


@pytest.mark.parametrize("gain", [1.0, 1e6])
def test_an_overflow_in_fp16_is_found_and_said(gain: float, caplog: pytest.LogCaptureFixture) -> None:
    pixels, noise = torch.rand(2, 3, 16, 16) * 2 - 1, torch.zeros(2, 4, 8, 8)
    encoders = Encoders(family_with(gain), vae_precision="fp16")
    with caplog.at_level(logging.WARNING):
        latents = encoders.encode_pixels(pixels, noise)
    assert torch.isfinite(latents).all()
    expected = Encoders(encoders.family).encode_pixels(pixels, noise)
    torch.testing.assert_close(latents, expected, rtol=0.1, atol=0.05)
    overflowed = gain > 1
    assert encoders.vae_precision == ("bf16" if overflowed else "fp16")
    assert ("overflows in fp16; it runs in bf16 instead" in caplog.text) == overflowed


def test_one_picture_at_a_time_gives_the_same_latents() -> None:
    encoders = Encoders(family_with(1.0))
    pixels, noise = torch.rand(3, 3, 16, 16) * 2 - 1, torch.randn(3, 4, 8, 8)
    expected, batches = encoders.encode_pixels(pixels, noise), []
    hook = encoders.family.vae.encoder.register_forward_hook(lambda _, given, __: batches.append(len(given[0])))
    encoders.save_memory(is_sliced=True, is_tiled=False)
    torch.testing.assert_close(encoders.encode_pixels(pixels, noise), expected, rtol=0, atol=1e-6)
    hook.remove()
    assert batches == [1, 1, 1]


def test_large_pictures_are_encoded_in_tiles() -> None:
    encoders = Encoders(family_with(1.0))
    pixels, noise = torch.rand(1, 3, 40, 32) * 2 - 1, torch.randn(1, 4, 20, 16)
    expected, sizes = encoders.encode_pixels(pixels, noise), []
    encoders.family.vae.encoder.register_forward_hook(lambda _, given, __: sizes.append(max(given[0].shape[2:])))
    encoders.save_memory(is_sliced=False, is_tiled=True)
    tiled = encoders.encode_pixels(pixels, noise)
    assert tiled.shape == expected.shape and len(sizes) > 1 and max(sizes) == 16
    assert 0 < (tiled - expected).abs().mean() < 0.2 * expected.std()
