import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from sd_training.config.data_schema import TagConfig
from sd_training.config.plan import BatchPlan
from sd_training.data.index.store import load_index
from sd_training.data.sources.files import TagSource
from sd_training.errors import DataError
from tests import makers
from tests.unit.data.locked_folder import locked
from tests.unit.data.making import joined, stream, training_data

RULES: dict[str, Any] = {"abs_min_score": 10, "min_score": 20, "aspect_range": [0.5, 2.0]}


def add(root: Path, name: str, tags: list[str], score: int = 50, size: tuple[int, int] = (40, 32), **more: Any) -> None:
    """One image and its JSON file; `name` may have folders."""
    image = root / "pictures" / f"{name}.jpg"
    image.parent.mkdir(parents=True, exist_ok=True)
    image.write_bytes(makers.encode(makers.picture(len(name), *size)))
    record = {"path": f"pictures/{name}.jpg", "score": score, "tags": tags, **more}
    file = root / "metadata" / f"{name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(record))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "set"
    add(root, "a/1", ["cat", "sitting"])
    add(root, "a/b/2", ["dog"], score=15)
    add(root, "a/b/c/3", ["dog", "good"], score=15)
    add(root, "low", ["cat"], score=5)
    add(root, "wide", ["cat"], size=(90, 20))
    add(root, "told", ["cat"], aspect_ratio=1.0)
    (root / "metadata" / "broken.json").write_text("{")
    add(root, "gone", ["cat"])
    (root / "pictures" / "gone.jpg").unlink()
    return root


def keys(source: TagSource) -> list[str]:
    index = load_index(source, None)
    return [index.name(sample)[1] for sample in range(len(index))]


def test_what_takes_part_and_what_is_named(root: Path) -> None:
    config = TagConfig(**RULES, tag_bonus_scores={"good": 10})
    source = TagSource([str(root)], config)
    index = load_index(source, None, ["score"])
    assert keys(source) == ["metadata/told.json", "metadata/a/1.json", "metadata/a/b/c/3.json"]
    assert index.columns["number:score"].to_pylist() == [50.0, 50.0, 15.0]
    assert index.numbers("width").tolist() == [40, 40, 40]
    assert index.problems.total() == 5
    assert {problem.key.rpartition("/")[2] for problem in index.problems.named()} == {
        "2.json",
        "low.json",
        "wide.json",
        "broken.json",
        "gone.json",
    }


def test_every_nth_of_the_whole_list(root: Path) -> None:
    rules = TagConfig(abs_min_score=0, min_score=0, aspect_range=[0.1, 9.0], consider_every_nth=2)
    everything = ["broken", "gone", "low", "told", "wide", "a/1", "a/b/2", "a/b/c/3"]
    expected = [f"metadata/{name}.json" for name in everything[::2] if name != "broken"]
    assert keys(TagSource([str(root)], rules)) == expected


def test_every_nth_does_not_depend_on_what_was_indexed_before(tmp_path: Path) -> None:
    rules = TagConfig(abs_min_score=0, min_score=0, aspect_range=[0.1, 9.0], consider_every_nth=2)
    source = TagSource([str(tmp_path / "set")], rules)
    for name in ("a/1", "a/2", "b/1", "b/2", "b/3"):
        add(tmp_path / "set", name, ["cat"])
    before = load_index(source, tmp_path / "old")
    add(tmp_path / "set", "a/0", ["cat"])
    found = [load_index(source, tmp_path / index) for index in ("old", "new")]
    names = [[index.name(sample)[1] for sample in range(len(index))] for index in found]
    assert names[0] == names[1] == [f"metadata/{name}.json" for name in ("a/0", "a/2", "b/2")]
    assert len(before) == 3


def test_many_folders_are_listed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(20):
        add(tmp_path / "set", f"{number}/1", ["cat"])
    listed: list[str] = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path=".": listed.append(path) or scandir(path))
    source = TagSource([str(tmp_path / "set")], TagConfig(**RULES, consider_every_nth=2))
    load_index(source, tmp_path / "index")
    assert 20 <= len(listed) <= 80


