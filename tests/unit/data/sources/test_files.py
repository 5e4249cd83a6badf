import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from sd_training.config.data_schema import SourceParams
from sd_training.data.index.store import load_index
from sd_training.data.sources.base import DatasetIndex, IndexedReader
from sd_training.data.sources.choose import make_source
from sd_training.data.sources.files import FolderSource
from sd_training.errors import BadSample, ConfigError, DataError
from tests import makers
from tests.unit.data.locked_folder import locked
from tests.unit.data.making import ACCESS

IMAGE = makers.encode(makers.picture(0))


def add(root: Path, *names: str) -> None:
    """Files with fitting content: a caption is the path of its file."""
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {".txt": name.encode(), ".json": json.dumps({"name": name, "size": 3}).encode()}
        path.write_bytes(content.get(path.suffix.lower(), IMAGE))


def index_of(*roots: Path, fields: Sequence[str] = ()) -> DatasetIndex:
    return load_index(FolderSource([str(root) for root in roots]), roots[0].parent / "index", fields)


def captions(*roots: Path) -> dict[str, str | None]:
    """Path of the image from the first root → caption."""
    index = index_of(*roots)
    reader, found = IndexedReader(index, FolderSource([])), {}
    for sample in range(len(index)):
        unit, key = index.name(sample)
        has_caption = index.numbers("caption_length")[sample] >= 0
        found[f"{os.path.relpath(unit, roots[0])}/{key}"] = reader.caption(sample) if has_caption else None
    return found


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def test_layouts(root: Path) -> None:
    add(root, "1.jpg", "1.txt", "a/b/2.PNG", "a/b/2.TXT")
    add(root, "images/3.jpg", "captions/3.txt", "images/x/4.jpg", "captions/x/4.txt")
    add(root, "c/img/5.webp", "c/txt/5.txt", "c/img/y/6.jpeg", "c/txt/y/6.txt")
    add(root, "images/z/images/7.jpg", "captions/z/images/7.txt")
    assert captions(root) == {
        "./1.jpg": "1.txt",
        "a/b/2.PNG": "a/b/2.TXT",
        "images/3.jpg": "captions/3.txt",
        "images/x/4.jpg": "captions/x/4.txt",
        "c/img/5.webp": "c/txt/5.txt",
        "c/img/y/6.jpeg": "c/txt/y/6.txt",
        "images/z/images/7.jpg": "captions/z/images/7.txt",
    }


def test_beside_wins_and_nothing_outside_is_read(root: Path) -> None:
    add(root, "images/1.jpg", "images/1.txt", "captions/1.txt", "images/2.jpg", "captions/2.txt", "images/3.jpg")
    assert captions(root) == {"images/1.jpg": "images/1.txt", "images/2.jpg": "captions/2.txt", "images/3.jpg": None}
    assert captions(root / "images") == {"./1.jpg": "images/1.txt", "./2.jpg": None, "./3.jpg": None}


def test_captions_become_one_line(root: Path) -> None:
    add(root, "1.jpg", "2.jpg")
    (root / "1.txt").write_bytes(b"\xef\xbb\xbf a  cat,\r\n\n   asleep \n")
    (root / "2.txt").touch()
    assert captions(root) == {"./1.jpg": "a cat, asleep", "./2.jpg": ""}


def test_a_checkpoint_knows_captions_by_their_length(root: Path) -> None:
    """What docs/data.md says of changed captions: the text itself is not compared."""
    add(root, "1.jpg")
    fingerprints = []
    for text in ("a cat", "a dog", "a bird"):
        (root / "1.txt").write_text(text)
        assert captions(root) == {"./1.jpg": text}
        fingerprints.append(index_of(root).fingerprint)
    assert fingerprints[0] == fingerprints[1] != fingerprints[2]


def test_metadata_beside_or_with_the_caption(root: Path) -> None:
    add(root, "img/1.jpg", "img/1.json", "img/2.jpg", "txt/2.json", "img/3.jpg", "img/4.jpg")
    (root / "img" / "3.json").write_text("[1]")
    index = index_of(root, fields=["name", "size"])
    assert [index.metadata_text("name", i) for i in range(4)] == ["img/1.json", "txt/2.json", None, None]
    assert index.columns["number:size"].to_pylist() == [3, 3, None, None]
    assert index.problems.text() == f"metadata is not a JSON object 1 (first: {root}/img 3.jpg)"


