"""Image file bytes → the cut, resized, perhaps mirrored picture of one visit."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from sd_training.data.image_decode import ImageRules, decode


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


class Placement(NamedTuple):
    """A cut of height × width out of an image that was resized to cover it."""

    box: tuple[float, float, float, float]
    """Left, top, right, bottom of the cut in the image as it is [pixels]."""
    crop_top_left: tuple[int, int]
    """[pixels of the resized image], before mirroring."""
    resized: tuple[int, int]
    """Height and width of the resized image [pixels]."""


def place(image_height: int, image_width: int, wanted: Wanted) -> Placement:
    """Where the cut lies.

    The sizes are those of the upright file, so that a JPEG decoded at reduced scale is cut at the very same place.
    """
    scale = max(wanted.height / image_height, wanted.width / image_width)
    resized = max(wanted.height, round(image_height * scale)), max(wanted.width, round(image_width * scale))
    top, left = _start(wanted.top, resized[0] - wanted.height), _start(wanted.left, resized[1] - wanted.width)
    y, x = image_height / resized[0], image_width / resized[1]
    box = (left * x, top * y, min((left + wanted.width) * x, image_width), min((top + wanted.height) * y, image_height))
    return Placement(box, (top, left), resized)


def _start(fraction: float | None, room: int) -> int:
    return room // 2 if fraction is None else int(fraction * (room + 1))


def read_picture(data: bytes, wanted: Wanted, rules: ImageRules) -> Picture:
    """Decodes, cuts, resizes and mirrors, in one pass over the pixels of the cut.

    The image is never resized as a whole, so that a picture of 1 × 100,000 pixels needs no memory.

    Raises:
        BadSample: the image cannot be used.
    """
    decoded = decode(data, rules, (wanted.height, wanted.width))
    placement = place(*decoded.original_size, wanted)
    top, left = placement.crop_top_left
    if wanted.flip:
        left = placement.resized[1] - wanted.width - left
    return Picture(_cut(decoded.image, decoded.original_size, placement, wanted), decoded.original_size, (top, left))


def _cut(image: Image.Image, original: tuple[int, int], placement: Placement, wanted: Wanted) -> NDArray[np.uint8]:
    x, y = image.width / original[1], image.height / original[0]
    box = tuple(edge * factor for edge, factor in zip(placement.box, (x, y, x, y), strict=True))
    size = (wanted.width, wanted.height)
    if box != (0, 0, *size) or image.size != size:
        image = image.resize(size, Image.Resampling.BICUBIC, box=box)  # type: ignore[arg-type]
    pixels = np.asarray(image)
    return np.ascontiguousarray((pixels[:, ::-1] if wanted.flip else pixels).transpose(2, 0, 1))
