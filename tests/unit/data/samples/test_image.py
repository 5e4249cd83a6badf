import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sd_training.data.samples.image import CropRequest, cover_scale, decode, place, read_image
from tests import makers

MAX_PIXELS = 10**8
RED = (200, 30, 40)


def encode(image: Image.Image, image_format: str = "PNG", **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, format=image_format, **options)
    return stream.getvalue()


def reference(image: Image.Image, height: int, width: int, top: int, left: int) -> np.ndarray:
    """Resize the whole image, then cut."""
    scale = max(height / image.height, width / image.width)
    size = max(width, round(image.width * scale)), max(height, round(image.height * scale))
    return np.asarray(image.resize(size, Image.Resampling.BICUBIC).crop((left, top, left + width, top + height)))


@pytest.mark.parametrize("size", [(64, 32), (32, 64), (50, 50), (16, 40), (7, 5)])
@pytest.mark.parametrize("target", [(16, 16), (24, 16), (8, 32)])
def test_a_cut_is_what_resizing_everything_first_gives(size: tuple[int, int], target: tuple[int, int]) -> None:
    image = makers.picture(4, *size)
    picture = read_image(encode(image), CropRequest(*target), MAX_PIXELS)
    assert picture.pixels.shape == (3, *target)
    assert picture.original_size == (size[1], size[0])
    expected = reference(image, *target, *picture.crop_top_left).transpose(2, 0, 1).astype(int)
    difference = np.abs(picture.pixels.astype(int) - expected)
    # The edges of the cut are rounded to whole pixels of the image, so it may be half of one beside.
    steps = np.abs(np.diff(expected, axis=1)).max() + np.abs(np.diff(expected, axis=2)).max()
    if min(size) > 10:
        assert difference[:, 2:-2, 2:-2].max() <= max(3, steps)
        assert difference.mean() < 4


@pytest.mark.parametrize("size", [(64, 32), (32, 64)])
def test_cuts_reach_both_ends(size: tuple[int, int]) -> None:
    image = makers.picture(5, *size)
    whole = np.asarray(image.resize((size[0] // 2, size[1] // 2), Image.Resampling.BICUBIC)).transpose(2, 0, 1)
    wide = size[0] > size[1]
    for fraction, offset, expected in ((0.0, 0, whole[:, :16, :16]), (1 - 1e-9, 16, whole[:, -16:, -16:])):
        picture = read_image(encode(image), CropRequest(16, 16, fraction, fraction), MAX_PIXELS)
        assert picture.crop_top_left == ((0, offset) if wide else (offset, 0))
        assert np.abs(picture.pixels.astype(int) - expected).max() <= 1


def test_every_offset_is_as_likely() -> None:
    offsets = [place(16, 19, CropRequest(16, 16, 0.5, f))[1][1] for f in np.linspace(0, 1, 400, endpoint=False)]
    assert np.bincount(offsets).tolist() == [100] * 4


@pytest.mark.parametrize("size", [(1, 1), (1, 100_000), (100_000, 1), (3, 65_000)])
def test_thin_images_need_no_memory(size: tuple[int, int]) -> None:
    data = encode(Image.new("RGB", size, RED))
    for fraction in (None, 0.0, 1 - 1e-9):
        pixels = read_image(data, CropRequest(512, 512, fraction, fraction), MAX_PIXELS).pixels
        assert pixels.shape == (3, 512, 512)
        assert pixels.reshape(3, -1).min(axis=1).tolist() == list(RED)


def test_flip_and_layout() -> None:
    image = makers.picture(6, 16, 16)
    plain = read_image(encode(image), CropRequest(16, 16), MAX_PIXELS).pixels
    assert np.array_equal(plain, np.asarray(image).transpose(2, 0, 1))
    assert np.array_equal(
        read_image(encode(image), CropRequest(16, 16, flip=True), MAX_PIXELS).pixels, plain[:, :, ::-1]
    )


def test_the_left_edge_of_a_mirrored_picture_is_its_own() -> None:
    """Cutting the left end of an image and mirroring it shows the right end of the mirrored image."""
    data = encode(makers.picture(7, 48, 16))
    assert read_image(data, CropRequest(16, 16, 0.0, 0.0), MAX_PIXELS).crop_top_left == (0, 0)
    assert read_image(data, CropRequest(16, 16, 0.0, 0.0, flip=True), MAX_PIXELS).crop_top_left == (0, 32)
    mirrored = encode(makers.picture(7, 48, 16).transpose(Image.Transpose.FLIP_LEFT_RIGHT))
    same = read_image(mirrored, CropRequest(16, 16, 0.0, 1 - 1e-9), MAX_PIXELS)
    assert same.crop_top_left == (0, 32)
    assert np.array_equal(same.pixels, read_image(data, CropRequest(16, 16, 0.0, 0.0, flip=True), MAX_PIXELS).pixels)


@pytest.mark.parametrize("fraction", [None, 0.0, 0.7])
@pytest.mark.parametrize("size", [(640, 427), (1024, 700)])
def test_reduced_decoding_is_a_matter_of_resampling(size: tuple[int, int], fraction: float | None) -> None:
    """Against the same cut of the whole picture, resized by Pillow."""
    data = encode(makers.photograph(*size), "JPEG", quality=90)
    wanted = CropRequest(160, 256, fraction, fraction)
    picture = read_image(data, wanted, MAX_PIXELS).pixels.astype(float)
    with Image.open(io.BytesIO(data)) as whole:
        left, top, right, bottom = place(*whole.size[::-1], wanted)[0]
        scale = decode(data, MAX_PIXELS, lambda height, width: cover_scale(height, width, wanted)).scale
        box = [round(edge * scale) / scale for edge in (left, top, right, bottom)]
        box = [min(box[0], size[0]), min(box[1], size[1]), min(box[2], size[0]), min(box[3], size[1])]
        expected = np.asarray(whole.resize((256, 160), Image.Resampling.BICUBIC, box=box)).transpose(2, 0, 1)
    assert scale < 1
    assert 10 * np.log10(255**2 / ((picture - expected) ** 2).mean()) > 35


def test_the_resize_is_pillows() -> None:
    photo = makers.photograph(300, 200)
    pixels = read_image(encode(photo), CropRequest(100, 150), MAX_PIXELS).pixels.astype(int)
    expected = np.asarray(photo.resize((150, 100), Image.Resampling.BICUBIC)).transpose(2, 0, 1)
    assert np.abs(pixels - expected).max() <= 1
