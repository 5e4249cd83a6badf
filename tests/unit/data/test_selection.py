from pathlib import Path

import pytest

from sd_training.config.filter_grammar import parse_filters
from sd_training.data.caption_choice import CaptionRules
from sd_training.data.captions import Prompts
from sd_training.data.selection import Selection, select
from sd_training.errors import DataError
from tests import makers
from tests.unit.data.making import tar_index


def selected(
    path: Path, filters: dict[str, str | int | float] | None = None, prompts: Prompts | None = None
) -> Selection:
    rules, problems = parse_filters(filters)
    assert not problems
    index = tar_index(sorted(path.glob("*.tar")), sorted(set().union(*(rule.fields() for rule in rules))))
    return select(index, rules, prompts, CaptionRules())


def test_filters_alone_and_together(shards_dir: Path) -> None:
    selection = selected(shards_dir, {"original_width": ">=50", "pwatermark": "<0.25"})
    assert selection.survivors.tolist() == [i for i in range(32) if 40 + i >= 50 and (i % 10) / 10 < 0.25]
    assert [count for _, count in selection.rules] == [22, 11]


def test_nothing_left_says_what_each_filter_keeps(shards_dir: Path) -> None:
    with pytest.raises(DataError) as error:
        selected(shards_dir, {"original_width": ">=60", "pwatermark": "<=0.4", "missing": ">1", "uid": "u3"})
    message = str(error.value)
    assert "original_width >= 60: 12 samples" in message
    assert "pwatermark <= 0.4: 17 samples" in message
    assert "missing > 1: 0 samples" in message
    assert 'uid == "u3": 1 samples' in message
    assert "no sample has the metadata field 'missing' (fields found: original_width, pwatermark, uid)" in message
    assert "all together: 0" in message


def test_missing_captions_are_named(tmp_path: Path) -> None:
    samples = makers.caption_samples(4)
    del samples[2]["txt"]
    makers.write_shard(tmp_path / "a.tar", samples)
    selection = selected(tmp_path)
    assert selection.survivors.tolist() == [0, 1, 3]
    assert selection.problems.text() == f"caption missing 1 (first: {tmp_path}/a.tar 000002)"


def test_unknown_and_missing_classes_are_named(tmp_path: Path) -> None:
    classes = ["0", "1", "7", None, "x"]
    samples = [
        {"__key__": f"{i}", "jpg": b"x"} | ({} if c is None else {"cls": c.encode()}) for i, c in enumerate(classes)
    ]
    makers.write_shard(tmp_path / "a.tar", samples)
    selection = selected(tmp_path, prompts={"0": ["zero"], "1": ["one"], "x": ["ex"]})
    assert selection.survivors.tolist() == [0, 1, 4]
    assert selection.problems.counts == {"class missing": 1, "class without a prompt": 1}
    assert "class '7'" in selection.problems.text()


def test_no_classes_at_all(tmp_path: Path) -> None:
    makers.caption_shards(tmp_path)
    with pytest.raises(DataError, match="class missing 32"):
        selected(tmp_path, prompts={"0": ["zero"]})
