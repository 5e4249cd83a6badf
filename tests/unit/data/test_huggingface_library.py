"""Folders that the `datasets` library itself wrote; test_huggingface_source.py has those that were written by hand."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sd_training.data.samples.captions import captions_in
from sd_training.data.sources.saved_dataset import HuggingFaceSource
from sd_training.errors import DataError
from tests.unit.data.making import ACCESS
from tests.unit.data.saved_datasets import IMAGES, cells, image_and_caption, index_of, named

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
    source = HuggingFaceSource([str(folder)], ACCESS)
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
    assert named(index) == {("row 1", "caption is empty")}
    assert index.fields == {"caption", "score", "is_good", "label", "more"}
    assert index.columns["number:score"].to_pylist() == [0.5, None, None]
    assert index.columns["number:label"].to_pylist() == [1, 0, 1]
    assert index.metadata_text("is_good", 1) == "false"
    assert captions_in(index.metadata_text("more", 0)) == ["x", "y"]


def test_splits_are_named(tmp_path: Path) -> None:
    part = datasets.Dataset.from_dict({"image": ["a.jpg"], "text": ["x"]})
    datasets.DatasetDict({"train": part, "test": part}).save_to_disk(str(tmp_path / "set"))
    with pytest.raises(DataError, match=r"several splits; name one: '.*/set/train' or '.*/set/test'"):
        index_of(tmp_path / "set")
    (tmp_path / "set" / "train" / "a.jpg").write_bytes(IMAGES[0])
    assert image_and_caption(index_of(tmp_path / "set" / "train"), 0) == (IMAGES[0], ["x"])


def test_the_library_is_not_imported() -> None:
    """Loader and index processes stay small."""
    code = (
        "import sys, sd_training.data.sources.saved_dataset; print({'datasets', 'pandas', 'torch'} & set(sys.modules))"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.strip() == "set()"
