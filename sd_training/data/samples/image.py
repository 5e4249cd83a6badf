"""Image file bytes → the upright sRGB crop of one request, resized and perhaps mirrored.

JPEGs are decoded no larger than needed.
"""

import io
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import BinaryIO, NamedTuple

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image, ImageCms

from sd_training.errors import BadSample

FORMATS = ["JPEG", "PNG", "WEBP"]
_ORIENTATION_SOURCES = ("exif", "Raw profile type exif", "xmp", "XML:com.adobe.xmp")
_ORIENTATION_TAG = 0x0112
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""EXIF orientation → what makes the image upright."""
_SIDEWAYS = (5, 6, 7, 8)
"""EXIF orientations whose stored width is the upright height."""
_CONVERTED = {"RGB": "RGB", "RGBA": "RGBA", "L": "RGB", "CMYK": "RGB"}
"""Pillow's mode of images whose colour profile is read → mode after the conversion to sRGB."""
_PROBE = np.indices((17, 17, 17), dtype=np.uint8).reshape(3, 17, -1).transpose(1, 2, 0) * 15
"""Colours of all parts of RGB."""
_WHITE = (255, 255, 255, 255)
_MARGIN = 1.2
"""A JPEG is decoded at least so much larger than needed; with less, aliasing of the reduced picture is seen (34 dB
instead of 40 dB against decoding in full, on a photograph of 640 × 427 for 256). Scale 4 / 8 is a mean of 2 × 2 pixels:
a zone plate is 20.9 dB away from its ideal low pass, and 24.7 dB when it is decoded in full and resized."""
_COARSE_CHROMA = 0.6
"""A picture that is reduced so far or further has its chroma repeated instead of interpolated, which saves 6 % of
decoding. The result is as near to the picture before compression: over twelve parts of photographs reduced by 2, it is
0.9 dB nearer for JPEGs of quality 95, equally near for 90, and 0.2 dB less near for 75."""
LeastScale = Callable[[int, int], float]
Box = tuple[float, float, float, float]
"""Left, top, right, bottom of a cut [pixels]."""
_LONGEST_SIDE = 2**31 - 1
"""The index holds 32 bits; only a damaged header says more."""
MAX_SCANS = 100
"""Passes over a progressive JPEG [count]; usual ones have ten. Each takes the time of a decoding, and few bytes."""
BYTES_PER_PIXEL = 25
"""Most memory that decoding takes per pixel of the file [bytes], measured over all kinds of images; WebP needs it."""
_JPEG, _SCAN = b"\xff\xd8", b"\xff\xda"
_SEGMENT, _FRAME = struct.Struct(">2sH"), struct.Struct(">HHB")
"""Marker and length of a segment of a JPEG; height, width and number of components of its frame."""
_SEQUENTIAL, _TABLES = (b"\xff\xc0", b"\xff\xc1"), (b"\xff\xc4", b"\xff\xdb", b"\xff\xdd", b"\xff\xe0", b"\xff\xfe")
"""Markers of a frame that is not progressive; of tables, restart interval, JFIF, comment."""
_EIGHTHS = (1, 2, 4, 8)
"""libjpeg-turbo scales by n / 8 while it decodes. It has vector code for these; the others take longer than 8 / 8."""


class DecodedImage(NamedTuple):
    """An upright RGB image, perhaps decoded at reduced scale."""

    pixels: NDArray[np.uint8]
    """[height, width, 3], or 4 of an image with alpha where it is kept. At reduced scale the last row and column may
    lie partly outside of the picture."""
    original_size: tuple[int, int]
    """Height and width of the upright file [pixels]."""
    scale: float = 1.0
    """Pixels of `pixels` per pixel of the file, along one side."""


