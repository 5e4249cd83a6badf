import io
import struct
import tracemalloc
import zlib
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageCms

from sd_training.data.samples.image import decode, image_size
from sd_training.errors import BadSample
from tests import makers

MANY = 10**8
RED = (200, 30, 40)


def encode(image: Image.Image, image_format: str = "PNG", **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, format=image_format, **options)
    return stream.getvalue()


def decoded(data: bytes) -> NDArray[np.uint8]:
    pixels = decode(data, MANY).pixels
    assert (pixels.dtype, pixels.shape[2:]) == (np.uint8, (3,))
    return pixels


def claimed_png(width: int, height: int) -> bytes:
    """A PNG whose header claims a size; there are no pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")


@pytest.mark.parametrize("image_format", ["PNG", "WEBP", "JPEG"])
def test_formats(image_format: str) -> None:
    picture = makers.picture(1)
    options = {"lossless": True} if image_format == "WEBP" else {}
    error = np.abs(decoded(encode(picture, image_format, **options)).astype(int) - np.asarray(picture))
    assert error.max() <= (40 if image_format == "JPEG" else 0)
    assert error.mean() < 5


@pytest.mark.parametrize("mode", ["L", "1", "P"])
def test_grey_and_palette(mode: str) -> None:
    picture = makers.picture(2).convert(mode)
    assert np.array_equal(decoded(encode(picture)), np.asarray(picture.convert("RGB")))


def test_cmyk() -> None:
    solid = Image.new("RGB", (32, 32), RED).convert("CMYK")
    assert np.abs(decoded(encode(solid, "JPEG", quality=100)).astype(int) - RED).max() <= 4


def test_grey_jpeg() -> None:
    assert np.abs(decoded(encode(Image.new("L", (16, 16), 77), "JPEG")).astype(int) - 77).max() <= 1


def test_sixteen_bit_grey_keeps_its_range() -> None:
    ramp = np.linspace(0, 65535, 64, dtype=np.uint16).reshape(8, 8)
    pixels = decoded(encode(Image.fromarray(ramp)))
    assert np.array_equal(pixels, np.repeat((ramp >> 8).astype(np.uint8)[..., None], 3, axis=2))


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_alpha_is_laid_on_white(mode: str) -> None:
    image = Image.new(mode, (3, 1))
    colour = (0, 0, 0) if mode == "RGBA" else (0,)
    for x, alpha in enumerate((0, 128, 255)):
        image.putpixel((x, 0), (*colour, alpha))
    assert decoded(encode(image))[0, :, 0].tolist() == [255, 127, 0]


def test_palette_and_colour_key_transparency() -> None:
    palette = Image.new("P", (2, 1))
    palette.putpalette([10, 20, 30, 200, 100, 50])
    palette.putpixel((1, 0), 1)
    expected = [[10, 20, 30], [255, 255, 255]]
    assert decoded(encode(palette, transparency=1))[0].tolist() == expected
    colour = Image.new("RGB", (2, 1), (10, 20, 30))
    colour.putpixel((1, 0), (1, 2, 3))
    assert decoded(encode(colour, transparency=(1, 2, 3)))[0].tolist() == expected


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("image_format", ["JPEG", "PNG"])
def test_orientation(orientation: int, image_format: str) -> None:
    """Each stored picture must come out upright: its left half red, its top right black."""
    upright = Image.new("RGB", (40, 24), (255, 255, 255))
    upright.paste(RED, (0, 0, 16, 24))
    upright.paste((0, 0, 0), (24, 0, 40, 8))
    turn = Image.Transpose
    undo = {2: turn.FLIP_LEFT_RIGHT, 3: turn.ROTATE_180, 4: turn.FLIP_TOP_BOTTOM, 5: turn.TRANSPOSE}
    undo |= {6: turn.ROTATE_90, 7: turn.TRANSVERSE, 8: turn.ROTATE_270}
    stored = upright.transpose(undo[orientation]) if orientation > 1 else upright
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encode(stored, image_format, exif=exif)
    assert image_size(io.BytesIO(data)) == (40, 24)
    assert decode(data, MANY).original_size == (24, 40)
    pixels = decoded(data).astype(int)
    assert pixels.shape == (24, 40, 3)
    assert np.abs(pixels - np.asarray(upright)).mean() < 8


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
def test_damaged_exif_does_not_lose_the_picture() -> None:
    data = encode(makers.picture(1), "JPEG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xffgarbage")
    assert decoded(data).shape == (32, 40, 3)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "image file is empty"),
        (b"no image", "image is not a readable"),
        (b"GIF89a" + bytes(100), "image is not a readable"),
        (encode(makers.picture(1), "BMP"), "image is not a readable"),
        (encode(makers.picture(1), "JPEG")[:300], "image is not a readable|image cannot be decoded"),
        (encode(makers.picture(1), "JPEG")[:-200], "image cannot be decoded"),
        (encode(makers.picture(1))[:-200], "image cannot be decoded"),
        (encode(makers.picture(1), "WEBP")[:-200], "image is not a readable|image cannot be decoded"),
    ],
)
def test_damaged_files_are_bad_samples(data: bytes, reason: str) -> None:
    with pytest.raises(BadSample, match=reason):
        decode(data, MANY)


def test_any_damage_is_either_decoded_or_a_bad_sample() -> None:
    rng = np.random.default_rng(0)
    files = [encode(makers.picture(3), kind) for kind in ("JPEG", "PNG", "WEBP")]
    for trial in range(600):
        data = bytearray(files[trial % 3])
        for _ in range(int(rng.integers(1, 6))):
            data[int(rng.integers(len(data)))] = int(rng.integers(256))
        try:
            assert decode(bytes(data), 10**6).pixels.shape[2:] == (3,)
        except BadSample:
            continue


@pytest.mark.parametrize(("width", "height"), [(30_000, 30_000), (100_000, 100_000), (2**31 - 1, 2**31 - 1), (20, 11)])
def test_a_bomb_is_refused_before_memory_is_taken(width: int, height: int) -> None:
    data = claimed_png(width, height)
    tracemalloc.start()
    with pytest.raises(BadSample, match="image has too many pixels"):
        decode(data, 200)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20


def test_the_limit_of_the_run_counts_not_pillows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    assert decode(encode(makers.picture(1)), 40 * 32).pixels.shape == (32, 40, 3)
    with pytest.raises(BadSample, match="40 × 32"):
        decode(encode(makers.picture(1)), 40 * 32 - 1)


def test_sizes_come_from_the_header() -> None:
    assert image_size(io.BytesIO(claimed_png(70_000, 3))) == (70_000, 3)
    assert image_size(io.BytesIO(encode(makers.picture(1), "JPEG")[:700])) == (40, 32)
    assert image_size(io.BytesIO(claimed_png(20_000, 20_000))) == (20_000, 20_000)  # Pillow's own limit has no say
    assert image_size(io.BytesIO(claimed_png(2**32 - 1, 3))) == (0, 0)
    assert image_size(io.BytesIO(b"no image")) == (0, 0)


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_a_jpeg_is_decoded_at_the_next_fast_scale_above_what_is_needed(mode: str) -> None:
    """Needed 0.2 with a margin of 1.2: 2/8."""
    data = encode(makers.picture(2, 640, 479).convert(mode), "JPEG", quality=95)
    result = decode(data, MANY, lambda height, width: 0.2)
    assert result.pixels.shape == (120, 160, 3)  # 479 / 4 is rounded up
    assert (result.original_size, result.scale) == ((479, 640), 0.25)
    assert decode(data, MANY, lambda height, width: 0.22).scale == 0.5
    for scale in (0.45, 0.9, 1.0, 7.0):
        assert decode(data, MANY, lambda height, width, s=scale: s).pixels.shape == (479, 640, 3)


@pytest.mark.parametrize("size", [(1, 1), (3, 2), (9, 700)])
def test_tiny_jpegs(size: tuple[int, int]) -> None:
    result = decode(encode(makers.picture(2, *size), "JPEG"), MANY, lambda height, width: 0.1)
    assert result.pixels.size > 0
    assert result.original_size == size[::-1]


@pytest.mark.parametrize("options", [{"exif": 6}, {"mode": "CMYK"}, {"cut": 200}])
def test_what_libjpeg_turbo_is_not_trusted_with_goes_pillows_way(options: dict[str, Any]) -> None:
    exif = Image.Exif()
    exif[0x0112] = options.get("exif", 1)
    data = encode(makers.picture(2, 64, 48).convert(options.get("mode", "RGB")), "JPEG", exif=exif)
    if "cut" in options:
        with pytest.raises(BadSample, match="truncated"):
            decode(data[: -options["cut"]], MANY, lambda height, width: 0.2)
        return
    result = decode(data, MANY, lambda height, width: 0.2)
    assert result.scale == 1.0
    assert result.pixels.shape[:2] == result.original_size


def test_plain_jpegs_need_no_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow's header takes a tenth of the time of a picture; it is read where it may say more."""
    picture, exif = makers.picture(2, 64, 48), Image.Exif()
    exif[0x0112] = 6
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    plain = [encode(image, "JPEG", comment=b"a") for image in (picture, picture.convert("L"))]
    others = [{"exif": exif}, {"icc_profile": profile}, {"progressive": True}]
    further = [*(encode(picture, "JPEG", **options) for options in others), encode(picture.convert("CMYK"), "JPEG")]
    # A second scan of the same components: libjpeg refuses it, so no file takes the time of many.
    scan = plain[0][plain[0].rindex(b"\xff\xda") : -2]
    further.append(plain[0][:-2] + scan * 1000 + plain[0][-2:])
    monkeypatch.setattr(Image, "open", lambda *_, **__: 1 / 0)
    for data in plain:
        assert decode(data, MANY, lambda height, width: 1.0).pixels.shape == (48, 64, 3)
    for data in [*further, plain[0][:300], claimed_png(64, 48)]:
        with pytest.raises(BadSample, match="not a readable"):
            decode(data, MANY, lambda height, width: 1.0)
    with pytest.raises(BadSample, match="not a readable"):
        decode(plain[0], 64 * 48 - 1, lambda height, width: 1.0)


