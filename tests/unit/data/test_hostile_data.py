"""Shards, images and tables of a hostile author: named and left out, in bounded memory, and nothing in them runs."""

import contextlib
import io
import os
import resource
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from sd_training.data.samples import image as image_decode
from sd_training.data.samples.image import FORMATS, decode, image_size
from sd_training.data.sources import arrow as arrow_source
from sd_training.data.sources import base
from sd_training.data.sources.arrow import ArrowSource
from sd_training.errors import BadSample, DataError
from tests import makers
from tests.faults.hostile_files import (
    TAR_END,
    canary_pickle,
    pax_records,
    png,
    png_chunk,
    png_text_bomb,
    tar_header,
    tar_member,
)
from tests.unit.data.making import ACCESS, Scanned, scanned

GOOD = png(8, 8)
GIB = 1 << 30
MAX_PIXELS = 1_000_000


def scan(folder: Path, *parts: bytes, size: int | None = None) -> Scanned:
    """A tar of these bytes; `size` makes the file longer without taking room on the disk."""
    path = folder / "x.tar"
    path.write_bytes(b"".join(parts) + TAR_END)
    if size is not None:
        os.truncate(path, size)
    return scanned(path)


def added_mib(act: Callable[[], Any]) -> float:
    """How much the peak memory of a process grows over `act` [MiB]."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        before, status = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 1
        try:
            act()
            status = 0
        finally:
            os.write(writing, str(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before).encode())
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    found = float(os.read(reading, 100)) / 1024
    os.close(reading)
    os.close(writing)
    return found


@pytest.mark.parametrize(
    "parts",
    [
        tar_member("x", pax_records([("a", "b")]), tarfile.XHDTYPE) * 3000,
        tar_member("x", b"name\0", tarfile.GNUTYPE_LONGNAME) * 3000,
        tar_member("x", pax_records([("GNU.sparse.major", "1"), ("GNU.sparse.minor", "0")]), tarfile.XHDTYPE)
        + tar_member("a.png", b"999999999999\n"),
        tar_member("x", pax_records([("GNU.sparse.map", "1,a")]), tarfile.XHDTYPE) + tar_member("a.png", b""),
        tar_member("x", pax_records([("GNU.sparse.size", "x")]), tarfile.XHDTYPE) + tar_member("a.png", b""),
        tar_member("x", pax_records([("size", "9" * 60)]), tarfile.XHDTYPE) + tar_member("a.png", b""),
        tar_member("x", pax_records([("size", "-1000")]), tarfile.XHDTYPE) + tar_member("a.png", b""),
    ],
)
def test_headers_that_tarfile_stumbles_over_are_damage(tmp_path: Path, parts: bytes) -> None:
    found = scan(
        tmp_path, tar_member("good.png", GOOD), tar_member("other.png", GOOD), parts, tar_member("z.png", GOOD)
    )
    assert [sample.key for sample in found.samples] == ["good", "other"]
    assert found.problems.counts["shard is truncated or damaged"] == 1


@pytest.mark.parametrize(
    ("name", "kind", "reason"),
    [
        ("b.png", tarfile.SYMTYPE, "link, device or sparse"),
        ("b.png", tarfile.LNKTYPE, "link, device or sparse"),
        ("b.png", tarfile.CHRTYPE, "link, device or sparse"),
        ("b.png", tarfile.BLKTYPE, "link, device or sparse"),
        ("b.png", tarfile.FIFOTYPE, "link, device or sparse"),
        ("b.png", tarfile.GNUTYPE_SPARSE, "link, device or sparse"),
        ("/b.png", tarfile.REGTYPE, "unsafe name"),
        ("../b.png", tarfile.REGTYPE, "unsafe name"),
        ("x/../../b.png", tarfile.REGTYPE, "unsafe name"),
    ],
)
def test_members_that_are_no_plain_files_are_ignored(tmp_path: Path, name: str, kind: bytes, reason: str) -> None:
    content = GOOD if kind == tarfile.REGTYPE else b""
    member = tar_member(name, content, kind) + (bytes(512) if kind == tarfile.GNUTYPE_SPARSE else b"")
    found = scan(tmp_path, tar_member("a.png", GOOD), member[: 512 + len(content) + -len(content) % 512])
    assert [sample.key for sample in found.samples] == ["a"]
    assert reason in found.problems.text()


def test_texts_have_bounds(tmp_path: Path) -> None:
    text = scan(tmp_path, tar_member("a.png", GOOD), tar_member("a.txt", b"x" * (base.MAX_TEXT_BYTES + 1)))
    assert "caption has too many bytes 1" in text.problems.text()
    assert text.columns["at:caption_offset"].to_pylist() == [-1]


def test_an_image_of_gibibytes_is_not_read(tmp_path: Path) -> None:
    def act() -> None:
        header = tar_header("a.png", 4 * GIB) + GOOD[:33] + (2**31 - 1).to_bytes(4, "big") + b"tEXt"
        assert "image size cannot be determined 1" in scan(tmp_path, header, size=4 * GIB + 4096).problems.text()

    assert added_mib(act) < 50


@pytest.mark.parametrize("mode", ["w:gz", "w:xz"])
def test_a_compressed_shard_is_not_unpacked(tmp_path: Path, mode: Literal["w:gz", "w:xz"]) -> None:
    path = tmp_path / "x.tar"
    with tarfile.open(path, mode) as tar:
        member = tarfile.TarInfo("a.png")
        member.size = 10 << 20
        tar.addfile(member, io.BytesIO(bytes(10 << 20)))
    assert "not an uncompressed tar file" in scanned(path).problems.text()


def test_only_three_formats_reach_a_parser(tmp_path: Path) -> None:
    """Whatever Pillow can write, and an EPS file that Ghostscript would run."""
    Image.init()
    tried = 0
    for name in sorted(set(Image.SAVE) - {*FORMATS, "MPO"}):  # an MPO file is a JPEG file with more behind it
        stream = io.BytesIO()
        try:
            makers.picture(0).save(stream, format=name)
        except Exception:
            continue
        tried += 1
        assert image_size(io.BytesIO(stream.getvalue())) == (0, 0), name
        with pytest.raises(BadSample, match="not a readable JPEG, PNG or WebP"):
            decode(stream.getvalue(), MAX_PIXELS)
    assert tried > 15 and FORMATS == ["JPEG", "PNG", "WEBP"]
    canary = tmp_path / "canary"
    eps = f"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n(%pipe%mkdir {canary}) (w) file\n"
    with pytest.raises(BadSample, match="not a readable"):
        decode(eps.encode(), MAX_PIXELS)
    assert not canary.exists()


@pytest.mark.parametrize(
    "data",
    [
        png(8, 8, png_text_bomb(60) * 70),
        png(8, 8, png_chunk(b"iCCP", b"k\0\0" + png_text_bomb(60))),
        png(8, 8, png_chunk(b"iTXt", b"k\0\1\0\0\0" + png_text_bomb(60))),
        png(50_000, 50_000, pixels=b""),
        png(900, 900, pixels=b"\0"),
    ],
)
def test_image_bombs_take_no_memory(data: bytes) -> None:
    def act() -> None:
        image_size(io.BytesIO(data))
        with contextlib.suppress(BadSample):  # what stands beside the pixels may be left out
            decode(data, MAX_PIXELS)

    assert added_mib(act) < 100


@pytest.mark.parametrize("image_format", ["JPEG", "MPO"])
def test_a_jpeg_of_a_thousand_scans_is_refused(image_format: str) -> None:
    """Also where a segment makes Pillow call it MPO, a JPEG file with further pictures behind the first."""
    stream = io.BytesIO()
    further = {"save_all": True, "append_images": [makers.picture(1)]} if image_format == "MPO" else {}
    makers.picture(0).save(stream, image_format, progressive=True, **further)
    data = stream.getvalue()
    assert Image.open(io.BytesIO(data)).format == image_format
    end = data.index(b"\xff\xd9")
    last = data.rindex(b"\xff\xda", 0, end)
    decode(data, MAX_PIXELS)
    with pytest.raises(BadSample, match=r"too many scans: 1,0\d\d, at most 100"):
        decode(data[:last] + data[last:end] * 1000 + data[end:], MAX_PIXELS)


@pytest.mark.parametrize(
    ("image_format", "mode"), [("WEBP", "RGBA"), ("PNG", "RGBA"), ("JPEG", "CMYK"), ("PNG", "I;16")]
)
def test_decoding_stays_within_the_stated_bytes_per_pixel(image_format: str, mode: str) -> None:
    side = 2048
    stream = io.BytesIO()
    Image.new(mode, (side, side)).save(stream, image_format, lossless=True)
    data = stream.getvalue()
    used = added_mib(lambda: decode(data, side * side, keeps_alpha=True))
    assert used < image_decode.BYTES_PER_PIXEL * side * side / 2**20 + 16


def parquet(path: Path, **columns: Any) -> ArrowSource:
    one = {"image": pa.array([GOOD]), "caption": pa.array(["a"])}
    pq.write_table(pa.table({**one, **columns}), path, compression="zstd")
    return ArrowSource([str(path)], ACCESS)


def test_parquet_has_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = parquet(tmp_path / "many.parquet", image=pa.array([GOOD] * 100), caption=pa.array(["word"] * 100))
    monkeypatch.setattr(arrow_source, "MAX_GROUP_BYTES", 10)
    with pytest.raises(DataError, match=r"row group 0 .* unpacks to .* bytes, at most 10 are"):
        source.scan(source.shards()[0])


def test_types_of_other_programs_run_nothing(tmp_path: Path) -> None:
    """pyarrow before 14.0.1 unpickled what such a field carries (CVE-2023-47248)."""
    canary = tmp_path / "canary"
    marks = {b"ARROW:extension:name": b"arrow.py_extension_type", b"ARROW:extension:metadata": canary_pickle(canary)}
    schema = pa.schema([pa.field("image", pa.binary(), metadata=marks), pa.field("caption", pa.string())])
    table = pa.table([pa.array([GOOD]), pa.array(["a"])], schema=schema.with_metadata({"pandas": "{"}))
    pq.write_table(table, tmp_path / "x.parquet")
    source = ArrowSource([str(tmp_path / "x.parquet")], ACCESS)
    assert source.scan(source.shards()[0])[0]["key"].to_pylist() == ["row 0"]
    assert not canary.exists()


def test_tables_nested_too_deeply_are_a_sentence(tmp_path: Path) -> None:
    nested = pa.array([1])
    for _ in range(200):
        nested = pa.StructArray.from_arrays([nested], names=["a"])
    source = parquet(tmp_path / "x.parquet", z=nested)
    with pytest.raises(DataError, match="not a readable Parquet file"):
        source.scan(source.shards()[0])
