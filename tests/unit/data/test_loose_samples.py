import csv
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sd_training.data.index.store import load_index
from sd_training.data.sources.folder import FolderSource
from sd_training.data.sources.shard_writer import Columns, LooseSample, open_source
from sd_training.errors import ConfigError, DataError


def read(path: Path, columns: Columns | None = None, shuffle_seed: int | None = None) -> list[LooseSample]:
    source = open_source(path, columns or Columns(), shuffle_seed)
    samples = list(source.samples)
    assert len(samples) == source.count
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
    samples = read(tmp_path)
    assert [sample.name for sample in samples] == ["a.JPG", "b/1.webp", "b/2.png", "old.gif"]
    assert samples[1].caption == tmp_path / "b/1.txt" and samples[1].metadata == tmp_path / "b/1.json"


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
    samples = {sample.name: sample for sample in read(root)}
    assert list(samples) == ["images/2.jpg", "images/x/1.jpg", "linked/3.jpg"]
    two, one, three = samples.values()
    assert (two.caption, two.metadata) == (root / "images/2.TXT", root / "captions/2.json")
    assert (one.caption, three.caption) == (root / "captions/x/1.txt", root / "linked/3.txt")
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
    first, second = read(path)
    assert (first.image, first.caption, first.name) == (tmp_path / "x/1.jpg", "a cat, asleep", f"{name} line 2")
    assert first.metadata == {"id": "007", "width": 512, "score": -0.5}
    assert second.image == tmp_path / "2.jpg"
    assert second.metadata == {"id": "1e5", "width": -3, "score": "1.2.3", "empty": "nan"}


def test_rows_that_cannot_be_used_are_kept_with_their_reason(tmp_path: Path) -> None:
    path = write_csv(
        tmp_path / "t.csv", ["path", "text"], ["a.jpg", "x", "y"], ["", "x"], ["https://h/a.jpg", "x"], ["a", "x"]
    )
    problems = [sample.problem for sample in read(path)]
    assert problems == [
        "row has 3 cells where the header has 2",
        "image cell is empty",
        "image is a URL: download it first, https://h/a.jpg",
        None,
    ]
    (tmp_path / "t.csv").write_bytes(b"path,text\na.jpg,\xff\nb.jpg,x\n")
    assert [sample.problem for sample in read(tmp_path / "t.csv")] == ["row is not UTF-8 text", None]


@pytest.mark.parametrize("image", ["bytes", "struct", "path"])
def test_parquet(tmp_path: Path, image: str) -> None:
    cells: dict[str, Any] = {"bytes": b"data", "struct": {"bytes": b"data", "path": None}, "path": "a.jpg"}
    path = write_parquet(tmp_path / "t.parquet", {"image": [cells[image]] * 2, "caption": ["x", None], "n": [1, 2]})
    first, second = read(path)
    assert first.image == (tmp_path / "a.jpg" if image == "path" else b"data")
    assert (first.caption, first.metadata) == ("x", {"n": 1})
    assert second.problem == "caption is no text: NoneType"


def test_named_columns(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "t.parquet", {"image": [b"a"], "thumb": [b"b"], "caption": ["x"], "alt": ["y"]})
    (sample,) = read(path, Columns("thumb", "alt"))
    assert (sample.image, sample.caption, sample.metadata) == (b"b", "y", {"image": b"a", "caption": "x"})


def test_shuffle_is_fixed_and_loses_nothing(tmp_path: Path) -> None:
    write_csv(tmp_path / "t.csv", ["path", "text"], *([f"{i}.jpg", "x"] for i in range(50)))
    (tmp_path / "p").mkdir()
    for part in range(2):
        rows = list(range(25 * part, 25 * part + 25))
        write_parquet(tmp_path / f"p/{part}.parquet", {"path": [f"{i}.jpg" for i in rows], "text": ["x"] * 25}, 10)
    for path in (tmp_path / "t.csv", tmp_path / "p"):
        plain, once, again, other = ([str(s.image) for s in read(path, None, seed)] for seed in (None, 1, 1, 2))
        assert once == again != plain and other != once and sorted(once) == sorted(plain)


@pytest.mark.parametrize("name", ["t.csv", "t.parquet"])
def test_missing_columns_are_named(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name == "t.csv":
        write_csv(path, ["pixels", "caption"], ["a", "b"])
    else:
        write_parquet(path, {"pixels": [b"a"], "caption": ["b"]})
    with pytest.raises(ConfigError, match=r"--image-column: .* it has pixels, caption"):
        read(path)
    with pytest.raises(ConfigError, match=r"--caption-column: .* no column 'words'"):
        read(path, Columns("pixels", "words"))
    with pytest.raises(ConfigError, match="is the image column"):
        read(path, Columns("pixels", "pixels"))


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
        read(tmp_path / name)


def test_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({}))
    with pytest.raises(DataError, match="no image files"):
        read(tmp_path)
