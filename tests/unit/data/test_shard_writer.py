import datetime
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from sd_training.data.problems import BadSample
from sd_training.data.sources.shard_writer import LooseSample, encode_sample, write_shards
from tests import makers
from tests.unit.data.making import scanned

JPEG = makers.encode(makers.picture(1, 40, 32))


def sample(image: Any = JPEG, caption: Any = "a cat", metadata: Any = None, name: str = "s") -> LooseSample:
    return LooseSample(name, image, caption, metadata or {})


def write(folder: Path, samples: list[LooseSample], **options: Any) -> list[Any]:
    return list(write_shards(folder, iter(samples), **{"per_shard": 2, "workers": 2, "resize": None, **options}))


def read(folder: Path) -> dict[str, bytes]:
    members = {}
    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path) as tar:
            for member in tar:
                stream = tar.extractfile(member)
                assert stream is not None and member.name not in members
                members[member.name] = stream.read()
    return members


@pytest.mark.parametrize(("image_format", "extension"), [("JPEG", "jpg"), ("PNG", "png"), ("WEBP", "webp")])
def test_bytes_are_kept_and_sizes_added(image_format: str, extension: str) -> None:
    data = makers.encode(makers.picture(1, 40, 32), image_format)
    members = encode_sample(sample(data, metadata={"score": 0.5, "original_height": 999}), None)
    assert members[extension] == data and members["txt"] == b"a cat"
    assert json.loads(members["json"]) == {"original_width": 40, "original_height": 999, "score": 0.5}


def test_metadata_become_json() -> None:
    odd = {"day": datetime.date(2024, 1, 2), "nan": float("nan"), "raw": b"x", "list": [1, float("inf")], "ü": None}
    members = encode_sample(sample(metadata=odd), None)
    values = json.loads(members["json"])
    assert {k: values.get(k) for k in odd} == {
        "day": "2024-01-02",
        "nan": None,
        "raw": None,
        "list": [1, None],
        "ü": None,
    }
    assert "raw" not in values


@pytest.mark.parametrize(("size", "expected"), [((40, 32), (20, 16)), ((10, 30), (10, 30)), ((400, 17), (376, 16))])
def test_resize_only_shrinks(size: tuple[int, int], expected: tuple[int, int]) -> None:
    data = makers.encode(makers.picture(1, *size), "PNG")
    members = encode_sample(sample(data), 16)
    assert Image.open(io.BytesIO(members["png"])).size == expected
    assert (members["png"] == data) == (size == expected)
    assert json.loads(members["json"])["original_width"] == size[0]


def test_folder_samples(tmp_path: Path) -> None:
    image, text, extra = (tmp_path / f"a.{end}" for end in ("jpg", "txt", "json"))
    image.write_bytes(JPEG)
    with pytest.raises(BadSample, match="caption is missing: a"):
        encode_sample(sample(image, text, extra), None)
    text.write_bytes(b"\n")
    assert encode_sample(sample(image, text, extra), None)["txt"] == b""
    text.write_bytes(b"\xef\xbb\xbfa\n dog\n")
    assert encode_sample(sample(image, text, extra), None)["txt"] == b"a dog"
    extra.write_text('{"uid": "7"}')
    assert json.loads(encode_sample(sample(image, text, extra), None)["json"])["uid"] == "7"
    extra.write_text("[1]")
    with pytest.raises(BadSample, match="not a JSON object"):
        encode_sample(sample(image, text, extra), None)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (sample(JPEG[:-100]), "image cannot be decoded"),
        (sample(b""), "image file is empty"),
        (sample(makers.encode(makers.picture(1), "GIF")), "not a readable JPEG, PNG or WebP"),
        (sample(Path("/nowhere/a.jpg")), "image is missing: a"),
        (sample(Path("/nowhere/\0.jpg")), "image cannot be read"),
        (sample(caption="  "), "caption is empty"),
        (sample(caption="\ud800"), "caption is not UTF-8"),
        (LooseSample("s", None, None, {}, "row is short"), "row is short"),
    ],
)
def test_reasons(bad: LooseSample, reason: str) -> None:
    with pytest.raises(BadSample, match=reason):
        encode_sample(bad, None)


def test_shards_are_whole_numbered_and_the_same_for_any_workers(tmp_path: Path) -> None:
    samples = [sample(makers.encode(makers.picture(i)), f"number {i}", name=f"n{i}") for i in range(7)]
    samples[2] = sample(b"broken", name="n2")
    samples[4] = samples[5] = sample(b"", name="n4")
    for workers in (1, 3):
        (tmp_path / str(workers)).mkdir()
    reports = write(tmp_path / "1", samples, workers=1)
    write(tmp_path / "3", samples, workers=3)
    assert [(r.shard, r.written, [s.key for s in r.skipped]) for r in reports] == [
        ("00000.tar", 2, []),
        ("00001.tar", 1, ["n2"]),
        ("00002.tar", 0, ["n4", "n4"]),
        ("00003.tar", 1, []),
    ]
    names = [path.name for path in sorted((tmp_path / "1").iterdir())]
    assert names == ["00000.tar", "00001.tar", "00003.tar"]
    assert all((tmp_path / "1" / n).read_bytes() == (tmp_path / "3" / n).read_bytes() for n in names)
    members = read(tmp_path / "1")
    assert {name.split(".")[0] for name in members} == {f"{i:09d}" for i in (0, 1, 3, 6)}
    assert members["000000006.txt"] == b"number 6" and members["000000006.jpg"] == samples[6].image


def test_the_trainers_index_reads_them(tmp_path: Path) -> None:
    write(tmp_path, [sample(metadata={"pwatermark": 0.25}) for _ in range(3)])
    scan = scanned(tmp_path / "00000.tar")
    assert not scan.problems.total() and [s.key for s in scan.samples] == ["000000000", "000000001"]
    assert set(scan.samples[0].spans) >= {"image", "caption"}
    assert scan.samples[0].metadata == {"original_width": 40, "original_height": 32, "pwatermark": 0.25}


def test_a_failure_leaves_no_shard_under_its_name(tmp_path: Path) -> None:
    def samples() -> Any:
        yield sample()
        yield sample()
        yield sample()
        raise RuntimeError("source broke")

    with pytest.raises(RuntimeError, match="source broke"):
        list(write_shards(tmp_path, samples(), per_shard=2, workers=1, resize=None))
    assert [path.name for path in tmp_path.iterdir()] == ["00000.tar"] and len(read(tmp_path)) == 6
