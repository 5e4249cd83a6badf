"""Image file bytes → an upright RGB image, decoded no larger than needed."""

import io
import warnings
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
from PIL import Image, ImageCms, ImageOps

from sd_training.data.problems import BadSample

FORMATS = ["JPEG", "PNG", "WEBP"]
_ORIENTATION_SOURCES = ("exif", "Raw profile type exif", "xmp", "XML:com.adobe.xmp")
_ORIENTATION_TAG = 0x0112
_TURNED = (5, 6, 7, 8)
"""EXIF orientations whose stored width is the upright height."""
_WHITE = (255, 255, 255, 255)

# `max_pixels` decides, before anything is decoded; Pillow's own warning would only say it again.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)


@dataclass(frozen=True)
class ImageRules:
    """What is done to every image."""

    max_pixels: int
    """Larger images are refused before they are decoded."""
    icc_to_srgb: bool = False
    """Convert images with a colour profile to sRGB."""


@dataclass(frozen=True)
class DecodedImage:
    """An upright RGB image, perhaps decoded at reduced scale."""

    image: Image.Image
    original_size: tuple[int, int]
    """Height and width of the upright file [pixels]."""


def image_size(file: BinaryIO) -> tuple[int, int]:
    """Width and height of the upright image [pixels], from the header alone; (0, 0) when it cannot be told."""
    try:
        with Image.open(file, formats=FORMATS) as image:
            width, height = image.size
            return (height, width) if _is_turned(image) else (width, height)
    except Exception:  # Pillow's parsers raise many kinds on damaged files
        return 0, 0


def decode(data: bytes, rules: ImageRules, cover: tuple[int, int] | None = None) -> DecodedImage:
    """Decodes a JPEG, PNG or WebP file; alpha is laid on white.

    Args:
        data: the file.
        rules: limits and colour.
        cover: (height, width) [pixels] that the result is going to be resized to. A JPEG is then decoded at the
            smallest of the scales 1/2, 1/4, 1/8 at which it is at least as large, which its cosine transform gives
            almost for free (libjpeg: scaled decoding).

    Raises:
        BadSample: it is none of these formats, is larger than `max_pixels` (known before decoding), or is damaged.
    """
    image = _open(data, rules.max_pixels)
    try:
        turned = _is_turned(image)
        width, height = image.size[::-1] if turned else image.size
        if cover is not None and image.format == "JPEG":
            _draft(image, cover[::-1] if turned else cover)
        upright = _upright(image)
        profile = upright.info.get("icc_profile") if rules.icc_to_srgb else None
        return DecodedImage(_to_rgb(_to_srgb(upright, profile) if profile else upright), (height, width))
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


def _draft(image: Image.Image, cover: tuple[int, int]) -> None:
    """Asks libjpeg for the smallest scale that still covers `cover` (height, width), which is resized from then on.

    The image is going to be scaled by s = max(height / H, width / W), so a side may shrink to s of its length, not to
    the one of `cover`.
    """
    width, height = image.size
    scale = max(cover[0] / height, cover[1] / width)
    image.draft(None, (max(1, round(width * scale)), max(1, round(height * scale))))


def _is_turned(image: Image.Image) -> bool:
    if not any(source in image.info for source in _ORIENTATION_SOURCES):
        return False
    try:
        return image.getexif().get(_ORIENTATION_TAG) in _TURNED
    except Exception:  # damaged EXIF says nothing about the picture
        return False


def _upright(image: Image.Image) -> Image.Image:
    if not any(source in image.info for source in _ORIENTATION_SOURCES):
        return image
    image.load()
    try:
        return ImageOps.exif_transpose(image)
    except Exception:  # damaged EXIF says nothing about the picture, which has been read by now
        return image


def _to_srgb(image: Image.Image, profile: bytes) -> Image.Image:
    """The image in sRGB; unchanged where the profile is damaged or of another colour space than the image."""
    if image.mode not in ("RGB", "L", "CMYK"):
        return image
    image.load()
    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        converted = ImageCms.profileToProfile(image, source, ImageCms.createProfile("sRGB"), outputMode="RGB")
    except (ImageCms.PyCMSError, OSError, ValueError):
        return image
    return image if converted is None else converted


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
