import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sd_training.config.filters import parse_filters
from sd_training.data.index.selection import evaluate
from sd_training.data.index.store import load_index
from sd_training.data.sources.base import (
    DatasetIndex,
    IndexedReader,
    caption_of,
    captions_in,
    checked_path,
    join,
    length_of,
)
from sd_training.data.sources.files import TableSource
from sd_training.errors import BadSample, ConfigError, DataError
from tests import makers
from tests.unit.data.making import ACCESS

IMAGE = makers.encode(makers.picture(0))


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """`1.jpg` to `5.jpg` in a folder."""
    for number in range(1, 6):
        (tmp_path / f"{number}.jpg").write_bytes(IMAGE)
    return tmp_path


def index_of(table: Path, fields: Sequence[str] = (), **columns: str) -> DatasetIndex:
    wanted = (columns.get("image_column"), columns.get("caption_column"))
    return load_index(TableSource([str(table)], ACCESS, wanted), table.parent / "index", fields)


def keys(index: DatasetIndex) -> list[str]:
    return [index.name(sample)[1] for sample in range(len(index))]


def named(index: DatasetIndex) -> list[tuple[str, str]]:
    return [(problem.key, problem.reason) for problem in index.problems.named()]


def write(folder: Path, name: str, *lines: str) -> Path:
    (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder / name


def test_rows_that_cannot_be_used_are_named_by_line(images: Path) -> None:
    table = write(
        images,
        "t.csv",
        "file,text,n",
        '1.jpg,"two',
        'lines",1',
        "2.jpg,too,many,cells",
        "gone.jpg,x,3",
        "",
        "3.jpg,,4",
        ",no path,5",
        "../other/x.jpg,x,6",
        "1.jpg,again,7",
    )
    with table.open("ab") as stream:
        stream.write(b"4.jpg,\xff,9\n5.jpg,good,10\n")
    index = index_of(table, ["n"])
    assert keys(index) == ["1.jpg", "3.jpg", "1.jpg line 10", "5.jpg"]
    assert index.columns["number:n"].to_pylist() == [1, 4, 7, 10]
    assert index.numbers("caption_length").tolist() == [9, -1, 5, 4]
    assert set(named(index)) == {
        ("line 4", "row has 4 cells where the header has 3"),
        ("line 5", "image file missing: gone.jpg"),
        ("line 8", "image is empty"),
        ("line 9", "image file missing: ../other/x.jpg"),
        ("line 11", "row is not UTF-8 text"),
    }
    assert f"{table} line 5" in index.problems.text()


def test_json_lines(images: Path) -> None:
    rows: list[Any] = [
        {"path": "1.jpg", "score": 0.5, "tall": True, "nested": {"a": 1}},
        {"caption": ["one", " two ", ""], "path": "2.jpg", "score": "7"},
        [1],
        {"path": 3, "caption": "x"},
        {"path": "3.jpg", "caption": "x", "new": "field"},
    ]
    table = write(images, "t.jsonl", *map(json.dumps, rows), '{"path": "4.jpg", ', '{"path": "5.jpg", "caption": "é"}')
    index = index_of(table, ["score", "tall", "new"])
    assert keys(index) == ["1.jpg", "2.jpg", "3.jpg", "5.jpg"]
    assert index.fields == {"score", "tall", "new", "caption"}
    assert index.columns["number:score"].to_pylist() == [0.5, 7, None, None]
    assert index.metadata_text("tall", 0) == "true" and index.metadata_text("new", 2) == "field"
    reader = IndexedReader(index, TableSource([str(table)], ACCESS))
    assert captions_in(reader.caption(1)) == ["one", "two"] and reader.caption(3) == "é"
    with pytest.raises(BadSample, match="caption missing"):
        reader.caption(0)
    lines = [key for key, _ in named(index)]
    assert sorted(lines) == ["line 3", "line 4", "line 6"]


def test_columns_by_name(images: Path) -> None:
    table = write(images, "t.tsv", "path\tcaption\tsmall\talt", "gone.jpg\tx\t1.jpg\ty")
    index = index_of(table, ["caption"], image_column="small", caption_column="alt")
    assert keys(index) == ["1.jpg"] and index.metadata_text("caption", 0) == "x"
    assert TableSource([str(table)], ACCESS).identity != TableSource([str(table)], ACCESS, ("small", None)).identity
    with pytest.raises(ConfigError, match=r"dataset\.params\.caption_column: .* no column 'words'; it has path, cap"):
        index_of(table, caption_column="words")


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_missing_columns_are_named(images: Path, kind: str) -> None:
    lines = ["pixels,caption", "1.jpg,x"] if kind == "csv" else ['{"pixels": "1.jpg", "caption": "x"}']
    with pytest.raises(ConfigError, match=r"dataset\.params\.image_column: .*image_path.*; it has pixels, caption"):
        index_of(write(images, f"t.{kind}", *lines))


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"path,caption\xff\n", "UTF-8"), ("path,caption\n".encode("utf-16"), "UTF-8")],
)
def test_unreadable_headers(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "t.csv").write_bytes(content)
    with pytest.raises(DataError, match=said):
        index_of(tmp_path / "t.csv")