def test_repeated_chroma_is_as_near_to_the_picture_before_compression() -> None:
    """Reduced by 2, against a reduction without JPEG."""
    photo = makers.photograph(400, 400)
    data = encode(photo, "JPEG", quality=90)
    expected = np.asarray(photo.resize((200, 200), Image.Resampling.BICUBIC), dtype=float)

    def error(pixels: NDArray[np.uint8]) -> float:
        return float(((np.asarray(Image.fromarray(pixels).resize((200, 200))) - expected) ** 2).mean())

    repeated, whole = decode(data, MANY, lambda height, width: 0.5).pixels, decode(data, MANY).pixels
    assert not np.array_equal(repeated, whole)
    assert error(repeated) < error(whole) * 1.05


def test_both_ways_give_the_same_picture() -> None:
    data = encode(makers.photograph(320, 200), "JPEG", quality=90)
    pillow = decode(data, MANY).pixels.astype(int)
    turbo = decode(data, MANY, lambda height, width: 1.0).pixels
    assert np.abs(turbo - pillow).max() <= 3


def swapped_profile() -> bytes:
    """sRGB whose red and blue have changed places: the two entries of the tag table point at each other's data."""
    profile = bytearray(ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes())
    (count,) = struct.unpack_from(">I", profile, 128)
    places = {bytes(profile[132 + 12 * i : 136 + 12 * i]): 136 + 12 * i for i in range(count)}
    red, blue = places[b"rXYZ"], places[b"bXYZ"]
    profile[red : red + 8], profile[blue : blue + 8] = profile[blue : blue + 8], profile[red : red + 8]
    return bytes(profile)


