"""Sana: captions behind the instruction and the null text as its pipeline encodes them, and an autoencoder without a
posterior."""

from pathlib import Path

import pytest
import torch

from sd_training.config.load import load_config
from sd_training.errors import ConfigError
from sd_training.models.families.sana import INSTRUCTION, LENGTH, Sana, behind_instruction
from tests.integration.training import options
from tests.unit.models.denoiser_steps import load_tiny


@pytest.fixture
def family(root: Path) -> Sana:
    own = load_tiny("sana", root / "sana")
    assert isinstance(own, Sana)
    return own


@pytest.mark.parametrize("caption", [" A red Picture\n", "red " * LENGTH, ""], ids=["short", "too long", "none"])
@torch.no_grad()
def test_captions_are_encoded_as_by_the_pipeline(family: Sana, caption: str) -> None:
    """The null text is what the pipeline takes for a missing negative prompt."""
    encoded = family.tokenizers()["text_encoder"].encode(caption)
    tokens, mask = (torch.from_numpy(value)[None] for value in encoded)
    ours, seen = family.encode_text("text_encoder", tokens, mask).states, behind_instruction(mask)
    instruction = INSTRUCTION.split("\n") if caption else None
    theirs, their_mask, *_ = family.pipeline().encode_prompt(  # type: ignore[attr-defined]
        caption, do_classifier_free_guidance=False, complex_human_instruction=instruction
    )
    assert torch.equal(seen, their_mask.bool()) and ours.shape == theirs.shape == (1, LENGTH, 16)
    torch.testing.assert_close(ours[seen], theirs[seen], rtol=0, atol=1e-6)
    assert seen.sum() == {"": 1}.get(caption, min(2 + len(caption.split()), LENGTH))


def test_a_caption_is_read_back_without_the_instruction(family: Sana) -> None:
    own = family.tokenizers()["text_encoder"]
    assert own.is_cut("red " * LENGTH) and not own.is_cut("red")
    tokens, mask = own.encode("a red Picture")
    assert own.decode(tokens[mask]) == "a red picture"


def test_a_picture_has_one_code(family: Sana) -> None:
    pixels, noise = torch.rand(2, 3, 16, 24) * 2 - 1, torch.randn(2, 4, 8, 12)
    moments = family.moments(pixels, "fp32")
    latents = family.draw_latents(moments, noise)
    with torch.no_grad():
        assert torch.equal(latents, family.vae.encode(pixels).latent * 0.7)
    family.vae.enable_slicing()
    torch.testing.assert_close(family.moments(pixels, "fp32"), moments, rtol=1e-4, atol=1e-5)
    assert family.tile_side == 512


def test_an_autoencoder_without_a_posterior_is_not_trained(root: Path, tmp_path: Path) -> None:
    vae = {"model__train": "vae", "model__pretrained": "null", "model__vae__target": "AutoencoderDC"}
    with pytest.raises(ConfigError, match=r"model\.vae\.target: AutoencoderDC is not trained; use AutoencoderKL"):
        load_config(options(tmp_path, tmp_path, tmp_path, **vae))
