import json
from typing import Any

import numpy as np
import pytest

from sd_training.config.data_schema import TagConfig
from sd_training.data.samples.captions import tag_caption
from sd_training.data.sources.files import (
    TagRecord,
    TagSource,
    every_nth,
    limited,
    read_tag_record,
    rejection_reason,
    write_tags,
)
from sd_training.errors import ConfigError

KINDLE = {
    "tags": ["oc:kindle", "oc", "kirin", "artist:lulubell", "oc only", "solo", "safe"],
    "score": 55,
    "path": "images/287/2877648.png",
    "aspect_ratio": 1.0,
    "anything": {"else": None},
}
"""The example of the original's description."""


SCORE_TAGS = [3200, 1600, 800, 600, 400, 300, 200, 150, 100, 50, 25, 5]


def record(score: int = 100, tags: tuple[str, ...] = ("a", "b"), aspect_ratio: float | None = 1.0) -> TagRecord:
    return TagRecord(path="images/1.png", aspect_ratio=aspect_ratio, score=score, tags=list(tags))


def test_the_originals_example() -> None:
    config = TagConfig(
        shuffle_tag_p=0.0,
        blacklist_tags=["animated", "machine learning generated"],
        non_caption_tags=["high res", "alternate version"],
        replacements={"princess luna": "luna", "artist:": "by=", ":": "=", " ": "_"},
        tag_separator=" ",
        abs_min_score=50,
        min_score=155,
        score_tags=SCORE_TAGS,
        tag_bonus_scores={"solo": 100, "monochrome": -75},
    )
    rules = config
    kindle = read_tag_record(json.dumps(KINDLE))
    assert rejection_reason(kindle, rules) is None
    assert rejection_reason(kindle, rules.replace(min_score=156)) == "score with bonuses below min_score: 155"
    caption = "by=lulubell kirin oc oc_only oc=kindle safe scr50 solo"
    score, *tags = json.loads(write_tags(kindle))
    assert tag_caption(score, tags, config, np.random.default_rng) == caption


@pytest.mark.parametrize(
    ("sample", "options", "reason"),
    [
        (record(), {}, None),
        (record(score=25), {"min_score": 25}, None),
        (record(score=24), {"min_score": 0}, "score below abs_min_score: 24"),
        # A bonus does not help against abs_min_score.
        (record(score=24), {"min_score": 0, "tag_bonus_scores": {"a": 100}}, "score below abs_min_score: 24"),
        (record(score=49), {}, "score with bonuses below min_score: 49"),
        (record(score=49), {"tag_bonus_scores": {"a": 1}}, None),
        (record(score=60), {"tag_bonus_scores": {"a": -5.5, "b": -5}}, "score with bonuses below min_score: 49.5"),
        # Exact members only, each once.
        (
            record(score=49, tags=("ab", "a b")),
            {"tag_bonus_scores": {"a": 1}},
            "score with bonuses below min_score: 49",
        ),
        (record(score=48, tags=("a", "a")), {"tag_bonus_scores": {"a": 1}}, "score with bonuses below min_score: 49"),
        (record(), {"blacklist_tags": ["b", "c"]}, "blacklisted tag: b"),
        (record(tags=("bb",)), {"blacklist_tags": ["b"]}, None),
        # The score tag earns bonuses and can be blacklisted, but comes from the picture's own score.
        (record(score=30), {"score_tags": [25], "tag_bonus_scores": {"scr25": 20}}, None),
        (record(score=60), {"score_tags": [50], "blacklist_tags": ["scr50"]}, "blacklisted tag: scr50"),
        (record(score=40), {"score_tags": [50], "tag_bonus_scores": {"a": 20}, "blacklist_tags": ["scr50"]}, None),
        # The first reason in the order of operations counts.
        (record(score=1, aspect_ratio=2.0), {"blacklist_tags": ["a"]}, "aspect ratio outside aspect_range: 2"),
        (record(score=1), {"blacklist_tags": ["a"]}, "score below abs_min_score: 1"),
        (record(score=30), {"blacklist_tags": ["a"]}, "score with bonuses below min_score: 30"),
        (record(aspect_ratio=None), {}, None),
    ],
)
def test_judging(sample: TagRecord, options: dict[str, Any], reason: str | None) -> None:
    assert rejection_reason(sample, TagConfig(**options)) == reason


def test_the_aspect_range_counts_and_includes_its_ends() -> None:
    assert all(rejection_reason(record(aspect_ratio=end), TagConfig()) is None for end in (0.71, 1.42))
    assert rejection_reason(record(aspect_ratio=0.70), TagConfig()) == "aspect ratio outside aspect_range: 0.7"
    wide = TagConfig(aspect_range=[1.5, 2.0])
    assert rejection_reason(record(aspect_ratio=1.7), wide) is None
    assert rejection_reason(record(aspect_ratio=1.0), wide) == "aspect ratio outside aspect_range: 1"


def test_every_nth_of_the_sorted_files() -> None:
    names = ["d/1", "a/2", "c/9", "b/0", "a/10"]
    assert every_nth(names, TagConfig(consider_every_nth=2)) == ["a/10", "b/0", "d/1"]
    assert every_nth(names, TagConfig()) == every_nth(names, TagConfig(), 7) == sorted(names)


