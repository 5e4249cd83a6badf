"""Data sets of the `datasets` library: files written by hand, then folders that the library itself wrote."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from sd_training.data.index.store import load_index
from sd_training.data.sources.arrow import ArrowSource, saved_files
from sd_training.data.sources.base import DatasetIndex, IndexedReader, captions_in
from sd_training.errors import BadSample, ConfigError, DataError
from tests import makers
from tests.unit.data.locked_folder import locked
from tests.unit.data.making import ACCESS

IMAGES = [makers.encode(makers.picture(number, 40 + number, 32)) for number in range(6)]


def cells(images: Sequence[bytes | None]) -> list[dict[str, Any] | None]:
    return [None if image is None else {"bytes": image, "path": "name.jpg"} for image in images]


def index_of(folder: Path, fields: Sequence[str] = (), **columns: str) -> DatasetIndex:
    wanted = (columns.get("image_column"), columns.get("caption_column"))
    return load_index(ArrowSource([str(folder)], ACCESS, wanted, saved=True), folder.parent / "index", fields)


def image_and_caption(index: DatasetIndex, sample: int) -> tuple[bytes, list[str]]:
    reader = IndexedReader(index, ArrowSource([], ACCESS, saved=True))
    return reader.image(sample), captions_in(reader.caption(sample))


def named(index: DatasetIndex) -> set[tuple[str, str]]:
    return {(problem.key, problem.reason) for problem in index.problems.named()}


def write_arrow(folder: Path, table: pa.Table, options: pa.ipc.IpcWriteOptions | None = None) -> Path:
    folder.mkdir()
    with (
        pa.OSFile(str(folder / "data.arrow"), "wb") as sink,
        pa.ipc.new_stream(sink, table.schema, options=options) as w,
    ):
        w.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))
    return folder


def test_files_of_several_batches_with_holes(tmp_path: Path) -> None:
    """Offsets are those of the file, whatever batch and slice a value is in."""
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    images = [IMAGES[0], None, *IMAGES[1:]]
    table = pa.table({"image": pa.array(cells(images), kind), "text": [f"c{i}" for i in range(7)]})
    parts = [table.slice(0, 2), table.slice(2, 3), table.slice(5)]
    folder = write_arrow(tmp_path / "set", pa.concat_tables(parts))
    index = index_of(folder)
    assert [image_and_caption(index, i) for i in range(6)] == [(IMAGES[i], [f"c{i + (i > 0)}"]) for i in range(6)]
    assert [index.name(i)[1] for i in range(6)] == ["row 0", "row 2", "row 3", "row 4", "row 5", "row 6"]
    assert named(index) == {("row 1", "image is empty")}


def test_batches_without_rows(tmp_path: Path) -> None:
    table = pa.table({"image": IMAGES[:2], "text": ["a", "b"]})
    empty, folder = table.slice(0, 0), tmp_path / "set"
    write_arrow(folder, table)
    with pa.OSFile(str(folder / "data.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        for part in (empty, table, empty):
            for batch in part.to_batches() or [pa.RecordBatch.from_pylist([], table.schema)]:
                writer.write_batch(batch)
    index = index_of(folder)
    assert [image_and_caption(index, i) for i in range(len(index))] == [(IMAGES[0], ["a"]), (IMAGES[1], ["b"])]


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary()])
def test_plain_binary_columns(tmp_path: Path, kind: pa.DataType) -> None:
    table = pa.table({"jpg": pa.array(IMAGES[:3], kind), "caption": ["a", "b", "c"]})
    index = index_of(write_arrow(tmp_path / "set", table))
    assert [image_and_caption(index, i) for i in range(3)] == [(IMAGES[i], ["abc"[i]]) for i in range(3)]


def test_content_and_paths_in_one_column(tmp_path: Path) -> None:
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    rows = [{"bytes": None, "path": "a.jpg"}, {"bytes": IMAGES[1], "path": None}, {"bytes": None, "path": "a.jpg"}]
    folder = write_arrow(tmp_path / "set", pa.table({"image": pa.array(rows, kind), "text": ["a", "b", "c"]}))
    (folder / "a.jpg").write_bytes(IMAGES[0])
    index = index_of(folder)
    assert [image_and_caption(index, i)[0] for i in range(3)] == [IMAGES[0], IMAGES[1], IMAGES[0]]


def test_columns_by_name(tmp_path: Path) -> None:
    table = pa.table({"image": [1], "thumb": [IMAGES[0]], "text": [2], "alt": ["words"]})
    folder = write_arrow(tmp_path / "set", table)
    assert image_and_caption(index_of(folder, image_column="thumb", caption_column="alt"), 0) == (IMAGES[0], ["words"])
    with pytest.raises(ConfigError, match=r"dataset\.params\.image_column: .* no column 'jpg'; it has image, thumb"):
        index_of(folder, image_column="jpg")
    with pytest.raises(DataError, match=r"image_column: column 'image' of .* is int64"):
        index_of(folder, caption_column="alt")


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (None, "not a folder written by save_to_disk .*one split"),
        ("{", "does not name files as save_to_disk does"),
        ("[" * 200_000, "does not name files"),
        ("[]", "does not name files"),
        ({"a": 1}, "does not name files"),
        ({"_data_files": []}, "no Arrow file"),
        ({"_data_files": 5}, "does not name files"),
        ({"_data_files": [{"x": 1}]}, "does not name files"),
        ({"_data_files": [{"filename": 5}]}, "does not name files"),
        ({"_data_files": [{"filename": "a\0"}]}, "does not name files"),
        ({"_data_files": [{"filename": "\ud800"}]}, "does not name files"),
        ({"_data_files": [{"filename": "../y.arrow"}]}, "set/y.arrow' cannot be read: No such file"),
        ({"_data_files": [{"filename": "gone.arrow"}]}, "No such file"),
        ({"_data_files": [{"filename": "x.arrow"}]}, "not a readable Arrow file"),
    ],
)
def test_folders_that_cannot_be_read(tmp_path: Path, state: Any, said: str) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "x.arrow").write_bytes(b"this is no Arrow file")
    if state is not None:
        (tmp_path / "set" / "state.json").write_text(state if isinstance(state, str) else json.dumps(state))
    with pytest.raises(DataError, match=said):
        index_of(tmp_path / "set")


@pytest.mark.parametrize("cut", [3000, 8])
def test_a_truncated_file_is_an_error(tmp_path: Path, cut: int) -> None:
    """8 bytes are the end mark; without it the rest looks whole to pyarrow."""
    folder = write_arrow(tmp_path / "set", pa.table({"image": IMAGES, "text": ["x"] * 6}))
    os.truncate(folder / "data.arrow", (folder / "data.arrow").stat().st_size - cut)
    with pytest.raises(DataError, match=r"data\.arrow' is not a readable Arrow file"):
        index_of(folder)


def test_compressed_files_are_refused(tmp_path: Path) -> None:
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    folder = write_arrow(tmp_path / "set", pa.table({"image": IMAGES, "text": ["x"] * 6}), options)
    with pytest.raises(DataError, match=r"data\.arrow' is a compressed Arrow file; .*save it again"):
        index_of(folder)


def test_a_file_that_changes_later_is_an_error(tmp_path: Path) -> None:
    folder = write_arrow(tmp_path / "set", pa.table({"image": IMAGES, "text": ["x"] * 6}))
    index = index_of(folder)
    os.utime(folder / "data.arrow", ns=(1, 1))
    with pytest.raises(DataError, match="has changed since it was indexed"):
        image_and_caption(index, 0)


def test_a_path_that_vanishes_later_is_a_bad_sample(tmp_path: Path) -> None:
    folder = write_arrow(tmp_path / "set", pa.table({"path": ["a.jpg"], "text": ["x"]}))
    (folder / "a.jpg").write_bytes(IMAGES[0])
    index = index_of(folder)
    (folder / "a.jpg").unlink()
    with pytest.raises(BadSample, match="image file missing"):
        image_and_caption(index, 0)


def test_columns_without_values(tmp_path: Path) -> None:
    cells = pa.array([{"bytes": None, "path": "1.jpg"}, None])
    assert pa.types.is_null(cells.type.field("bytes").type)
    folder = write_arrow(tmp_path / "b", pa.table({"image": cells, "text": pa.nulls(2)}))
    (folder / "1.jpg").write_bytes(IMAGES[0])
    index = index_of(folder)
    assert len(index) == 1
    assert {reason for _, reason in named(index)} == {"image is empty"}


def test_a_folder_given_twice_counts_once(tmp_path: Path) -> None:
    folder = write_arrow(tmp_path / "set", pa.table({"image": [IMAGES[0]], "caption": ["x"]}))
    assert len(ArrowSource([str(folder), f"{folder}/"], ACCESS, saved=True).shards()) == 1


def test_a_folder_that_may_not_be_read_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"'.*/set/state\.json' cannot be read: Permission denied"):
        ArrowSource([str(locked(tmp_path / "set", monkeypatch))], ACCESS, saved=True).shards()


@pytest.mark.parametrize(
    ("query", "options"),
    [("", {"split": "train"}), ("?split=test&revision=abc", {"split": "test", "revision": "abc"})],
)
def test_a_data_set_of_the_hub(monkeypatch: pytest.MonkeyPatch, query: str, options: dict[str, str]) -> None:
    def load_dataset(name: str, **given: str) -> Any:
        assert (name, given) == ("owner/set", options)
        return SimpleNamespace(cache_files=[{"filename": "/cache/0.arrow"}, {"filename": "/cache/1.arrow"}])

    library = SimpleNamespace(__version__="5.2.0", load_dataset=load_dataset)
    monkeypatch.setitem(sys.modules, "datasets", library)
    path = f"hf://datasets/owner/set{query}"
    assert saved_files(path, ACCESS) == ["/cache/0.arrow", "/cache/1.arrow"]
    with pytest.raises(ConfigError, match="unknown trust_remote_code; write split, name or revision"):
        saved_files("hf://datasets/owner/set?trust_remote_code=1", ACCESS)
    monkeypatch.setattr(library, "__version__", "3.6.0")
    with pytest.raises(ConfigError, match=r"pip install 'datasets>=4\.0'"):
        saved_files(path, ACCESS)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"dataset\.params\.path: 'hf://.* pip install 'datasets>=4\.0'"):
        saved_files(path, ACCESS)


datasets = pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def quiet() -> None:
    datasets.disable_progress_bars()


def save(folder: Path, columns: dict[str, Sequence[Any]], features: dict[str, Any], **options: Any) -> Path:
    kinds = {name: datasets.Value(kind) if isinstance(kind, str) else kind for name, kind in features.items()}
    datasets.Dataset.from_dict(dict(columns), features=datasets.Features(kinds)).save_to_disk(str(folder), **options)
    return folder


def test_several_files_and_batches(tmp_path: Path) -> None:
    captions = [f"caption {i}" for i in range(6)]
    columns = {"image": cells(IMAGES), "text": captions}
    folder = save(tmp_path / "set", columns, {"image": datasets.Image(), "text": "string"}, num_shards=2)
    source = ArrowSource([str(folder)], ACCESS, saved=True)
    assert [Path(unit.location).name for unit in source.shards()] == [f"data-0000{i}-of-00002.arrow" for i in range(2)]
    index = index_of(folder)
    assert [image_and_caption(index, i) for i in range(6)] == [(IMAGES[i], [captions[i]]) for i in range(6)]
    assert index.numbers("width").tolist() == [40, 41, 42, 43, 44, 45]


def test_paths(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "in.jpg").write_bytes(IMAGES[0])
    (tmp_path / "out.jpg").write_bytes(IMAGES[1])
    paths = ["in.jpg", str(tmp_path / "out.jpg"), "../out.jpg", "gone.jpg"]
    index = index_of(
        save(tmp_path / "set", {"path": paths, "text": list("abcd")}, {"path": "string", "text": "string"})
    )
    expected = [(IMAGES[0], ["a"]), (IMAGES[1], ["b"]), (IMAGES[1], ["c"])]
    assert [image_and_caption(index, i) for i in range(len(index))] == expected
    assert named(index) == {("row 3", "image file missing: gone.jpg")}


def test_captions_and_metadata(tmp_path: Path) -> None:
    columns = {
        "image": cells(IMAGES[:3]),
        "caption": [["one", "two"], [], ["three"]],
        "score": [0.5, None, float("nan")],
        "is_good": [True, False, None],
        "label": [1, 0, 1],
        "more": [["x", "y"], ["z"], []],
        "vector": [[1.0], [2.0], [3.0]],
    }
    texts = datasets.Sequence(datasets.Value("string"))
    features = {
        "image": datasets.Image(),
        "caption": texts,
        "score": "float32",
        "is_good": "bool",
        "label": datasets.ClassLabel(names=["no", "yes"]),
        "more": texts,
        "vector": datasets.Sequence(datasets.Value("float32")),
    }
    index = index_of(save(tmp_path / "set", columns, features), ["score", "is_good", "label", "more"])
    assert image_and_caption(index, 0)[1] == ["one", "two"] and image_and_caption(index, 2)[1] == ["three"]
    assert index.numbers("caption_length").tolist() == [3, -1, 5]
    assert not named(index)
    assert index.fields == {"caption", "score", "is_good", "label", "more"}
    assert index.columns["number:score"].to_pylist() == [0.5, None, None]
    assert index.columns["number:label"].to_pylist() == [1, 0, 1]
    assert index.metadata_text("is_good", 1) == "false"
    assert captions_in(index.metadata_text("more", 0)) == ["x", "y"]


def test_splits_are_named(tmp_path: Path) -> None:
    part = datasets.Dataset.from_dict({"image": ["a.jpg"], "text": ["x"]})
    datasets.DatasetDict({"train": part, "test": part}).save_to_disk(str(tmp_path / "set"))
    with pytest.raises(DataError, match="of a DatasetDict, name the folder of one split"):
        index_of(tmp_path / "set")
    (tmp_path / "set" / "train" / "a.jpg").write_bytes(IMAGES[0])
    assert image_and_caption(index_of(tmp_path / "set" / "train"), 0) == (IMAGES[0], ["x"])


def test_a_caption_column_of_numbers_is_refused(tmp_path: Path) -> None:
    folder = write_arrow(tmp_path / "a", pa.table({"image": [b"x"], "text": [1]}))
    with pytest.raises(ConfigError, match=r"column .text. of .*data\.arrow is int64; it must hold texts"):
        index_of(folder)