def test_colour_profiles_are_converted() -> None:
    lab = ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes()
    plain = decode(encode(Image.new("RGB", (16, 16), RED), "PNG"), MANY).pixels[3, 3].tolist()
    assert plain == list(RED)
    for mode, color in (("RGB", RED), ("RGBA", (*RED, 255))):
        data = encode(Image.new(mode, (16, 16), color), "PNG", icc_profile=swapped_profile())
        assert np.abs(np.subtract(decode(data, MANY).pixels[3, 3], RED[::-1])).max() <= 2
    for profile in (b"no profile", lab):
        odd = encode(Image.new("RGB", (16, 16), RED), "PNG", icc_profile=profile)
        assert decode(odd, MANY).pixels[3, 3].tolist() == list(RED)


def test_colour_profiles_of_jpegs_that_are_decoded_smaller() -> None:
    image, scale = Image.new("RGB", (64, 64), RED), lambda height, width: 0.2
    own = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    plain = decode(encode(image, "JPEG"), MANY, scale).pixels
    assert np.array_equal(decode(encode(image, "JPEG", icc_profile=own), MANY, scale).pixels, plain)
    swapped = decode(encode(image, "JPEG", icc_profile=swapped_profile()), MANY, scale)
    assert swapped.scale == 0.25 and np.abs(swapped.pixels.astype(int) - plain[:, :, ::-1]).max() <= 3
    grey, dark = Image.new("L", (64, 64), 100), grey_profile(gamma=1.0)
    smaller = decode(encode(grey, "JPEG", icc_profile=dark), MANY, scale)
    whole = decode(encode(grey, "JPEG", icc_profile=dark), MANY)
    assert smaller.scale == 0.25 and smaller.pixels.shape == (16, 16, 3)
    assert whole.pixels[0, 0, 0] > 140 and np.abs(smaller.pixels.astype(int) - whole.pixels[0, 0]).max() <= 1


