import json
from pathlib import Path
from typing import Any

import pytest

from sd_training.config.data_schema import CaptionConfig
from sd_training.config.filters import parse_filters
from sd_training.data.index.selection import Selection, select
from sd_training.data.samples.captions import CAPTION, Prompts, caption_weights
from sd_training.errors import DataError
from tests import makers
from tests.unit.data.making import tar_index, training_data

IMAGE = makers.encode(makers.picture(0))

OWN = CaptionConfig()


def selected(
    path: Path,
    filters: dict[str, str | int | float] | None = None,
    prompts: Prompts | None = None,
    captions: CaptionConfig = OWN,
    captions_needed: bool = True,
    max_pixels: int = 10**9,
) -> Selection:
    rules, problems = parse_filters(filters)
    assert not problems
    fields = set().union(caption_weights(captions), *(rule.fields() for rule in rules)) - {CAPTION}
    index = tar_index(sorted(path.glob("*.tar")), sorted(fields))
    return select(index, rules, prompts, captions if captions_needed else None, max_pixels)


def described(path: Path, *metadata: dict[str, Any], caption: str = "own") -> Path:
    """One shard with a sample for each metadata."""
    image = makers.encode(makers.picture(0))
    makers.write_shard(
        path / "a.tar",
        [
            {"__key__": f"{i}", "jpg": image, "txt": caption, "json": json.dumps(m).encode()}
            for i, m in enumerate(metadata)
        ],
    )
    return path


def test_empty_fields_are_found_before_training(tmp_path: Path) -> None:
    texts = ["long", "", " \n", [""], ["", " "], [], ["", "b"], "[]", 7, None, "[x]"]
    folder = described(tmp_path, *({"long": text} for text in texts), {})
    selection = selected(folder, captions=CaptionConfig(fields={"long": 1}))
    assert [([*texts, "missing"][i]) for i in selection.selected] == ["long", ["", "b"], 7, "[x]"]
    assert selection.problems.counts == {"caption missing": 8}
    assert len(selected(folder, captions=CaptionConfig(fields={"long": 1, CAPTION: 1})).selected) == 12


def test_an_empty_own_caption_counts_only_where_it_is_the_only_one(tmp_path: Path) -> None:
    folder = described(tmp_path, {"long": "a"}, {}, caption="")
    assert selected(folder).selected.tolist() == [0, 1]
    assert selected(folder, captions=CaptionConfig(fields={"long": 1, CAPTION: 1})).selected.tolist() == [0]


def test_nobody_misses_captions_that_are_not_read(tmp_path: Path) -> None:
    samples = makers.caption_samples(4)
    del samples[2]["txt"]
    makers.write_shard(tmp_path / "a.tar", samples)
    selection = selected(tmp_path, captions_needed=False)
    assert selection.selected.tolist() == [0, 1, 2, 3]
    assert not selection.problems.total()
    assert len(selected(tmp_path, prompts={"0": ["zero"]}, captions_needed=False).selected) == 4


def test_images_of_too_many_pixels_are_left_out_and_named(tmp_path: Path) -> None:
    samples = [*makers.caption_samples(3), *makers.caption_samples(2, first=3, width=80)]
    makers.write_shard(tmp_path / "a.tar", samples)
    selection = selected(tmp_path, max_pixels=40 * 32)
    assert selection.selected.tolist() == [0, 1, 2]
    first = f"first: {tmp_path}/a.tar 000003, 80 × 32, at most 1280 are allowed"
    assert selection.problems.text() == f"image has too many pixels 2 ({first})"
    assert not selected(tmp_path, {"width": "<=40"}, max_pixels=40 * 32).problems.total()
    assert "image has too many pixels 5" in selected(tmp_path, max_pixels=100).problems.text()


def test_filters_alone_and_together(shards_dir: Path) -> None:
    selection = selected(shards_dir, {"original_width": ">=50", "pwatermark": "<0.25"})
    assert selection.selected.tolist() == [i for i in range(32) if 40 + i >= 50 and (i % 10) / 10 < 0.25]
    assert [count for _, count in selection.rules] == [22, 11]


def test_nothing_left_says_what_each_filter_keeps(shards_dir: Path) -> None:
    filters = {"original_width": ">=60", "pwatermark": "<=0.4", "missing": ">1", "uid": "u3"}
    with pytest.raises(DataError) as error:
        training_data(shards_dir, filters=filters).report()
    message = str(error.value)
    assert "original_width >= 60: 12 samples" in message
    assert "pwatermark <= 0.4: 17 samples" in message
    assert "missing > 1: 0 samples" in message
    assert 'uid == "u3": 1 sample\n' in message
    assert "no sample has the metadata field 'missing' (fields found: original_width, pwatermark, uid)" in message
    assert "no sample is left of" in message


def test_missing_captions_are_named(tmp_path: Path) -> None:
    samples = makers.caption_samples(4)
    del samples[2]["txt"]
    makers.write_shard(tmp_path / "a.tar", samples)
    selection = selected(tmp_path)
    assert selection.selected.tolist() == [0, 1, 3]
    assert selection.problems.text() == f"caption missing 1 (first: {tmp_path}/a.tar 000002)"


def test_unknown_and_missing_classes_are_named(tmp_path: Path) -> None:
    classes = ["0", "1", "7", None, "x"]
    samples = [
        {"__key__": f"{i}", "jpg": IMAGE} | ({} if c is None else {"cls": c.encode()}) for i, c in enumerate(classes)
    ]
    makers.write_shard(tmp_path / "a.tar", samples)
    selection = selected(tmp_path, prompts={"0": ["zero"], "1": ["one"], "x": ["ex"]})
    assert selection.selected.tolist() == [0, 1, 4]
    assert selection.problems.counts == {"class missing": 1, "class without a prompt": 1}
    assert "class '7'" in selection.problems.text()


def test_no_classes_at_all(tmp_path: Path) -> None:
    makers.caption_shards(tmp_path)
    with pytest.raises(DataError, match="class missing 32"):
        training_data(tmp_path, kind="ClassificationWebDataset", idx_to_prompt={"0": "zero"}).report()