def image_size(file: BinaryIO) -> tuple[int, int]:
    """Width and height of the upright image [pixels], from the header alone; (0, 0) when it cannot be determined."""
    try:
        with _opened(file) as image:
            width, height = image.size[::-1] if _orientation(image) in _SIDEWAYS else image.size
            return (width, height) if max(width, height) <= _LONGEST_SIDE else (0, 0)
    except Exception:  # Pillow's parsers raise many kinds on damaged files
        return 0, 0


def _opened(file: BinaryIO) -> Image.Image:
    """Only the header is read. `max_pixels` decides before anything is decoded, so Pillow's own limit is disabled."""
    Image.MAX_IMAGE_PIXELS = None
    return Image.open(file, formats=FORMATS)


def decode(
    data: bytes, max_pixels: int, least_scale: LeastScale | None = None, *, keeps_alpha: bool = False
) -> DecodedImage:
    """Decodes a JPEG, PNG or WebP file to sRGB; alpha is laid on white.

    Args:
        data: the file.
        max_pixels: larger images are refused before they are decoded.
        least_scale: (height, width) of the upright file → the scale that the picture is needed at. JPEGs are then
            decoded at the next larger of a few scales, which their cosine transform gives almost for free.
        keeps_alpha: give alpha as a fourth channel, besides laying the image on white.

    Raises:
        BadSample: it is none of these formats, is larger than `max_pixels` (known before decoding), or is damaged.
    """
    if least_scale is not None and (plain := _plain_size(data)) is not None and plain[0] * plain[1] <= max_pixels:
        reduced = _decode_reduced(data, plain, least_scale(*plain), "RGB")
        if reduced is not None:
            return reduced
    image = _open(data, max_pixels)
    try:
        orientation = _orientation(image)
        width, height = image.size[::-1] if orientation in _SIDEWAYS else image.size
        profile = image.info.get("icc_profile")
        # Converting would lose a transparent colour, so that becomes alpha first; a grey image is then not converted.
        mode = "RGBA" if image.mode in ("RGB", "L") and "transparency" in image.info else image.mode
        to_srgb = _srgb_transform(profile, mode) if profile and mode in _CONVERTED else None
        if least_scale is not None and image.format == "JPEG" and orientation == 1 and mode in ("RGB", "L"):
            is_grey = mode == "L" and to_srgb is not None
            reduced = _decode_reduced(data, (height, width), least_scale(height, width), "GRAY" if is_grey else "RGB")
            if reduced is not None and to_srgb is not None:
                picture = Image.fromarray(reduced.pixels[:, :, 0] if is_grey else reduced.pixels)
                return reduced._replace(pixels=np.array(ImageCms.applyTransform(picture, to_srgb)))
            if reduced is not None:
                return reduced
        image.load()
        upright = image.transpose(_TURNS[orientation]) if orientation in _TURNS else image
        if to_srgb is not None:
            upright = upright if upright.mode == mode else upright.convert(mode)
            upright = ImageCms.applyTransform(upright, to_srgb) or upright
        rgb = _to_rgb(upright, keeps_alpha)
        return DecodedImage(np.array(rgb), (height, width))  # torch wants to own what it reads
    except Exception as error:  # Pillow's decoders raise many kinds on damaged files
        raise BadSample(f"image cannot be decoded: {type(error).__name__}: {error}") from error


def _plain_size(data: bytes) -> tuple[int, int] | None:
    """Height and width of a JPEG that may be decoded as it is: upright, without a colour profile, in one scan. None of
    all other files: their header is read by Pillow, which takes a tenth of the time of a picture of 512 × 512."""
    place, height, width, components = len(_JPEG), 0, 0, 0
    try:
        while data.startswith(_JPEG):
            marker, length = _SEGMENT.unpack_from(data, place)
            if marker in _SEQUENTIAL:
                height, width, components = _FRAME.unpack_from(data, place + 5)
            elif marker == _SCAN:  # libjpeg refuses another scan after one of all components
                return (height, width) if data[place + 4] == components in (1, 3) else None
            elif marker not in _TABLES:
                return None
            place += 2 + length
    except (struct.error, IndexError):
        pass
    return None


