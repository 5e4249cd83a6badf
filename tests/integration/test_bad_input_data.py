"""Every kind of bad data: a clear message, or a counted and named skip; never a hang or a silent wrong result."""

import io
import json
import os
import struct
import tarfile
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from sd_training.config.plan import BatchPlan
from sd_training.data.datamodule import TrainingData
from sd_training.data.index.report import report_text
from sd_training.errors import ConfigError, DataError
from sd_training.types import PixelBatch
from tests import makers
from tests.unit.data.making import joined, stream, training_data

RED = (200, 30, 40)
GOOD = 6


def encode(image: Image.Image, image_format: str = "PNG") -> bytes:
    stream_ = io.BytesIO()
    image.save(stream_, format=image_format, **({"quality": 100} if image_format == "JPEG" else {}))
    return stream_.getvalue()


def bomb(width: int = 40_000, height: int = 40_000) -> bytes:
    """A PNG of 70 bytes that claims 1.6 billion pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")


def with_bad(folder: Path, **bad: Any) -> Path:
    """One shard: GOOD good samples and the sample `bad` in their middle."""
    good = makers.caption_samples(GOOD)
    sample = {**makers.caption_samples(1, first=90)[0], **bad, "__key__": "bad"}
    sample = {name: value for name, value in sample.items() if value is not None}
    return makers.write_shard(folder / "000.tar", [*good[:3], sample, *good[3:]])


def run(path: Path | str, **options: Any) -> tuple[TrainingData, PixelBatch]:
    """Two epochs and more of the data."""
    data = training_data(path, BatchPlan(1, 1, 1, 16), **options)
    return data, joined(stream(data))


def named(run_dir: Path) -> dict[str, str]:
    entries = [json.loads(line) for line in (run_dir / "bad_samples.jsonl").read_text().splitlines()]
    assert all(entry["position"] is None or entry["position"] >= 0 for entry in entries)
    return {entry["key"]: entry["reason"] for entry in entries}


def test_missing_file_and_empty_patterns(tmp_path: Path) -> None:
    for path in ("none.tar", "{000..009}.tar", "x*.tar"):
        with pytest.raises(DataError, match=r"dataset\.params\.path") as error:
            training_data(tmp_path / path).report()
        assert path in str(error.value)


def test_a_file_that_is_no_tar(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(b"PK\x03\x04" * 1000)
    with pytest.raises(DataError, match="not an uncompressed tar file"):
        training_data(tmp_path / "a.tar").report()


def test_a_shard_without_captions(tmp_path: Path) -> None:
    samples = [{k: v for k, v in sample.items() if k != "txt"} for sample in makers.caption_samples(4)]
    makers.write_shard(tmp_path / "bare.tar", samples)
    with pytest.raises(DataError, match=r"(?s)no sample is left of the 4.*caption missing 4") as error:
        training_data(tmp_path / "bare.tar").report()
    assert "bare.tar" in str(error.value)


def test_a_shard_without_captions_among_others_is_counted(tmp_path: Path) -> None:
    samples = [{k: v for k, v in sample.items() if k != "txt"} for sample in makers.caption_samples(4, first=50)]
    makers.write_shard(tmp_path / "bare.tar", samples)
    makers.write_shard(tmp_path / "good.tar", makers.caption_samples(GOOD))
    data, batch = run(tmp_path)
    assert data.datasets[0].selection.problems.counts == {"caption missing": 4}
    assert set(batch.sample_ids.tolist()) <= set(range(4, 4 + GOOD))


@pytest.mark.parametrize(
    ("member", "reason"),
    [
        ({"jpg": makers.encode(makers.picture(1, 200, 200))[:-300]}, "image cannot be decoded"),
        ({"jpg": b"\xff\xd8\xff\xe0 not a jpeg"}, "image is not a readable"),
        ({"jpg": b""}, "image file is empty"),
    ],
    ids=["corrupt", "not an image", "zero bytes"],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_bad_images_are_skipped_counted_named_and_replaced(
    tmp_path: Path, member: dict[str, bytes | None], reason: str, workers: int
) -> None:
    with_bad(tmp_path, **member)
    data, batch = run(tmp_path, run_dir=tmp_path / "run", workers=workers)
    assert len(batch.positions) == 16
    assert 3 not in batch.sample_ids
    assert named(tmp_path / "run").keys() == {"bad"}
    assert named(tmp_path / "run")["bad"].startswith(reason)
    (kind,) = data.bad_samples.problems.counts
    assert kind.startswith(reason) and data.bad_samples.problems.counts[kind] == 1


def test_a_caption_that_is_not_utf8_is_counted(tmp_path: Path) -> None:
    with_bad(tmp_path, txt=b"\xff\xfe broken utf-8")
    data, batch = run(tmp_path)
    assert 3 not in batch.sample_ids
    assert data.datasets[0].selection.problems.counts["caption is not UTF-8 text"] == 1


def test_a_bomb_is_found_before_the_run(tmp_path: Path) -> None:
    data = training_data(with_bad(tmp_path, jpg=None, png=bomb()))
    assert data.datasets[0].selection.problems.counts == {"image has too many pixels": 1}
    assert len(data.datasets[0].selected) == GOOD


def test_a_bomb_takes_no_memory(tmp_path: Path) -> None:
    with_bad(tmp_path, jpg=None, png=bomb())
    tracemalloc.start()
    run(tmp_path)
    assert tracemalloc.get_traced_memory()[1] < 2**26
    tracemalloc.stop()


def test_too_many_bad_samples_stop_the_run(tmp_path: Path) -> None:
    """0.0001 of 100,000 are 10 samples; each counts once."""
    samples = makers.caption_samples(80)
    for sample in samples[::6]:
        sample["jpg"] = b""
    makers.write_shard(tmp_path / "000.tar", samples)
    data = training_data(tmp_path, BatchPlan(8, 1, 1, 5000), run_dir=tmp_path / "run", max_bad_fraction=0.0001)
    with pytest.raises(DataError, match=r"max_bad_fraction=0\.0001 allows 10 of.*image file is empty") as error:
        stream(data)
    assert str(tmp_path / "run" / "bad_samples.jsonl") in str(error.value)


def test_a_truncated_tar_keeps_its_complete_samples(tmp_path: Path) -> None:
    shard = makers.write_shard(tmp_path / "000.tar", makers.caption_samples(GOOD))
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size // 2])
    data, batch = run(tmp_path)
    counts = data.datasets[0].selection.problems.counts
    assert counts["shard is truncated or damaged"] == 1
    assert 0 < len(data.datasets[0].index) < GOOD
    assert set(batch.sample_ids.tolist()) == set(range(len(data.datasets[0].index)))


def alpha_picture() -> Image.Image:
    image = Image.new("RGBA", (16, 16), (0, 0, 0, 0))
    image.paste((*RED, 255), (0, 0, 16, 8))
    return image


@pytest.mark.parametrize(
    ("extension", "data", "top", "bottom"),
    [
        ("jpg", encode(Image.new("RGB", (16, 16), RED).convert("CMYK"), "JPEG"), RED, RED),
        ("jpeg", encode(Image.new("L", (16, 16), 90), "JPEG"), (90,) * 3, (90,) * 3),
        ("png", encode(Image.new("RGB", (16, 16), RED).convert("P", palette=Image.Palette.ADAPTIVE)), RED, RED),
        ("png", encode(alpha_picture()), RED, (255, 255, 255)),
        ("webp", encode(alpha_picture(), "WEBP"), RED, (255, 255, 255)),
        ("png", encode(Image.new("I;16", (16, 16), 90 * 257)), (90,) * 3, (90,) * 3),
        ("png", encode(Image.new("1", (16, 16), 1)), (255,) * 3, (255,) * 3),
        ("png", encode(Image.new("RGB", (1, 1), RED)), RED, RED),
        ("png", encode(Image.new("RGB", (1, 20_000), RED)), RED, RED),
    ],
    ids=["cmyk", "grey", "palette", "alpha", "alpha webp", "16 bit", "bilevel", "1 pixel", "1 x 20000"],
)
def test_unusual_images_have_the_right_colours(
    tmp_path: Path, extension: str, data: bytes, top: tuple[int, ...], bottom: tuple[int, ...]
) -> None:
    makers.write_shard(tmp_path / "000.tar", [{"__key__": "0", extension: data, "txt": "x"}])
    loaded, batch = run(tmp_path)
    pixels = batch.pixels[0].int()
    for row, colour in ((0, top), (15, bottom)):
        assert (pixels[:, row] - torch.tensor(colour)[:, None]).abs().max() <= 8
    assert loaded.bad_samples.problems.total() == 0


@pytest.mark.parametrize("caption", ["", " \n", "x" * 10_000, "word " * 2_000, "\x00\x1b[31m", "🙂é漢"])
def test_odd_captions_are_captions(tmp_path: Path, caption: str) -> None:
    raw = caption.encode()
    makers.write_shard(tmp_path / "000.tar", [{**makers.caption_samples(1)[0], "txt": raw}])
    data, batch = run(tmp_path)
    expected = caption.strip()
    assert torch.equal(
        batch.tokens["text_encoder"][0], torch.from_numpy(data.tokenizers["text_encoder"].encode(expected).tokens)
    )
    assert batch.tokens["text_encoder"].shape == (16, 16)
    assert data.datasets[0].selection.problems.counts == {}


def test_filter_on_a_field_that_nobody_has(shards_dir: Path) -> None:
    with pytest.raises(DataError, match=r"no sample has the metadata field 'orginal_width'.*original_width"):
        training_data(shards_dir, filters={"orginal_width": ">=10"}).report()


def test_filter_text_with_code_in_it(shards_dir: Path, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    for code in (f"__import__('os').mkdir('{canary}')", f">=0 or __import__('os').mkdir('{canary}')"):
        with pytest.raises(ConfigError, match=r"dataset\.params\.filters\.original_width: .*is not a filter \("):
            training_data(shards_dir, filters={"original_width": code}).report()
    assert not canary.exists()


@pytest.mark.parametrize(
    "metadata", [b"[1, 2]", b'"text"', b"{broken", b"", b"[" * 100_000, b'{"a": 1' + b"0" * 9999 + b"}"]
)
def test_metadata_that_is_no_json_object(tmp_path: Path, metadata: bytes) -> None:
    with_bad(tmp_path, json=metadata)
    data = training_data(tmp_path, filters={"original_width": ">=0"})
    assert len(data.datasets[0].selected) == GOOD
    if not metadata.startswith(b'{"a"'):
        assert data.datasets[0].selection.problems.counts == {"metadata is not a JSON object": 1}
    assert len(training_data(tmp_path).datasets[0].selected) == GOOD + 1  # without a filter it is not needed


def test_class_out_of_range(tmp_path: Path) -> None:
    samples = [
        {"__key__": f"{i}", "jpg": makers.encode(makers.picture(i)), "cls": c} for i, c in enumerate([0, 1, 10, -1])
    ]
    makers.write_shard(tmp_path / "000.tar", samples)
    prompts = {0: "zero", 1: "one"}
    data, batch = run(tmp_path, kind="ClassificationWebDataset", idx_to_prompt=prompts)
    assert data.datasets[0].selection.problems.counts == {"class without a prompt": 2}
    assert "class '10'" in report_text(data.report())
    assert set(batch.sample_ids.tolist()) == {0, 1}


@pytest.mark.parametrize("content", [None, "", "[]", "{}", '{"0": 5}', '{"0": []}', '{"0": ["a", 1]}', "{"])
def test_bad_prompt_files(tmp_path: Path, content: str | None) -> None:
    makers.write_shard(tmp_path / "000.tar", [{"__key__": "0", "jpg": b"x", "cls": 0}])
    path = tmp_path / "prompts.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=r"^dataset\.params\.idx_to_prompt"):
        training_data(tmp_path, kind="ClassificationWebDataset", idx_to_prompt=str(path)).report()


# What unpickling would run: `os.mkdir(canary)`, in protocol 0.
def canary_bytes(canary: Path) -> bytes:
    return f"cos\nmkdir\n(V{canary}\ntR.".encode()


@pytest.mark.parametrize("extension", ["pkl", "pickle", "pyd", "pth", "npy", "jpg.pkl", "txt", "cls", "json", "jpg"])
def test_pickles_are_never_loaded(tmp_path: Path, extension: str) -> None:
    canary = tmp_path / "canary"
    with tarfile.open(tmp_path / "000.tar", "w") as tar:
        for sample in (*makers.caption_samples(3), {"__key__": "000009", extension: canary_bytes(canary)}):
            base = {**makers.caption_samples(1, first=9)[0], **sample} if sample["__key__"] == "000009" else sample
            for name, value in base.items():
                if name != "__key__":
                    data = value if isinstance(value, bytes) else value.encode()
                    member = tarfile.TarInfo(f"{base['__key__']}.{name}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    _, batch = run(tmp_path, workers=1)
    assert not canary.exists()
    ignored = extension in ("pkl", "pickle", "pyd", "pth", "npy", "jpg.pkl", "txt", "cls", "json")
    assert (3 in batch.sample_ids) == ignored


def test_a_shard_that_may_not_be_read(tmp_path: Path) -> None:
    shard = makers.write_shard(tmp_path / "000.tar", makers.caption_samples(2))
    shard.chmod(0)
    if os.access(shard, os.R_OK):
        pytest.skip("this user may read everything")
    with pytest.raises(DataError, match=r"000\.tar"):
        training_data(tmp_path).report()
