"""The comparison behind every export finds each kind of difference, and none where there is none."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers import StableDiffusionPipeline

from sd_training.export.pipeline import bit_differences, differences
from tests import makers


@pytest.fixture(scope="module")
def pipeline() -> StableDiffusionPipeline:
    return makers.tiny_pipeline()


def edit(file: str, **values: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / file).write_text(json.dumps(json.loads((folder / file).read_text()) | values))

    return change


def flip_last_bit(file: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        content = bytearray((folder / file).read_bytes())
        content[-1] ^= 1
        (folder / file).write_bytes(content)

    return change


def delete(file: str) -> Callable[[Path], None]:
    return lambda folder: (folder / file).unlink()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (edit("scheduler/scheduler_config.json", prediction_type="v_prediction"), "setting prediction_type is 'v_pred"),
        (edit("model_index.json", scheduler=["diffusers", "EulerDiscreteScheduler"]), "scheduler loads as Euler"),
        (edit("model_index.json", unet=["diffusers", "UNet2DModel"]), "unet"),
        (edit("vae/config.json", scaling_factor=0.18215), "vae: setting scaling_factor is 0.18215, not 0.7"),
        (edit("text_encoder/config.json", hidden_act="gelu"), "text_encoder: setting hidden_act is 'gelu'"),
        (edit("tokenizer/tokenizer_config.json", model_max_length=8), "tokenizer gives other token ids"),
        (flip_last_bit("unet/diffusion_pytorch_model.safetensors"), "unet: .* differs"),
        (flip_last_bit("text_encoder/model.safetensors"), "text_encoder: .* differs"),
        (delete("vae/diffusion_pytorch_model.safetensors"), "does not load"),
        (delete("model_index.json"), "does not load"),
        (delete("tokenizer/tokenizer.json"), "tokenizer|does not load"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_kind_of_difference_is_found(
    tmp_path: Path, pipeline: StableDiffusionPipeline, change: Callable[[Path], None], problem: str
) -> None:
    pipeline.save_pretrained(tmp_path)
    assert differences(pipeline, tmp_path) == []
    change(tmp_path)
    found = differences(pipeline, tmp_path)
    assert any(re.search(problem, line) for line in found), found


def test_bits_are_compared_not_values() -> None:
    zero, nan = torch.zeros(2), torch.full((2,), float("nan"))
    assert bit_differences({"a": nan, "b": zero}, {"a": nan.clone(), "b": zero.clone()}) == []
    assert bit_differences({"a": zero}, {"a": -zero}) == ["a differs"]
    assert bit_differences({"a": zero}, {"a": zero.double()}) == ["a differs"]
    assert bit_differences({"a": zero, "b": zero}, {"a": zero, "c": zero}) == ["b is missing", "c is extra"]
