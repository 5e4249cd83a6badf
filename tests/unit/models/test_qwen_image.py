"""Qwen-Image: the words around captions, packed tokens and masks as in its pipeline, and an autoencoder of films."""

from pathlib import Path
from typing import Any

import pytest
import torch

from sd_training.models.families.qwen_image import QwenImage
from sd_training.models.mmdit_rope import from_patches, to_patches
from sd_training.types import Conditioning, NoisedBatch
from tests.unit.models.denoiser_steps import load_tiny, tokens_of


@pytest.fixture
def family(root: Path) -> QwenImage:
    own = load_tiny("qwen_image", root / "qwen_image")
    assert isinstance(own, QwenImage)
    return own


@torch.no_grad()
def conditioning(family: QwenImage, captions: list[str]) -> Conditioning:
    tokens, masks = tokens_of(family, captions)
    return family.condition({"text_encoder": family.encode_text("text_encoder", tokens, masks)}, Masks(masks))


class Masks:
    """What `condition` reads of a batch."""

    def __init__(self, masks: torch.Tensor) -> None:
        self.token_masks = {"text_encoder": masks}


@torch.no_grad()
def test_an_answer_is_the_step_of_the_pipeline(family: QwenImage) -> None:
    """One Euler step from noise to picture, of a short, a long and an empty caption at once."""
    captions, noise = [" A red picture", "red " * 40, ""], torch.randn(3, 4, 8, 12)
    options: dict[str, Any] = {"height": 16, "width": 24, "num_inference_steps": 1}
    pipeline: Any = family.pipeline()
    pipeline.set_progress_bar_config(disable=True)
    stepped = pipeline([*captions], latents=to_patches(noise, 2), output_type="latent", **options).images
    ones = torch.ones(3)
    noised = NoisedBatch(noise, family.schedulers.objective.schedule.levels(ones).model_time, noise, ones, ones, ones)
    found = family.predict(family.denoiser, noised, conditioning(family, captions))
    torch.testing.assert_close(found, noise - from_patches(stepped, 4, 2), rtol=1e-4, atol=1e-5)


def test_pictures_are_films_of_one_frame(family: QwenImage) -> None:
    pixels = torch.rand(2, 3, 16, 24) * 2 - 1
    moments = family.moments(pixels, "fp32")
    latents = family.draw_latents(moments, torch.zeros(2, 4, 8, 12))
    mean, config = moments.chunk(2, dim=1)[0], family.vae.config
    shift, scale = (torch.tensor(config[key]).view(1, 4, 1, 1) for key in ("latents_mean", "latents_std"))
    torch.testing.assert_close(latents * scale + shift, mean)
    with torch.no_grad():
        assert family.decode(mean).shape == pixels.shape
    assert family.tile_side == 256
