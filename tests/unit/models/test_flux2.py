"""FLUX.2 [klein]: three layers of Qwen 3 side by side, four positions and latents normalised as tokens, as in its
pipeline."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sd_training.build.models import build_model
from sd_training.build.plan import make_plan
from sd_training.config.load import load_config
from sd_training.config.schema import ConditioningConfig, ModelConfig, ObjectiveConfig
from sd_training.errors import ConfigError
from sd_training.export.draw import _decoded, draw_images
from sd_training.models.families import load_family
from sd_training.models.families.flux2 import LENGTH, Flux2Klein
from sd_training.models.mmdit_rope import to_patches
from sd_training.types import NoisedBatch
from tests.integration.training import options
from tests.unit.models.denoiser_steps import load_tiny, tokens_of

CAPTIONS = [" A red Picture", "red " * LENGTH, ""]
"""Short, too long, and none."""


@pytest.fixture
def family(root: Path) -> Flux2Klein:
    own = load_tiny("flux2", root / "flux2")
    assert isinstance(own, Flux2Klein)
    return own


@torch.no_grad()
def states_of(family: Flux2Klein, captions: list[str]) -> torch.Tensor:
    tokens, masks = tokens_of(family, captions)
    return family.encode_text("text_encoder", tokens, masks).states


@torch.no_grad()
def test_captions_are_encoded_as_by_the_pipeline(family: Flux2Klein) -> None:
    pipeline: Any = family.pipeline()
    expected, _ = pipeline.encode_prompt([*CAPTIONS])
    found = states_of(family, CAPTIONS)
    assert list(found.shape[1:]) == [LENGTH, 3 * 16] == [*family.text_shapes()[0][0]]
    assert torch.equal(found, expected)
    assert [part.std() > 0 for part in found.chunk(3, dim=-1)] == [True] * 3
    tokenizer = family.tokenizers()["text_encoder"]
    tokens, seen = tokenizer.encode("red")
    assert tokenizer.decode(tokens[seen]).replace(" ", "") == "red" and tokenizer.suffix.endswith("<t></t>")


@torch.no_grad()
def test_an_answer_is_the_step_of_the_pipeline(family: Flux2Klein) -> None:
    """One Euler step from noise to latents that the autoencoder decodes: packing, positions, time, and the statistics
    of the tokens, which `scaled` divides by and the pipeline multiplies with."""
    noise, pipeline = torch.randn(3, 4, 8, 12), family.pipeline()
    packed = to_patches(noise, 2).mT.unflatten(2, (4, 6))
    size: dict[str, Any] = {"height": 16, "width": 24, "num_inference_steps": 1, "guidance_scale": 1.0}
    pipeline.set_progress_bar_config(disable=True)  # type: ignore[attr-defined]
    made = pipeline(prompt=[*CAPTIONS], latents=packed, output_type="latent", **size).images  # type: ignore[operator]
    ones = torch.ones(3)
    noised = NoisedBatch(noise, family.schedulers.objective.schedule.levels(ones).model_time, noise, ones, ones, ones)
    conditioning = family.blank_conditioning(3, torch.device("cpu"))
    conditioning.states = [states_of(family, CAPTIONS)]
    answer = family.predict(family.denoiser, noised, conditioning)
    torch.testing.assert_close(family.scaled(made), noise - answer, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_pictures_are_encoded_and_decoded_as_by_the_pipeline(family: Flux2Klein) -> None:
    pixels, pipeline = torch.rand(2, 3, 16, 24) * 2 - 1, family.pipeline()
    moments = family.moments(pixels, "fp32")
    latents = family.draw_latents(moments, torch.zeros(2, 4, 8, 12))
    theirs = pipeline._encode_vae_image(pixels, generator=None)  # type: ignore[attr-defined]
    torch.testing.assert_close(to_patches(latents, 2), theirs.flatten(2).mT)
    mean, _ = moments.chunk(2, dim=1)
    expected = pipeline.image_processor.postprocess(family.decode(mean), output_type="pil")  # type: ignore[attr-defined]
    found = _decoded(pipeline, to_patches(latents, 2), 16, 24)
    for own, other in zip(found, expected, strict=True):
        assert np.abs(np.asarray(own).astype(int) - np.asarray(other).astype(int)).max() <= 1


def test_guidance_reaches_the_pipeline_unless_the_model_is_distilled(family: Flux2Klein, tmp_path: Path) -> None:
    """Which a stored pipeline says, and an exported one still does."""
    made: list[list[bytes]] = []
    for is_distilled in (False, True):
        pipeline: Any = family.pipeline()
        pipeline.register_to_config(is_distilled=is_distilled)
        folder = tmp_path / str(is_distilled)
        pipeline.save_pretrained(folder)
        own = load_family(ModelConfig(pretrained=str(folder)), ObjectiveConfig(), ConditioningConfig(), seed=0)
        again: Any = own.pipeline()
        assert again.config.is_distilled is is_distilled
        size: dict[str, Any] = {"height": 16, "width": 24, "num_inference_steps": 2, "batch_size": 1}
        made.append([next(draw_images(again, ["red"], [3], guidance_scale=s, **size)).tobytes() for s in (1.0, 9.0)])
    assert made[0][0] != made[0][1] and made[1][0] == made[1][1] == made[0][0]


def test_what_it_cannot_do_is_refused(root: Path, tmp_path: Path, family: Flux2Klein) -> None:
    with pytest.raises(ConfigError, match=r"distributed\.mesh\.tensor: flux2 has no plan for it"):
        family.tensor_plan(family.blocks()[0], 2)
    assert family.size_problems([(16, 24)]) == []
    assert "patch size 2; use 16 or 20" in family.size_problems([(18, 18)])[0]
    family.parts["text_encoder"].config.num_hidden_layers = 26
    assert family.fit_problems() == ["model.text_encoder: has 26 layers, but flux2 reads layer 27"]
    argv = options(tmp_path, root / "flux2", root, model__train="vae")
    with pytest.raises(ConfigError, match=r"model\.vae: an AutoencoderKLFlux2 is not trained"):
        build_model(make_plan(load_config(argv)))
