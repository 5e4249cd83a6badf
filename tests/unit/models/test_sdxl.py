"""What SDXL is told of a picture's history, and what it is not told."""

from typing import Any

import pytest
import torch

from sd_training.config.schema import ModelConfig, ObjectiveConfig, PartConfig
from sd_training.models.families.unets import StableDiffusionXL, size_numbers
from sd_training.models.schedulers import load_schedulers
from sd_training.types import PixelBatch
from tests import family_makers

NAMES = ("vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2", "unet")


def family(*, null_is_zeros: bool = False) -> StableDiffusionXL:
    pipeline = family_makers.sdxl()
    noise = ModelConfig(noise_scheduler_training=PartConfig(target="DDPMScheduler", params={"beta_end": 0.012}))
    parts, settings = {name: getattr(pipeline, name) for name in NAMES}, {"force_zeros_for_empty_prompt": null_is_zeros}
    return StableDiffusionXL(parts, load_schedulers(noise, ObjectiveConfig(), has_unet=True), settings)


def batch_of(own: StableDiffusionXL, **dropped: bool) -> PixelBatch:
    """A wide picture of a tall file, and whether text, size or crop are dropped."""
    texts = {name: tokenizer.encode("a red picture") for name, tokenizer in own.tokenizers().items()}
    empty: dict[str, Any] = dict.fromkeys(("posterior_noise", "noise", "timestep_draw"), torch.zeros(1))
    empty |= dict.fromkeys(("offset_noise", "input_noise", "mask", "positions", "sample_ids"), torch.zeros(1))
    return PixelBatch(
        pixels=torch.zeros(1, 3, 16, 24, dtype=torch.uint8),
        tokens={name: torch.from_numpy(text.tokens)[None] for name, text in texts.items()},
        token_masks={name: torch.from_numpy(text.mask)[None] for name, text in texts.items()},
        dropped={name: torch.tensor([dropped.get(name, False)]) for name in (*texts, "size", "crop")},
        original_size=torch.tensor([[300, 200]]),
        crop_top_left=torch.tensor([[5, 7]]),
        target_size=torch.tensor([[16, 24]]),
        **empty,
    )


def test_numbers_come_as_height_and_width() -> None:
    own = family()
    assert size_numbers(batch_of(own)).tolist() == [[300, 200, 5, 7, 16, 24]]
    untold = size_numbers(batch_of(own, size=True))
    assert untold.isnan().tolist() == [[True, True, False, False, False, False]]
    assert size_numbers(batch_of(own, crop=True)).isnan().tolist() == [[False, False, True, True, False, False]]


def test_the_embedding_of_what_is_not_told_is_zero() -> None:
    project = family().denoiser.add_time_proj
    embedded = project(torch.tensor([0.0, float("nan"), 300.0]))
    assert embedded[1].abs().max() == 0 and embedded[0].abs().max() == 1 and embedded.isfinite().all()
    assert torch.equal(embedded[2], family_makers.sdxl().unet.add_time_proj(torch.tensor([300.0]))[0])


@pytest.mark.parametrize("null_is_zeros", [False, True])
@torch.no_grad()
def test_dropped_text_is_zero_only_where_the_null_is_zeros(null_is_zeros: bool) -> None:
    own = family(null_is_zeros=null_is_zeros)
    kept, dropped = (own.encode(batch_of(own, text_encoder=drop, text_encoder_2=drop)) for drop in (False, True))
    assert kept.pooled is not None and dropped.pooled is not None
    for before, after in ((kept.states[0], dropped.states[0]), (kept.pooled, dropped.pooled)):
        assert (after.abs().max() == 0) == null_is_zeros
        assert torch.equal(before, after) != null_is_zeros
    assert own.pipeline().config.force_zeros_for_empty_prompt is null_is_zeros


@torch.no_grad()
def test_one_dropped_encoder_leaves_the_other() -> None:
    own = family(null_is_zeros=True)
    width = family_makers.WIDTH
    states = own.encode(batch_of(own, text_encoder=True)).states[0]
    assert states[..., :width].abs().max() == 0 < states[..., width:].abs().min()
    states = own.encode(batch_of(own, text_encoder_2=True)).states[0]
    assert states[..., width:].abs().max() == 0 < states[..., :width].abs().max()