def test_what_is_left_out_is_named(root: Path) -> None:
    add(root, "1.jpg", "1.txt", "2.gif", "2.txt", "notes.txt", ".hidden.jpg", ".thumbs/3.jpg", "4.jpg")
    (root / "4.txt").write_text("x" * (1 << 20) + "y")
    (root / os.fsdecode(b"\xff.jpg")).write_bytes(IMAGE)
    index = index_of(root)
    assert [index.name(i)[1] for i in range(len(index))] == ["1.jpg", "4.jpg"]
    assert {(problem.key, problem.reason) for problem in index.problems.named()} == {
        ("2.gif", "image format is not read: .gif"),
        ("4.jpg", f"caption file has too many bytes: {(1 << 20) + 1}"),
        (r"\udcff.jpg", "file name is not UTF-8"),
    }


def test_one_unit_per_folder_in_a_fixed_order(root: Path) -> None:
    add(root, "b/1.jpg", "a/z/2.jpg", "a/1.jpg", "texts/1.txt")
    source = FolderSource([str(root / "b"), str(root), f"{root}/a/"])
    assert [unit.location for unit in source.shards()] == [f"{root}/{name}" for name in ("b", "a", "a/z")]


@pytest.mark.parametrize("changed", ["images/1.jpg", "captions/1.txt", "images/1.json", "captions/new.txt"])
def test_a_unit_changes_with_its_files(root: Path, changed: str) -> None:
    add(root, "images/1.jpg", "captions/1.txt", "images/1.json", "other/1.jpg")
    before = FolderSource([str(root)]).shards()
    add(root, changed)
    os.utime(root / changed, ns=(1, 1))
    after = FolderSource([str(root)]).shards()
    assert before[0].version != after[0].version and before[1] == after[1]


def test_links(root: Path, tmp_path: Path) -> None:
    add(tmp_path / "disk", "pictures/1.jpg", "words/1.txt")
    (root / "images").symlink_to(tmp_path / "disk" / "pictures")
    (root / "captions").symlink_to(tmp_path / "disk" / "words")
    (tmp_path / "disk" / "pictures" / "loop").symlink_to(root)
    (root / "itself").symlink_to(root / "itself")
    assert captions(root) == {"images/1.jpg": "words/1.txt"}


def test_no_images(root: Path) -> None:
    add(root, "1.txt", "2.gif")
    with pytest.raises(DataError, match=r"no image file \(\.jpeg, .* in or below "):
        index_of(root)


def test_places_that_are_no_folders(root: Path) -> None:
    add(root, "1.jpg")
    for kind in ("ImageFolder", "TagFolder"):
        with pytest.raises(DataError, match=r"1\.jpg' is no folder"):
            make_source(kind, SourceParams(path=f"{root}/1.jpg"), ACCESS)
        with pytest.raises(DataError, match=r"gone' does not exist"):
            make_source(kind, SourceParams(path=f"{root}/gone"), ACCESS)
        with pytest.raises(ConfigError, match=r"'s3://bucket/set' is remote.*make_webdataset"):
            make_source(kind, SourceParams(path="s3://bucket/set"), ACCESS)


def test_files_that_change_later_make_bad_samples(root: Path) -> None:
    add(root, "1.jpg", "1.txt", "2.jpg", "2.txt")
    index = index_of(root)
    reader = IndexedReader(index, FolderSource([]))
    (root / "1.txt").write_text("another caption")
    (root / "2.jpg").unlink()
    with pytest.raises(BadSample, match=r"caption file has changed since it was indexed: 1\.txt"):
        reader.caption(0)
    with pytest.raises(BadSample, match=r"image file missing: 2\.jpg"):
        reader.image(1)
    assert reader.caption(1) == "2.txt"


def test_captions_that_are_not_utf8_are_bad_samples(root: Path) -> None:
    add(root, "1.jpg")
    (root / "1.txt").write_bytes("Kätzchen".encode("latin-1"))
    with pytest.raises(BadSample, match="caption is not UTF-8"):
        captions(root)


def test_folders_that_cannot_be_read(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add(root, "1.jpg")
    locked(root / "locked", monkeypatch)
    with pytest.raises(DataError, match=r"'.*/locked' cannot be read: Permission denied"):
        index_of(root)
