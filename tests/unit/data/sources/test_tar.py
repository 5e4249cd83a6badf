import json
from pathlib import Path
from typing import Any

import pytest

from sd_training.config.data_schema import CaptionConfig
from sd_training.config.filters import parse_filters
from sd_training.data.index.selection import select
from sd_training.data.sources.base import IndexedReader, captions_in
from sd_training.data.sources.tar import TarSource
from sd_training.errors import BadSample
from tests import makers
from tests.unit.data.making import ACCESS, tar_index

KEYS = ["000000", "000001", "000002"]


def captions(shard: Path) -> list[str]:
    index = tar_index([shard])
    selection = select(index, [], None, CaptionConfig(), 10**9)
    reader = IndexedReader(index, TarSource([str(shard)], ACCESS))
    return [reader.caption(int(sample)) for sample in selection.selected]


def test_the_caption_of_the_metadata_where_there_is_no_text_member(tmp_path: Path) -> None:
    samples = makers.caption_samples(5)
    metadata: list[Any] = ["in the text", " of the JSON ", ["one", "two"], "", None]
    for sample, caption in zip(samples, metadata, strict=True):
        sample["json"] = json.dumps({"caption": caption}).encode()
    for sample in samples[1:]:
        del sample["txt"]
    shard = makers.write_shard(tmp_path / "0.tar", samples)
    first, second, third = captions(shard)
    assert (first, second, captions_in(third)) == ("a red picture", "of the JSON", ["one", "two"])
    assert tar_index([shard]).numbers("caption_length").tolist() == [13, 11, 3, -1, -1]


def test_captions_that_are_not_utf8_are_none(tmp_path: Path) -> None:
    samples = makers.caption_samples(2)
    samples[0]["txt"] = "Kätzchen".encode("latin-1")
    shard = makers.write_shard(tmp_path / "0.tar", samples)
    index = tar_index([shard])
    reader = IndexedReader(index, TarSource([str(shard)], ACCESS))
    assert index.problems.text() == f"caption is not UTF-8 text 1 (first: {shard} 000000)"
    with pytest.raises(BadSample, match="caption missing"):
        reader.caption(0)
    assert reader.caption(1) == "a green picture"


def test_words_of_truth_in_any_case(tmp_path: Path) -> None:
    samples = makers.caption_samples(4)
    for sample, value in zip(samples, ["False", "TRUE", False, "falsehood"], strict=True):
        sample["json"] = json.dumps({"nsfw": value}).encode()
    index = tar_index([makers.write_shard(tmp_path / "0.tar", samples)], ["nsfw"])
    for wanted, expected in {False: [0, 2], True: [1]}.items():
        rules, _ = parse_filters({"nsfw": wanted})
        assert select(index, rules, None, CaptionConfig(), 10**9).selected.tolist() == expected


def test_long_integers_stay_apart_from_their_neighbours(tmp_path: Path) -> None:
    samples, first = makers.caption_samples(4), 2**53
    for sample, value in zip(samples, [first, first + 1, str(first + 1), 5], strict=True):
        sample["json"] = json.dumps({"id": value}).encode()
    index = tar_index([makers.write_shard(tmp_path / "0.tar", samples)], ["id"])
    for written, expected in {first: [0], first + 1: [1, 2], f"!={first}": [1, 2, 3], f">={first}": [0, 1, 2]}.items():
        rules, _ = parse_filters({"id": written})
        assert select(index, rules, None, CaptionConfig(), 10**9).selected.tolist() == expected, written
