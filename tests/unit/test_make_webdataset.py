import csv
import datetime
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from scripts.make_webdataset import LooseSample, encode_sample, open_samples, write_shards
from sd_training.data.index.store import load_index
from sd_training.data.problems import BadSample
from sd_training.data.sources.arrow_cells import Columns
from sd_training.data.sources.files import FolderSource
from sd_training.errors import ConfigError, DataError
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
    extra.write_text("{}")
    for missing in (text, None):
        with pytest.raises(BadSample, match="caption is missing"):
            encode_sample(LooseSample("a", image, missing), None)
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
    fields = {"original_width": 40, "original_height": 32, "pwatermark": 0.25}
    assert {name: scan.columns[f"number:{name}"][0].as_py() for name in fields} == fields


def test_a_failure_leaves_no_shard_under_its_name(tmp_path: Path) -> None:
    def samples() -> Any:
        yield sample()
        yield sample()
        yield sample()
        raise RuntimeError("source broke")

    with pytest.raises(RuntimeError, match="source broke"):
        list(write_shards(tmp_path, samples(), per_shard=2, workers=1, resize=None))
    assert [path.name for path in tmp_path.iterdir()] == ["00000.tar"] and len(read(tmp_path)) == 6


def found(path: Path, columns: Columns | None = None, shuffle_seed: int | None = None) -> list[LooseSample]:
    count, lazily = open_samples(path, columns or Columns(), shuffle_seed)
    samples = list(lazily)
    assert len(samples) == count
    return samples


def write_csv(path: Path, *rows: list[str]) -> Path:
    with path.open("w", newline="") as stream:
        csv.writer(stream, delimiter="\t" if path.suffix == ".tsv" else ",").writerows(rows)
    return path


def write_parquet(path: Path, columns: dict[str, Any], row_group_size: int = 100) -> Path:
    pq.write_table(pa.table(columns), path, row_group_size=row_group_size)
    return path


