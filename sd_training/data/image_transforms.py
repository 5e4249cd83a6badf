"""Image file bytes → a square uint8 RGB array."""

import io
import warnings
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from sd_training.data.problems import BadSample

FORMATS = ["JPEG", "PNG", "WEBP"]
_ORIENTATION_SOURCES = ("exif", "Raw profile type exif", "xmp", "XML:com.adobe.xmp")
_WHITE = (255, 255, 255, 255)

# `max_pixels` decides, before anything is decoded; Pillow's own warning would only say it again.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)


@dataclass(frozen=True)
class Crop:
    """A square cut from the image after its short side was resized to `resolution`."""

    resolution: int
    """Height and width of the result [pixels]."""
    offset: int | None
    """Left or top edge along the long side [pixels of the resized image]; None is the centre."""


def decode_image(data: bytes, max_pixels: int) -> Image.Image:
    """Decodes a JPEG, PNG or WebP file to an upright RGB image; alpha is laid on white.

    Raises:
        BadSample: it is none of these formats, is larger than `max_pixels` (known before decoding), or is damaged.
    """
    image = _open(data, max_pixels)
    try:
        return _to_rgb(_upright(image))
    except Exception as error:  # Pillow's decoders raise many kinds on damaged files
        raise BadSample(f"image cannot be decoded: {type(error).__name__}: {error}") from error


def _open(data: bytes, max_pixels: int) -> Image.Image:
    if not data:
        raise BadSample("image file is empty")
    if Image.MAX_IMAGE_PIXELS is not None and max_pixels > Image.MAX_IMAGE_PIXELS:
        Image.MAX_IMAGE_PIXELS = max_pixels
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise BadSample(f"image has too many pixels: {error}") from error
    except Exception as error:
        raise BadSample("image is not a readable JPEG, PNG or WebP file") from error
    width, height = image.size
    if width * height > max_pixels:
        raise BadSample(f"image has too many pixels: {width} × {height}, at most {max_pixels} are allowed")
    return image


def _upright(image: Image.Image) -> Image.Image:
    if not any(source in image.info for source in _ORIENTATION_SOURCES):
        return image
    image.load()
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # damaged EXIF says nothing about the picture, which has been read by now
        return image


def _to_rgb(image: Image.Image) -> Image.Image:
    image.load()
    if image.mode.startswith("I"):
        image = _from_16_bit(image)
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if not image.has_transparency_data:
        return image.convert("RGB")
    image = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, _WHITE), image).convert("RGB")


def _from_16_bit(image: Image.Image) -> Image.Image:
    """The high byte, as Pillow takes for 16-bit colour; its own conversion of 16-bit grey clips at 255."""
    return Image.fromarray((np.asarray(image).clip(0, 65535) >> 8).astype(np.uint8))


def max_offset(image: Image.Image, resolution: int) -> int:
    """Largest crop offset along the long side [pixels of the image with its short side resized to `resolution`]."""
    short, long = sorted(image.size)
    return long * resolution // short - resolution


def square(image: Image.Image, crop: Crop) -> Image.Image:
    """Resizes the short side to `crop.resolution` and cuts the square, in one pass over the pixels of the square.

    The long side is never resized as a whole, so that a picture of 1 × 100,000 pixels needs no memory.
    """
    short, long = sorted(image.size)
    scale = crop.resolution / short
    start = (long - short) / 2 if crop.offset is None else min(crop.offset / scale, long - short)
    left, top = (start, 0.0) if image.width > image.height else (0.0, start)
    size = (crop.resolution, crop.resolution)
    if image.size == size:
        return image
    return image.resize(size, Image.Resampling.BICUBIC, box=(left, top, left + short, top + short))


def to_array(image: Image.Image, flip: bool, out: NDArray[np.uint8]) -> None:
    """Writes an RGB image into `out` [3, H, W] uint8, mirrored from left to right if `flip`."""
    pixels = np.asarray(image)
    out[...] = (pixels[:, ::-1] if flip else pixels).transpose(2, 0, 1)
