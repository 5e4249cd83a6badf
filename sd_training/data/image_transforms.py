"""Image file bytes → the cut, resized, perhaps mirrored picture of one visit."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from sd_training.data.image_decode import DecodedImage, ImageRules, decode


@dataclass(frozen=True)
class Wanted:
    """The picture that a visit is to give."""

    height: int
    width: int
    top: float | None = None
    left: float | None = None
    """Where the cut begins, in [0, 1) of the room that there is; None is the centre."""
    flip: bool = False
    """Mirror from left to right, after the cut."""


class Picture(NamedTuple):
    """Pixels, and where they are from: SDXL's micro-conditioning, in the order height, width."""

    pixels: NDArray[np.uint8]
    """[3, H, W]."""
    original_size: tuple[int, int]
    """Of the upright file [pixels]."""
    crop_top_left: tuple[int, int]
    """Of the cut in the resized image, as the mirrored picture shows it [pixels]."""
    alpha: NDArray[np.uint8] | None = None
    """[1, H, W] where it was asked for; 255 everywhere of an image without alpha."""


class Placement(NamedTuple):
    """A cut of height × width out of an image that was resized to cover it."""

    box: tuple[float, float, float, float]
    """Left, top, right, bottom of the cut in the image as it is [pixels]."""
    crop_top_left: tuple[int, int]
    """[pixels of the resized image], before mirroring."""
    resized: tuple[int, int]
    """Height and width of the resized image [pixels]."""


def cover_scale(image_height: int, image_width: int, wanted: Wanted) -> float:
    """The smallest factor by which an image can be resized to cover the wanted picture."""
    return max(wanted.height / image_height, wanted.width / image_width)


def place(image_height: int, image_width: int, wanted: Wanted) -> Placement:
    """Where the cut lies.

    The sizes are those of the upright file, so that a JPEG decoded at reduced scale is cut at the very same place.
    """
    scale = cover_scale(image_height, image_width, wanted)
    resized = max(wanted.height, round(image_height * scale)), max(wanted.width, round(image_width * scale))
    top, left = _start(wanted.top, resized[0] - wanted.height), _start(wanted.left, resized[1] - wanted.width)
    y, x = image_height / resized[0], image_width / resized[1]
    box = (left * x, top * y, min((left + wanted.width) * x, image_width), min((top + wanted.height) * y, image_height))
    return Placement(box, (top, left), resized)


def _start(fraction: float | None, room: int) -> int:
    return room // 2 if fraction is None else int(fraction * (room + 1))


def read_picture(data: bytes, wanted: Wanted, rules: ImageRules) -> Picture:
    """Decodes, cuts, resizes and mirrors; only the pixels of the cut are resized.

    The image is never resized as a whole, so that a picture of 1 × 100,000 pixels needs no memory.

    Raises:
        BadSample: the image cannot be used.
    """
    decoded = decode(data, rules, lambda height, width: cover_scale(height, width, wanted))
    placement = place(*decoded.original_size, wanted)
    top, left = placement.crop_top_left
    if wanted.flip:
        left = placement.resized[1] - wanted.width - left
    pixels, alpha = _cut(decoded, placement, wanted), None
    if rules.keeps_alpha:
        alpha = pixels[3:] if len(pixels) == 4 else np.full_like(pixels[:1], 255)
    return Picture(pixels[:3], decoded.original_size, (top, left), alpha)


def _cut(decoded: DecodedImage, placement: Placement, wanted: Wanted) -> NDArray[np.uint8]:
    """[3 or 4, H, W]. The edges of the cut are rounded to whole pixels of the decoded image.

    torch's antialiased bicubic resize of uint8 is Pillow's, to one unit of rounding, at a third of its time.
    """
    height, width = decoded.pixels.shape[:2]
    left, right = _edges(placement.box[0] * decoded.scale, placement.box[2] * decoded.scale, width)
    top, bottom = _edges(placement.box[1] * decoded.scale, placement.box[3] * decoded.scale, height)
    cut = torch.from_numpy(decoded.pixels[top:bottom, left:right]).permute(2, 0, 1)[None]
    size = (wanted.height, wanted.width)
    if cut.shape[2:] != size:
        cut = F.interpolate(cut, size=size, mode="bicubic", antialias=True)
    pixels = cut[0].flip(2) if wanted.flip else cut[0]
    return np.ascontiguousarray(pixels.numpy())


def _edges(first: float, end: float, length: int) -> tuple[int, int]:
    """Whole pixels, at least one, inside the image."""
    start = min(round(first), length - 1)
    return start, max(start + 1, min(round(end), length))