def test_folder_in_name_order(tmp_path: Path) -> None:
    for name in ("b/2.png", "a.JPG", "b/1.webp", "b/1.txt", "old.gif", "notes.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    samples = found(tmp_path)
    assert [sample.name for sample in samples] == ["a.JPG", "b/1.webp", "b/2.png", "old.gif"]
    assert (samples[1].caption, samples[1].metadata) == (tmp_path / "b/1.txt", None)
    assert samples[3].problem == "image format is not read: .gif"


def test_a_folder_is_read_as_training_reads_it(tmp_path: Path) -> None:
    root = tmp_path / "data"
    for name in (
        "images/x/1.jpg",
        "captions/x/1.txt",
        "images/2.jpg",
        "captions/2.txt",
        "images/2.TXT",
        "captions/2.json",
    ):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    (tmp_path / "3.jpg").touch()
    (root / "linked").symlink_to(tmp_path)
    (root / "images" / "._2.jpg").touch()
    samples = {sample.name: sample for sample in found(root)}
    assert list(samples) == ["images/2.jpg", "images/x/1.jpg", "linked/3.jpg"]
    two, one, three = samples.values()
    assert (two.caption, two.metadata) == (root / "images/2.TXT", root / "captions/2.json")
    assert (one.caption, three.caption) == (root / "captions/x/1.txt", None)
    assert {f"{Path(folder).name}/{key}" for folder, key in trained_on(root)} == {
        "images/2.jpg",
        "x/1.jpg",
        "linked/3.jpg",
    }


def trained_on(root: Path) -> list[tuple[str, str]]:
    index = load_index(FolderSource([str(root)]), root.parent / "index")
    return [index.name(sample) for sample in range(len(index))]


@pytest.mark.parametrize("name", ["t.csv", "t.tsv"])
def test_table_with_metadata_as_numbers(tmp_path: Path, name: str) -> None:
    path = write_csv(
        tmp_path / name,
        ["id", "Caption", "file_name", "width", "score", "empty"],
        ["007", "a cat, asleep", "x/1.jpg", "512", "-0.5", ""],
        ["1e5", "two", str(tmp_path / "2.jpg"), "-3", "1.2.3", "nan"],
    )
    first, second = found(path)
    assert (first.image, first.caption, first.name) == (tmp_path / "x/1.jpg", "a cat, asleep", f"{name} line 2")
    assert first.metadata == {"id": "007", "width": 512, "score": -0.5}
    assert second.image == tmp_path / "2.jpg"
    assert second.metadata == {"id": "1e5", "width": -3, "score": "1.2.3", "empty": "nan"}


def test_rows_that_cannot_be_used_are_kept_with_their_reason(tmp_path: Path) -> None:
    path = write_csv(
        tmp_path / "t.csv", ["path", "text"], ["a.jpg", "x", "y"], ["", "x"], ["https://h/a.jpg", "x"], ["a", "x"]
    )
    problems = [sample.problem for sample in found(path)]
    assert problems == [
        "row has 3 cells where the header has 2",
        "image cell is empty",
        "image is a URL: download it first, https://h/a.jpg",
        None,
    ]
    (tmp_path / "t.csv").write_bytes(b"path,text\na.jpg,\xff\nb.jpg,x\n")
    assert [sample.problem for sample in found(tmp_path / "t.csv")] == ["row is not UTF-8 text", None]


@pytest.mark.parametrize("image", ["bytes", "struct", "path"])
def test_parquet(tmp_path: Path, image: str) -> None:
    cells: dict[str, Any] = {"bytes": b"data", "struct": {"bytes": b"data", "path": None}, "path": "a.jpg"}
    path = write_parquet(tmp_path / "t.parquet", {"image": [cells[image]] * 2, "caption": ["x", None], "n": [1, 2]})
    first, second = found(path)
    assert first.image == (tmp_path / "a.jpg" if image == "path" else b"data")
    assert (first.caption, first.metadata) == ("x", {"n": 1})
    assert second.problem == "caption is no text: NoneType"


def test_named_columns(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "t.parquet", {"image": [b"a"], "thumb": [b"b"], "caption": ["x"], "alt": ["y"]})
    (sample,) = found(path, Columns("thumb", "alt"))
    assert (sample.image, sample.caption, sample.metadata) == (b"b", "y", {"image": b"a", "caption": "x"})


def test_shuffle_is_fixed_and_loses_nothing(tmp_path: Path) -> None:
    write_csv(tmp_path / "t.csv", ["path", "text"], *([f"{i}.jpg", "x"] for i in range(50)))
    (tmp_path / "p").mkdir()
    for part in range(2):
        rows = list(range(25 * part, 25 * part + 25))
        write_parquet(tmp_path / f"p/{part}.parquet", {"path": [f"{i}.jpg" for i in rows], "text": ["x"] * 25}, 10)
    for path in (tmp_path / "t.csv", tmp_path / "p"):
        plain, once, again, other = ([str(s.image) for s in found(path, None, seed)] for seed in (None, 1, 1, 2))
        assert once == again != plain and other != once and sorted(once) == sorted(plain)


@pytest.mark.parametrize("name", ["t.csv", "t.parquet"])
def test_missing_columns_are_named(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name == "t.csv":
        write_csv(path, ["pixels", "caption"], ["a", "b"])
    else:
        write_parquet(path, {"pixels": [b"a"], "caption": ["b"]})
    with pytest.raises(ConfigError, match=r"--image-column: .* it has pixels, caption"):
        found(path)
    with pytest.raises(ConfigError, match=r"--caption-column: .* no column 'words'"):
        found(path, Columns("pixels", "words"))
    with pytest.raises(ConfigError, match="is the image column"):
        found(path, Columns("pixels", "pixels"))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("gone.csv", None, "no such file"),
        ("a.zip", b"PK", "is not a folder"),
        ("a.parquet", b"PAR1 no", "not a readable Parquet file"),
        ("a.csv", b"path,caption\n", "has no samples"),
        ("a.csv", b"path,caption\xff\na,b\n", "UTF-8"),
    ],
)
def test_unusable_input(tmp_path: Path, name: str, content: bytes | None, said: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=said):
        found(tmp_path / name)


def test_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({}))
    with pytest.raises(DataError, match="no image files"):
        found(tmp_path)
