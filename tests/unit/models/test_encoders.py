"""The frozen autoencoder with less memory."""

import torch

from sd_training.config.schema import ModelConfig, ObjectiveConfig, PartConfig
from sd_training.models.families.unets import StableDiffusion
from sd_training.models.schedulers import load_schedulers
from tests import makers


def family() -> StableDiffusion:
    pipeline = makers.tiny_pipeline()
    noise = ModelConfig(noise_scheduler_training=PartConfig(target="DDPMScheduler", params={"beta_end": 0.012}))
    parts = {name: getattr(pipeline, name) for name in ("vae", "text_encoder", "tokenizer", "unet")}
    return StableDiffusion(parts, load_schedulers(noise, ObjectiveConfig(), has_unet=True))


def test_one_picture_at_a_time_gives_the_same_latents() -> None:
    own = family()
    pixels, noise = torch.rand(3, 3, 16, 16) * 2 - 1, torch.randn(3, 4, 8, 8)
    expected, batches = own.draw_latents(own.moments(pixels, "fp32"), noise), []
    hook = own.vae.encoder.register_forward_hook(lambda _, given, __: batches.append(len(given[0])))
    own.vae.enable_slicing()
    torch.testing.assert_close(own.draw_latents(own.moments(pixels, "fp32"), noise), expected, rtol=0, atol=1e-6)
    hook.remove()
    assert batches == [1, 1, 1]


def test_large_pictures_are_encoded_in_tiles() -> None:
    own = family()
    pixels, noise = torch.rand(1, 3, 40, 32) * 2 - 1, torch.randn(1, 4, 20, 16)
    expected, sizes = own.draw_latents(own.moments(pixels, "fp32"), noise), []
    own.vae.encoder.register_forward_hook(lambda _, given, __: sizes.append(max(given[0].shape[2:])))
    own.vae.enable_tiling()
    tiled = own.draw_latents(own.moments(pixels, "fp32"), noise)
    assert tiled.shape == expected.shape and len(sizes) > 1 and max(sizes) == 16
    assert 0 < (tiled - expected).abs().mean() < 0.2 * expected.std()
