"""Tiny real things that tests are made of: shards written by webdataset, a diffusers pipeline with random weights."""

import io
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import webdataset
from PIL import Image
from safetensors.torch import save_file
from sklearn.datasets import load_sample_images

from tests.tiny_parts import (
    SMALLER_UNET,
    UNET_PARAMS,
    save_tiny_pipeline,
    tiny_pipeline,
    tiny_text_encoder,
    tiny_tokenizer,
    tiny_vae,
)

__all__ = [
    "SMALLER_UNET",
    "UNET_PARAMS",
    "save_tiny_pipeline",
    "tiny_pipeline",
    "tiny_text_encoder",
    "tiny_tokenizer",
    "tiny_vae",
]
"""Parts that scripts are made of, too; what else is here belongs to tests alone."""

COLOURS = ["red", "green", "blue"]


def picture(seed: int, width: int = 40, height: int = 32, mode: str = "RGB") -> Image.Image:
    """A smooth random picture that survives JPEG."""
    coarse = np.random.default_rng(seed).integers(0, 255, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC).convert(mode)


def photograph(width: int, height: int, number: int = 0) -> Image.Image:
    """A part of one of scikit-learn's two photographs (640 × 427), enlarged where more is asked for."""
    whole = Image.fromarray(load_sample_images().images[number % 2])
    scale = max(1.0, width / whole.width, height / whole.height)
    whole = whole.resize((round(whole.width * scale), round(whole.height * scale)), Image.Resampling.BICUBIC)
    chance = np.random.default_rng(number)
    left, top = (int(chance.integers(room + 1)) for room in (whole.width - width, whole.height - height))
    return whole.crop((left, top, left + width, top + height))


def encode(image: Image.Image, image_format: str = "JPEG") -> bytes:
    """The bytes of an image file."""
    stream = io.BytesIO()
    image.save(stream, format=image_format)
    return stream.getvalue()


def write_shard(path: Path, samples: Iterable[Mapping[str, Any]]) -> Path:
    """One tar shard; `bytes` values are stored as they are, other values by webdataset's encoders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with webdataset.TarWriter(str(path)) as sink:
        for sample in samples:
            sink.write(dict(sample))
    return path


def caption_samples(count: int, first: int = 0, **size: Any) -> list[dict[str, Any]]:
    """`count` good samples with image, caption and metadata."""
    return [
        {
            "__key__": f"{i:06d}",
            "jpg": encode(picture(i, **size)),
            "txt": f"a {COLOURS[i % 3]} picture",
            "json": json.dumps({"original_width": 40 + i, "pwatermark": (i % 10) / 10, "uid": f"u{i}"}).encode(),
        }
        for i in range(first, first + count)
    ]


def caption_shards(folder: Path, shards: int = 2, per_shard: int = 16) -> Path:
    """A folder with `shards` numbered shards; returns the folder."""
    for i in range(shards):
        write_shard(folder / f"{i:03d}.tar", caption_samples(per_shard, first=i * per_shard))
    return folder


def perceptual_folder(folder: Path, width: int = 8) -> Path:
    """A narrow VGG16 of random weights and LPIPS's heads for it, under the names of the published files."""
    generator, before, features, heads = torch.Generator().manual_seed(0), 3, {}, {}
    for stage, numbers in enumerate(((0, 2), (5, 7), (10, 12, 14), (17, 19, 21), (24, 26, 28))):
        for number in numbers:
            weight = torch.randn(width, before, 3, 3, generator=generator)
            features[f"features.{number}.weight"] = weight * (2 / (9 * before)) ** 0.5
            features[f"features.{number}.bias"] = torch.zeros(width)
            before = width
        heads[f"lin{stage}.model.1.weight"] = torch.rand(1, width, 1, 1, generator=generator)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(features, folder / "vgg16.safetensors")
    save_file(heads, folder / "lpips.safetensors")
    return folder