def test_a_table_without_rows_is_named(images: Path) -> None:
    assert named(index_of(write(images, "t.csv", "path,caption"))) == [("", "table has no rows")]


def test_other_files_are_no_tables(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"is not a table; \.csv, \.tsv"):
        index_of(write(tmp_path, "t.xlsx", ""))
    with pytest.raises(DataError, match="No such file"):
        index_of(tmp_path / "gone.csv")


def test_urls_are_refused(images: Path) -> None:
    table = write(images, "t.csv", "path,caption", "1.jpg,x", "https://user:secret@host/a.jpg?key=1,x")
    with pytest.raises(DataError, match=r"line 3: .*'https://host/a\.jpg'.*only paths relative to the table") as error:
        index_of(table)
    assert "secret" not in str(error.value) and "key=1" not in str(error.value)


@pytest.mark.parametrize(
    ("base", "path", "location"),
    [
        ("/data", "a/./1.jpg", "/data/a/1.jpg"),
        ("/data", "a/../1.jpg", "/data/1.jpg"),
        ("/data/set", "../1.jpg", "/data/1.jpg"),
        ("/data", "a/../../data2/1.jpg", "/data2/1.jpg"),
        ("/data", "/other/1.jpg", "/other/1.jpg"),
        ("/data", "~/1.jpg", "/data/~/1.jpg"),
        ("s3://bucket/set", "a#b/1.jpg", "s3://bucket/set/a#b/1.jpg"),
        ("https://host/set", "a b/1?.jpg", "https://host/set/a%20b/1%3F.jpg"),
    ],
)
def test_where_a_path_leads(base: str, path: str, location: str) -> None:
    assert join(base, checked_path(base, path)) == location


