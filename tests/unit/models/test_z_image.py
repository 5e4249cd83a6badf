"""Z-Image: captions as messages, batches of unequal captions, and which way the answer points, as in its pipeline."""

from pathlib import Path
from typing import Any

import pytest
import torch

from sd_training.build.models import fit_problems
from sd_training.config.load import load_config
from sd_training.errors import ConfigError
from sd_training.export.draw import draw_images
from sd_training.models.attention import attention_calls
from sd_training.models.families.z_image import LENGTH, ZImage
from sd_training.models.family import latent_grid
from sd_training.types import Conditioning, NoisedBatch
from tests.integration.training import options
from tests.unit.models.denoiser_steps import load_tiny, loss_of, tokens_of


@pytest.fixture
def family(root: Path) -> ZImage:
    own = load_tiny("z_image", root / "z_image")
    assert isinstance(own, ZImage)
    return own


def conditioning(family: ZImage, captions: list[str]) -> Conditioning:
    tokens, masks = tokens_of(family, captions)
    with torch.no_grad():
        return Conditioning([family.encode_text("text_encoder", tokens, masks).states], [masks])


def test_captions_are_encoded_as_by_the_pipeline(family: ZImage) -> None:
    """Short, too long, and none."""
    captions, pipeline = [" A red Picture", "red " * LENGTH, ""], family.pipeline()
    found = conditioning(family, captions)
    expected, _ = pipeline.encode_prompt([*captions], do_classifier_free_guidance=False)  # type: ignore[attr-defined]
    (mask,) = found.masks
    assert mask is not None and mask[1].all() and not mask[0].all()
    for states, own, theirs in zip(found.states[0], mask, expected, strict=True):
        torch.testing.assert_close(states[own], theirs.detach(), rtol=0, atol=1e-6)
    tokenizer = family.tokenizers()["text_encoder"]
    tokens, seen = tokenizer.encode("red")
    assert tokenizer.decode(tokens[seen]).replace(" ", "") == "red"


@torch.no_grad()
def test_an_answer_is_the_step_of_the_pipeline(family: ZImage) -> None:
    """One Euler step from noise to picture, of captions of different lengths at once."""
    captions = ["a red picture of " + "squares " * 8, "red"]
    noise = torch.randn(2, 8, 8, 12)
    options: dict[str, Any] = {"height": 16, "width": 24, "guidance_scale": 0.0, "num_inference_steps": 1}
    pipeline: Any = family.pipeline()
    pipeline.set_progress_bar_config(disable=True)
    stepped = pipeline([*captions], latents=noise, output_type="latent", **options).images
    ones = torch.ones(2)
    noised = NoisedBatch(noise, 1000 * ones, noise, ones, ones, ones)
    found = family.predict(family.denoiser, noised, conditioning(family, captions))
    torch.testing.assert_close(found, noise - stepped, rtol=1e-4, atol=1e-5)


def test_a_scale_of_guidance_means_what_it_means_elsewhere(family: ZImage) -> None:
    """1 is off; the pipeline's own 0 is."""
    pipeline: Any = family.pipeline()
    pipeline.set_progress_bar_config(disable=True)
    size: dict[str, Any] = {"height": 16, "width": 24, "num_inference_steps": 2}
    for scale in (1.0, 3.0):
        [ours] = draw_images(pipeline, ["red"], [3], guidance_scale=scale, batch_size=1, **size)
        chance = [torch.Generator().manual_seed(3)]
        [theirs] = pipeline(["red"], guidance_scale=scale - 1, generator=chance, **size).images
        assert list(ours.getdata()) == list(theirs.getdata())


def test_counting_attention_leaves_no_empty_table_behind(family: ZImage) -> None:
    attention_calls(family, (16, 16), "no")
    assert loss_of(family).isfinite()


def test_it_is_not_compiled(root: Path, family: ZImage) -> None:
    argv = options(root / "run", root / "z_image", root, trainer__compile="blocks")
    problems = fit_problems(load_config(argv), family, latent_grid(family.vae))
    assert problems == [
        "trainer.compile: blocks, but z_image gives the denoiser every caption at its own length, each of which would "
        "be compiled; use off"
    ]


def test_a_tokenizer_without_a_chat_template_is_refused(family: ZImage) -> None:
    family.parts["tokenizer"].chat_template = None
    with pytest.raises(ConfigError, match=r"model\.tokenizer: has no chat template"):
        family.tokenizers()