def test_every_nth_goes_on_from_folder_to_folder() -> None:
    names = [f"{n:02d}" for n in range(20)]
    rules = TagConfig(consider_every_nth=3)
    for cut in range(20):
        assert every_nth(names[:cut], rules) + every_nth(names[cut:], rules, cut) == names[::3]


def test_a_limit_is_a_fixed_random_choice() -> None:
    keys = [f"{i:05d}" for i in range(2000)]
    few, more = (limited(keys, limit) for limit in (100, 500))
    assert (len(few), len(more)) == (100, 500)
    assert set(few) < set(more)
    assert np.mean(more) == pytest.approx(1000, abs=100)
    assert list(few) == sorted(few)
    assert {keys[i] for i in few} == {keys[::-1][i] for i in limited(keys[::-1], 100)}
    assert list(limited(keys, 100)) == list(few)
    assert list(limited(keys[:3], 5)) == [0, 1, 2]
    assert list(limited([], 5)) == []
    # Runs of different versions must train on the same choice.
    assert [keys[i] for i in limited(keys, 5)] == ["00175", "00197", "00969", "01180", "01944"]


def test_judged_by_names_exactly_what_judging_depends_on() -> None:
    base = TagSource(["/set"], TagConfig()).identity
    judging = {"score_tags", "abs_min_score", "min_score", "tag_bonus_scores", "blacklist_tags", "aspect_range"}
    changed: dict[str, Any] = {
        "consider_every_nth": 2,
        "score_tags": [1],
        "abs_min_score": 1.0,
        "min_score": 1.0,
        "tag_bonus_scores": {"a": 1.0},
        "blacklist_tags": ["a"],
        "non_caption_tags": ["a"],
        "non_caption_tag_prefixes": ["a"],
        "replacements": {"a": "b"},
        "shuffle_tag_p": 0.5,
        "caption_sorter": "as_written",
        "tag_separator": ";",
        "final_tag_separator": True,
        "skip_caption": True,
        "aspect_range": [1.0, 2.0],
        "limit_images": 3,
    }
    assert set(changed) == set(TagConfig.model_fields)
    rules = {name: TagConfig(**{name: value}) for name, value in changed.items()}
    moved = {name for name, own in rules.items() if TagSource(["/set"], own).identity != base}
    assert moved == judging


@pytest.mark.parametrize("sides", [[2, 1], [1.0], [0.0, 1.0], [1.0, float("inf")], [float("nan"), 1.0]])
def test_an_aspect_range_has_two_ends(sides: list[float]) -> None:
    with pytest.raises(ConfigError, match=r"dataset\.params\.tags\.aspect_range"):
        TagSource(["/set"], TagConfig(aspect_range=sides))


def written(**changes: Any) -> str:
    return json.dumps({name: value for name, value in {**KINDLE, **changes}.items() if value is not None})


def test_read_a_record() -> None:
    expected = {name: KINDLE[name] for name in ("path", "aspect_ratio", "score", "tags")}
    assert read_tag_record(json.dumps(KINDLE)).model_dump() == expected
    assert read_tag_record(written(aspect_ratio=None)).aspect_ratio is None
    normal = read_tag_record(written(score=-3.0, path="./a//b.png"))
    assert (normal.path, normal.score) == ("a/b.png", -3)
    assert isinstance(read_tag_record(written(score=7.0)).score, int)
    assert read_tag_record(written(tags=[])).tags == []


def test_what_the_index_keeps() -> None:
    kindle = read_tag_record(written(tags=["é, ☃", '"', "a||b"]))
    assert write_tags(kindle) == '[55,"é, ☃","\\"","a||b"]'
    assert json.loads(write_tags(kindle)) == [55, "é, ☃", '"', "a||b"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "metadata file: Invalid JSON"),
        ("{", "metadata file: Invalid JSON"),
        ("[" * 100_000, "metadata file: Invalid JSON"),
        ("[]", "metadata file: .* object"),
        (written(tags=None), "metadata tags: Field required"),
        (written(score=None), "metadata score: Field required"),
        (written(path=None), "metadata path: Field required"),
        (written(path=3), "metadata path: "),
        (written(path="a\0b"), "metadata path: "),
        (written(path="\ud800.png"), "metadata file: Invalid JSON"),
        (written(path="/etc/passwd"), "leads out"),
        (written(path="a/../../b.png"), "leads out"),
        (written(path=""), "leads out"),
        (written(score="55"), "metadata score: "),
        (written(score=True), "metadata score: "),
        (written(score=1.5), "metadata score: "),
        (written(score=float("nan")), "metadata score: "),
        (written(score=10**30), "metadata score: "),
        (written(aspect_ratio=0), "metadata aspect_ratio: "),
        (written(aspect_ratio="1"), "metadata aspect_ratio: "),
        (written(aspect_ratio=float("nan")), "metadata aspect_ratio: "),
        (written(aspect_ratio=10**400), "metadata aspect_ratio: "),
        (written(tags="a, b"), "metadata tags: "),
        (written(tags=["a", 1]), r"metadata tags\.1: "),
        (written(tags=["\udc00"]), "metadata file: Invalid JSON"),
    ],
)
def test_a_damaged_record_says_what_is_wrong(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_tag_record(text)
