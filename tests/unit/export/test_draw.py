import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionPipeline
from numpy.typing import NDArray

from sd_training.export.draw import draw_images, make_sampler
from tests import makers

PROMPTS = ["a red square", "a blue circle", "a big digit"]


@pytest.fixture(scope="module")
def pipeline() -> StableDiffusionPipeline:
    return makers.tiny_pipeline()


def draw(
    pipeline: StableDiffusionPipeline, seeds: Sequence[int], batch_size: int, **kw: Any
) -> list[NDArray[np.uint8]]:
    settings: dict[str, Any] = {"height": 16, "width": 24, "num_inference_steps": 3, "guidance_scale": 3.0, **kw}
    return [
        np.asarray(i) for i in draw_images(pipeline, PROMPTS[: len(seeds)], seeds, batch_size=batch_size, **settings)
    ]


@pytest.mark.parametrize("sampler", ["DDIMScheduler", "EulerAncestralDiscreteScheduler", "DDPMScheduler"])
def test_picture_depends_on_its_seed_only(pipeline: StableDiffusionPipeline, sampler: str) -> None:
    pipeline.scheduler = make_sampler(pipeline.scheduler.config, sampler)
    alone, together = draw(pipeline, [5, 6, 7], 1), draw(pipeline, [5, 6, 7], 3)
    assert [image.shape for image in alone] == [(16, 24, 3)] * 3
    for one, other in zip(alone, together, strict=True):
        assert np.abs(one.astype(int) - other.astype(int)).max() <= 1  # batched kernels may round the last bit apart
    assert np.array_equal(draw(pipeline, [5], 1)[0], alone[0])
    assert np.abs(draw(pipeline, [6], 1)[0].astype(int) - alone[0].astype(int)).max() > 5


def test_guidance_reaches_the_pipeline(pipeline: StableDiffusionPipeline) -> None:
    assert not np.array_equal(
        draw(pipeline, [5], 1, guidance_scale=1.0)[0], draw(pipeline, [5], 1, guidance_scale=9.0)[0]
    )


def test_nothing_is_disturbed(capfd: pytest.CaptureFixture[str]) -> None:
    pipeline = makers.tiny_pipeline()
    pipeline.text_encoder.train()
    pipeline.unet.down_blocks[0].resnets[0].dropout = torch.nn.Dropout(0.5)  # would draw from the global generator
    pipeline.unet.train()
    pipeline.unet.mid_block.eval()
    modes = {
        name: m.training
        for part in ("unet", "text_encoder", "vae")
        for name, m in getattr(pipeline, part).named_modules()
    }
    pipeline.set_progress_bar_config(desc="mine")
    torch_state, numpy_state, python_state = torch.get_rng_state(), np.random.get_state(), random.getstate()
    drawn = []
    for image in draw_images(
        pipeline, PROMPTS, [1, 2, 3], height=16, width=16, num_inference_steps=2, guidance_scale=2.0, batch_size=2
    ):
        drawn.append(np.asarray(image))
        assert pipeline.unet.training and not pipeline.unet.mid_block.training  # also between pictures
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert random.getstate() == python_state and np.array_equal(np.random.get_state()[1], numpy_state[1])
    assert modes == {
        name: m.training
        for part in ("unet", "text_encoder", "vae")
        for name, m in getattr(pipeline, part).named_modules()
    }
    assert pipeline._progress_bar_config == {"desc": "mine"}
    assert all(p.grad is None for p in pipeline.unet.parameters()) and len(drawn) == 3
    assert "it/s" not in capfd.readouterr().err


def test_a_seed_for_each_prompt(pipeline: StableDiffusionPipeline) -> None:
    with pytest.raises(ValueError, match="2 prompts, 1 seeds"):
        list(
            draw_images(
                pipeline, PROMPTS[:2], [1], height=16, width=16, num_inference_steps=1, guidance_scale=1, batch_size=1
            )
        )