def test_every_folder_must_have_metadata(root: Path, tmp_path: Path) -> None:
    (tmp_path / "empty" / "metadata").mkdir(parents=True)
    for wrong in ("empty", "gone"):
        with pytest.raises(DataError, match=rf"no \.json file below '.*{wrong}/metadata'"):
            TagSource([str(root), f"{tmp_path}/{wrong}"], TagConfig()).shards()


def test_a_folder_that_cannot_be_read_is_an_error(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locked(root / "metadata" / "a" / "locked", monkeypatch)
    with pytest.raises(DataError, match=r"'.*/a/locked' cannot be read: Permission denied"):
        TagSource([str(root)], TagConfig()).shards()


def test_links_are_followed_and_hidden_files_left_out(root: Path, tmp_path: Path) -> None:
    source = TagSource([str(root)], TagConfig(**RULES))
    before = keys(source)
    (root / "metadata" / "._told.json").write_text("{")
    (tmp_path / "disk").mkdir()
    (root / "metadata" / "b").symlink_to(tmp_path / "disk")
    (tmp_path / "disk" / "loop").symlink_to(root / "metadata")
    shutil.copy(root / "metadata" / "told.json", tmp_path / "disk" / "linked.JSON")
    assert keys(source) == [*before, "metadata/b/linked.JSON"]


def test_a_folder_given_twice_counts_once(root: Path) -> None:
    add(root / "inner", "1", ["cat"])
    rules = TagConfig(**RULES)
    once = keys(TagSource([str(root)], rules)) + keys(TagSource([f"{root}/inner"], rules))
    assert keys(TagSource([str(root), f"{root}/", f"{root}/inner"], rules)) == once


def test_a_byte_order_mark_is_no_damage(root: Path) -> None:
    told = root / "metadata" / "told.json"
    told.write_bytes(b"\xef\xbb\xbf" + told.read_bytes())
    assert "metadata/told.json" in keys(TagSource([str(root)], TagConfig(**RULES)))


def test_other_rules_index_anew_and_a_changed_file_is_seen(root: Path) -> None:
    strict = TagSource([str(root)], TagConfig(**{**RULES, "min_score": 45}))
    assert len(keys(strict)) == 2
    assert len(keys(TagSource([str(root)], TagConfig(**{**RULES, "min_score": 12})))) == 4
    add(root, "a/b/2", ["dog"], score=80)
    assert "metadata/a/b/2.json" in keys(strict)


def test_captions_are_drawn_per_visit(root: Path) -> None:
    tags = TagConfig(**RULES, shuffle_tag_p=1.0, tag_separator=" ", score_tags=[40])
    data = training_data(root, BatchPlan(1, 1, 1, 40), kind="TagFolder", tags=tags)
    batch = joined(stream(data))
    pairs = zip(batch.tokens["text_encoder"].tolist(), batch.sample_ids, strict=True)
    orders = {tuple(tokens) for tokens, i in pairs if i == 1}
    assert 2 < len(orders) <= 6  # of "cat", "sitting", "scr40"


def test_a_fixed_choice_of_images(root: Path) -> None:
    for number in range(30):
        add(root, f"more/{number:02d}", ["cat"])
    tags = TagConfig(**RULES, limit_images=10)
    chosen = training_data(root, BatchPlan(2, 1, 1, 20), kind="TagFolder", tags=tags)
    assert len(chosen.datasets[0].selected) == 10
    assert len(set(joined(stream(chosen)).sample_ids.tolist())) == 10
    again = training_data(root, BatchPlan(2, 1, 1, 20), kind="TagFolder", tags=tags)
    assert again.fingerprint() == chosen.fingerprint()


def test_no_metadata_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no \.json file below '.*metadata'"):
        TagSource([str(tmp_path)], TagConfig()).shards()