@pytest.mark.parametrize(
    ("base", "path", "error"),
    [
        ("/data", "", BadSample),
        ("/data", "a\0.jpg", BadSample),
        ("/data", "a\udcff.jpg", BadSample),
        ("s3://bucket/set", "/etc/passwd", BadSample),
        ("s3://bucket/set", "../../other/1.jpg", BadSample),
        ("/data", "s3://bucket/1.jpg", DataError),
        ("/data", "simplecache::s3://bucket/1.jpg", DataError),
        ("s3://bucket/set", "file:///etc/passwd", DataError),
        ("s3://bucket/set", "s3://bucket/set/1.jpg", DataError),
        ("https://host/set", "http://host/1.jpg", DataError),
    ],
)
def test_paths_that_are_not_followed(base: str, path: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        checked_path(base, path)


def test_a_local_table_names_images_beside_its_folder(images: Path, tmp_path: Path) -> None:
    """By absolute paths and by `..`, which leads to where the file system says, also from a linked folder."""
    (images / "tables").mkdir()
    table = write(images / "tables", "t.csv", "path,caption", f"{images}/1.jpg,x", "../2.jpg,x", "..,x")
    (tmp_path / "link").symlink_to(table.parent)
    for path in (table, tmp_path / "link" / "t.csv"):
        index = index_of(path)
        reader = IndexedReader(index, TableSource([], ACCESS))
        assert [reader.image(i) for i in range(len(index))] == [IMAGE, IMAGE]
        assert named(index) == [("line 4", "image file missing: ..")]


def test_files_that_change_later_make_bad_samples(images: Path) -> None:
    table = write(images, "t.csv", "path,caption", "1.jpg,x", "2.jpg,x", "3.jpg,x")
    index = index_of(table)
    reader = IndexedReader(index, TableSource([str(table)], ACCESS))
    (images / "1.jpg").write_bytes(IMAGE + b"more")
    (images / "2.jpg").unlink()
    remedy = "touch the table or metadata file that names it, if one does, and start again"
    with pytest.raises(BadSample, match=rf"image file has changed since it was indexed: 1\.jpg; {remedy}"):
        reader.image(0)
    with pytest.raises(BadSample, match=r"image file missing: 2\.jpg"):
        reader.image(1)
    assert reader.image(2) == IMAGE
    os.utime(table, (1, 1))
    assert IndexedReader(index_of(table), TableSource([str(table)], ACCESS)).image(0) == IMAGE + b"more"


def test_rows_that_an_open_quote_takes_along_are_named(images: Path) -> None:
    rows = ['1.jpg,"open,1', "2.jpg,fine,2", '3.jpg,"Hello" said,3', '4.jpg,"two', 'lines, ""a""",4', '5.jpg,"cut,5']
    table = write(images, "t.csv", "path,caption,n", *rows)
    index = index_of(table, ["n"])
    assert keys(index) == ["4.jpg"]
    assert IndexedReader(index, TableSource([], ACCESS)).caption(0) == 'two\nlines, "a"'
    assert {key: reason.partition(":")[0] for key, reason in named(index)} == dict.fromkeys(
        ["line 2", "line 3", "line 4", "line 7"], "row is malformed"
    )


def test_every_second_quote_is_missing(images: Path) -> None:
    rows = [f'{n % 5 + 1}.jpg,"{n} inch' for n in range(3_000)]
    index = index_of(write(images, "t.csv", "path,caption", "1.jpg,fine", *rows))
    assert (keys(index), index.problems.counts) == (["1.jpg"], {"row is malformed": 3_000})


def test_two_columns_of_one_name_are_refused(images: Path) -> None:
    with pytest.raises(DataError, match=r"t\.csv: has two columns named 'caption'"):
        index_of(write(images, "t.csv", "path,caption,caption", "1.jpg,x,y"))
    assert keys(index_of(write(images, "u.csv", ",path,caption,", "0,1.jpg,x,"))) == ["1.jpg"]


def test_the_caption_column_can_be_filtered(images: Path) -> None:
    index = index_of(
        write(images, "t.csv", "path,words", "1.jpg,x", "2.jpg,", "3.jpg,y"), ["words"], caption_column="words"
    )
    for written, expected in {"not null": [0, 2], "y": [2], "null": [1]}.items():
        rules, _ = parse_filters({"words": written})
        assert np.flatnonzero(evaluate(rules[0], index.columns, 3)).tolist() == expected


def test_more_rows_than_are_held_at_once(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sd_training.data.sources.base.ROWS_AT_ONCE", 2)
    rows = [json.dumps({"path": f"{n}.jpg", "caption": f"c{n}", f"only{n}": n}) for n in range(1, 6)]
    index = index_of(write(images, "t.jsonl", *rows), ["only1", "only5"])
    assert keys(index) == ["1.jpg", "2.jpg", "3.jpg", "4.jpg", "5.jpg"]
    assert index.columns["number:only1"].to_pylist() == [1, None, None, None, None]
    assert index.columns["number:only5"].to_pylist() == [None, None, None, None, 5]


def test_open_files_do_not_add_up(images: Path) -> None:
    table = write(images, "t.csv", "path,caption", *(f"{n}.jpg,x" for n in range(1, 6)))
    index = index_of(table)
    reader = IndexedReader(index, TableSource([str(table)], ACCESS))
    before = len(os.listdir("/proc/self/fd"))
    for sample in range(5):
        reader.image(sample)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("value", "text", "length"),
    [
        (" a cat ", "a cat", 5),
        (["a", "", "bé "], '["a", "bé"]', 3),
        (["only", " "], "only", 4),
        ([], None, -1),
        (["", " "], None, -1),
        ("  ", None, -1),
        (3, None, -1),
        (None, None, -1),
        ('["x", "longer"]', '["x", "longer"]', 6),
    ],
)
def test_cells_as_captions(value: object, text: str | None, length: int) -> None:
    assert (caption_of(value), length_of(caption_of(value))) == (text, length)