@pytest.mark.parametrize("size", [(300, 1), (1, 300)])
def test_colour_profiles_of_a_line_of_pixels(size: tuple[int, int]) -> None:
    for mode, profile in (("RGB", swapped_profile()), ("L", grey_profile(gamma=1.0))):
        data = encode(Image.new(mode, size, 100 if mode == "L" else RED), "JPEG", icc_profile=profile)
        assert decode(data, MANY, lambda height, width: 1.0).pixels.shape == (*size[::-1], 3)


def grey_profile(gamma: float) -> bytes:
    """Of one channel whose light is its value to the power of `gamma` (ICC.1:2010, sections 7, 10.6 and 10.31)."""
    curve = b"curv" + bytes(4) + struct.pack(">IHH", 1, round(gamma * 256), 0)
    white = b"XYZ " + bytes(4) + struct.pack(">iii", *(round(value * 65536) for value in (0.9642, 1.0, 0.8249)))
    header = struct.pack(">I4sI4s4s4s", 0, b"none", 0x02100000, b"mntr", b"GRAY", b"XYZ ") + bytes(12) + b"acsp"
    header += bytes(28) + struct.pack(">iii", *(round(value * 65536) for value in (0.9642, 1.0, 0.8249))) + bytes(48)
    table = struct.pack(">I4sII4sII", 2, b"wtpt", 156, 20, b"kTRC", 176, len(curve))
    data = header + table + white + curve
    return struct.pack(">I", len(data)) + data[4:]


def test_a_transparent_colour_stays_transparent_when_colours_are_converted() -> None:
    image = Image.new("RGB", (16, 16), RED)
    image.paste((255, 0, 255), (0, 0, 16, 8))
    data = encode(image, "PNG", icc_profile=swapped_profile(), transparency=(255, 0, 255))
    kept = decode(data, MANY, keeps_alpha=True).pixels
    assert kept[0, 0].tolist() == [255, 255, 255, 0] and kept[12, 0, 3] == 255
    assert np.abs(np.subtract(kept[12, 0, :3], RED[::-1])).max() <= 2