def _decode_reduced(data: bytes, size: tuple[int, int], scale: float, colours: str) -> DecodedImage | None:
    """None for a file that libjpeg-turbo refuses: Pillow decides whether it can be read."""
    eighths = next((n for n in _EIGHTHS if n >= scale * _MARGIN * 8), 8)
    height, width = (-(-side * eighths // 8) for side in size)
    try:
        is_coarse, least = scale <= _COARSE_CHROMA, {"min_height": height, "min_width": width, "min_factor": 1}
        pixels = simplejpeg.decode_jpeg(data, colours, fastupsample=is_coarse, **least)
    except ValueError:
        return None
    # Of tiny pictures a smaller scale may have the same size.
    return DecodedImage(pixels, size, eighths / 8) if pixels.shape[:2] == (height, width) else None


def _open(data: bytes, max_pixels: int) -> Image.Image:
    if not data:
        raise BadSample("image file is empty")
    try:
        image = _opened(io.BytesIO(data))
    except Exception as error:
        raise BadSample("image is not a readable JPEG, PNG or WebP file") from error
    width, height = image.size
    if width * height > max_pixels:
        raise BadSample(f"image has too many pixels: {width} × {height}, at most {max_pixels} are allowed")
    # By content: a segment that lists further pictures makes Pillow call a JPEG file MPO.
    if data.startswith(_JPEG) and (scans := _count_scans(data)) > MAX_SCANS:
        raise BadSample(f"image has too many scans: {scans:,}, at most {MAX_SCANS} are read")
    return image


def _count_scans(data: bytes) -> int:
    """`data.count` takes five times as long."""
    octets = np.frombuffer(data, dtype=np.uint8)
    return int(np.count_nonzero((octets[:-1] == _SCAN[0]) & (octets[1:] == _SCAN[1])))


def _orientation(image: Image.Image) -> int:
    """EXIF orientation; 1 is upright."""
    if not any(source in image.info for source in _ORIENTATION_SOURCES):
        return 1
    try:
        return int(image.getexif().get(_ORIENTATION_TAG, 1))
    except Exception:  # damaged EXIF does not make the image unusable
        return 1


@lru_cache(maxsize=16)
def _srgb_transform(profile: bytes, mode: str) -> ImageCms.ImageCmsTransform | None:
    """From the colours of a profile to sRGB. None where the profile is damaged, or of another colour space than the
    image; and where it changes nothing: most photographs name sRGB itself, and converting takes longer than decoding.
    """
    if mode == "RGBA" and _srgb_transform(profile, "RGB") is None:
        return None
    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        transform = ImageCms.buildTransform(source, ImageCms.createProfile("sRGB"), mode, _CONVERTED[mode])
        if mode == "RGB":
            converted = np.asarray(ImageCms.applyTransform(Image.fromarray(_PROBE), transform), dtype=np.int16)
            return None if np.abs(converted - _PROBE).max() <= 1 else transform
        return transform
    except (ImageCms.PyCMSError, OSError, ValueError):
        return None


def _to_rgb(image: Image.Image, keeps_alpha: bool) -> Image.Image:
    if image.mode.startswith("I"):  # the high byte, as Pillow takes for 16-bit colour; for grey it clips at 255
        image = Image.fromarray((np.asarray(image).clip(0, 65535) >> 8).astype(np.uint8))
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if not image.has_transparency_data:
        return image.convert("RGB")
    image = image.convert("RGBA")
    on_white = Image.alpha_composite(Image.new("RGBA", image.size, _WHITE), image).convert("RGB")
    if keeps_alpha:
        on_white.putalpha(image.getchannel("A"))
    return on_white


@dataclass(frozen=True)
class CropRequest:
    """The crop that a request asks for."""

    height: int
    width: int
    top: float | None = None
    left: float | None = None
    """Where the cut begins, in [0, 1) of the room that there is; None is the centre."""
    flip: bool = False
    """Mirror from left to right, after the cut."""


class CroppedImage(NamedTuple):
    """Pixels, and where they are from: SDXL's micro-conditioning, in the order height, width."""

    pixels: NDArray[np.uint8]
    """[3, H, W]."""
    original_size: tuple[int, int]
    """Of the upright file [pixels]."""
    crop_top_left: tuple[int, int]
    """Of the cut in the image resized to cover it, as the mirrored picture shows it [pixels]."""
    alpha: NDArray[np.uint8] | None = None
    """[1, H, W] if requested; 255 everywhere of an image without alpha."""


def cover_scale(image_height: int, image_width: int, wanted: CropRequest) -> float:
    """The smallest factor by which an image can be resized to cover the wanted picture."""
    return max(wanted.height / image_height, wanted.width / image_width)


def place(image_height: int, image_width: int, wanted: CropRequest) -> tuple[Box, tuple[int, int]]:
    """Where the cut lies: in the image as it is, and `crop_top_left` of `CroppedImage`.

    The sizes are those of the upright file, so that a JPEG decoded at reduced scale is cut at the same place.
    """
    scale = cover_scale(image_height, image_width, wanted)
    resized = max(wanted.height, round(image_height * scale)), max(wanted.width, round(image_width * scale))
    rooms = ((wanted.top, resized[0] - wanted.height), (wanted.left, resized[1] - wanted.width))
    top, left = (room // 2 if fraction is None else int(fraction * (room + 1)) for fraction, room in rooms)
    y, x = image_height / resized[0], image_width / resized[1]
    box = (left * x, top * y, min((left + wanted.width) * x, image_width), min((top + wanted.height) * y, image_height))
    return box, (top, resized[1] - wanted.width - left if wanted.flip else left)


def read_image(data: bytes, wanted: CropRequest, max_pixels: int, *, keeps_alpha: bool = False) -> CroppedImage:
    """Decodes, cuts, resizes and mirrors; only the pixels of the cut are resized.

    The image is never resized as a whole, so that a picture of 1 × 100,000 pixels needs no memory.

    Raises:
        BadSample: the image cannot be used.
    """
    decoded = decode(data, max_pixels, partial(cover_scale, wanted=wanted), keeps_alpha=keeps_alpha)
    box, crop_top_left = place(*decoded.original_size, wanted)
    pixels, alpha = _cut(decoded, box, wanted), None
    if keeps_alpha:
        alpha = pixels[3:] if len(pixels) == 4 else np.full_like(pixels[:1], 255)
    return CroppedImage(pixels[:3], decoded.original_size, crop_top_left, alpha)


def _cut(decoded: DecodedImage, box: Box, wanted: CropRequest) -> NDArray[np.uint8]:
    """[3 or 4, H, W]. The edges of the cut are rounded to whole pixels of the decoded image.

    torch's antialiased bicubic resize of uint8 is Pillow's, to one unit of rounding, at a third of its time.
    """
    import torch  # here, because checks of options read image headers without it
    import torch.nn.functional as F

    height, width = decoded.pixels.shape[:2]
    left, right = _edges(box[0] * decoded.scale, box[2] * decoded.scale, width)
    top, bottom = _edges(box[1] * decoded.scale, box[3] * decoded.scale, height)
    # The axis of the batch comes first: its stride tells that the channels are last, and they stay so, which is faster.
    cut = torch.from_numpy(decoded.pixels[top:bottom, left:right])[None].permute(0, 3, 1, 2)
    size = (wanted.height, wanted.width)
    if cut.shape[2:] != size:
        cut = F.interpolate(cut, size=size, mode="bicubic", antialias=True)
    return (cut[0].flip(2) if wanted.flip else cut[0]).numpy()  # the colours of a pixel may be neighbours in memory


def _edges(first: float, end: float, length: int) -> tuple[int, int]:
    """Whole pixels, at least one, inside the image."""
    start = min(round(first), length - 1)
    return start, max(start + 1, min(round(end), length))
