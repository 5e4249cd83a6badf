"""Tag records: what is read from a file, what of it the index keeps, and what is said of a damaged one."""

import json
from typing import Any

import pytest

from sd_training.data.sources.tags import read_tag_record, write_tags
from tests.unit.data.tag_example import KINDLE


def written(**changes: Any) -> str:
    return json.dumps({name: value for name, value in {**KINDLE, **changes}.items() if value is not None})


def test_read_a_record() -> None:
    assert read_tag_record(json.dumps(KINDLE)) == (KINDLE["path"], 1.0, 55, KINDLE["tags"])
    assert read_tag_record(written(aspect_ratio=None)).aspect_ratio is None
    assert read_tag_record(written(score=-3.0, path="./a//b.png"))[:3] == ("a/b.png", 1.0, -3)
    assert isinstance(read_tag_record(written(score=7.0)).score, int)
    assert read_tag_record(written(tags=[])).tags == []


def test_what_the_index_keeps() -> None:
    kindle = read_tag_record(written(tags=["é, ☃", '"', "a||b"]))
    assert write_tags(kindle) == '[55,"é, ☃","\\"","a||b"]'
    assert json.loads(write_tags(kindle)) == [55, "é, ☃", '"', "a||b"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "no JSON object"),
        (written(tags=None), "without tags"),
        (written(score=None), "without score"),
        (written(path=None), "without path"),
        (written(path=3), "path that is no text"),
        (written(path="a\0b"), "path that is no text"),
        (written(path="\ud800.png"), "path that is no text"),
        (written(path="/etc/passwd"), "leads out"),
        (written(path="a/../../b.png"), "leads out"),
        (written(path=""), "leads out"),
        (written(score="55"), "no whole number"),
        (written(score=True), "no whole number"),
        (written(score=1.5), "no whole number"),
        (written(score=float("nan")), "no whole number"),
        (written(score=10**30), "no whole number"),
        (written(aspect_ratio=0), "no number above 0"),
        (written(aspect_ratio="1"), "no number above 0"),
        (written(aspect_ratio=float("nan")), "no number above 0"),
        (written(aspect_ratio=10**400), "no number above 0"),
        (written(tags="a, b"), "no list of texts"),
        (written(tags=["a", 1]), "no list of texts"),
        (written(tags=["\udc00"]), "no list of texts"),
    ],
)
def test_a_damaged_record_says_what_is_wrong(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_tag_record(text)
