import json
import pickle
from collections import Counter
from collections.abc import Callable, Mapping

import numpy as np
import pytest

from sd_training.config.data_schema import CaptionConfig, TagConfig
from sd_training.data.order.order import generator
from sd_training.data.samples.captions import (
    check_fields,
    choose_caption,
    finish_caption,
    tag_caption,
    with_score_tag,
)
from sd_training.errors import BadSample, DataError

SCORE_TAGS = [3200, 1600, 800, 600, 400, 300, 200, 150, 100, 50, 25, 5]
TAGS = "one, two, three, four, five, six, seven, eight"


def visit(position: int = 0) -> Callable[[str], np.random.Generator]:
    return lambda purpose: generator(7, purpose, position)


def no_draws(purpose: str) -> np.random.Generator:
    raise AssertionError(f"{purpose} drawn")


def chosen(texts: Mapping[str, str], rules: CaptionConfig, position: int = 0) -> str:
    return choose_caption(texts.get, rules, visit(position))


def shares(texts: Mapping[str, str], rules: CaptionConfig, visits: int = 4000) -> dict[str, float]:
    counts = Counter(chosen(texts, rules, position) for position in range(visits))
    return {caption: count / visits for caption, count in counts.items()}


def test_without_options_the_samples_own_caption_without_any_draw() -> None:
    assert choose_caption({"caption": " a cat\n"}.get, CaptionConfig(), no_draws) == "a cat"


def test_fields_are_drawn_by_weight() -> None:
    rules = CaptionConfig(fields={"long": 3, "short": 1, "never": 0})
    texts = {"long": "L", "short": "S", "never": "N"}
    assert shares(texts, rules) == pytest.approx({"L": 0.75, "S": 0.25}, abs=0.03)


@pytest.mark.parametrize("missing", [None, "", "  \n", "[]", '[" "]'])
def test_weights_count_among_the_fields_a_sample_has(missing: str | None) -> None:
    rules = CaptionConfig(fields={"a": 1, "b": 2, "gone": 7})
    texts = {"a": "A", "b": "B"} | ({} if missing is None else {"gone": missing})
    assert shares(texts, rules) == pytest.approx({"A": 1 / 3, "B": 2 / 3}, abs=0.03)


@pytest.mark.parametrize("fields", [{}, {"long": 1.0}, {"long": 1.0, "short": 2.0}, {"caption": 0.0, "long": 1.0}])
def test_no_caption_at_all_is_a_bad_sample(fields: dict[str, float]) -> None:
    texts = {"caption": "has weight 0"} if fields.get("caption") == 0 else {"short": " "}
    with pytest.raises(BadSample, match=r"^caption missing$"):
        chosen(texts, CaptionConfig(fields=fields))


def test_a_text_is_read_only_when_its_field_was_drawn() -> None:
    asked: list[str] = []

    def texts(name: str) -> str:
        asked.append(name)
        return name

    for position in range(50):
        asked.clear()
        assert choose_caption(texts, CaptionConfig(fields={"a": 1, "b": 1}), visit(position)) == asked[0]
        assert len(asked) == 1


def test_a_list_holds_several_captions() -> None:
    assert shares({"caption": '["x", "", "y ", "z"]'}, CaptionConfig()) == pytest.approx(
        {"x": 1 / 3, "y": 1 / 3, "z": 1 / 3}, abs=0.03
    )


@pytest.mark.parametrize("text", ["[artist] a cat", "[a]", "[1, 2]", '["a", 1]', "[" * 50_000 + "]" * 50_000, "[NaN]"])
def test_what_only_looks_like_a_list_is_a_caption(text: str) -> None:
    assert chosen({"caption": text}, CaptionConfig()) == text


def test_the_order_of_fields_in_the_file_changes_nothing() -> None:
    texts = {"a": "A", "b": "B", "c": "C"}
    one, other = CaptionConfig(fields={"a": 1, "b": 2, "c": 3}), CaptionConfig(fields={"c": 3, "a": 1, "b": 2})
    assert [chosen(texts, one, i) for i in range(100)] == [chosen(texts, other, i) for i in range(100)]


def test_unknown_fields_are_named_with_those_there_are() -> None:
    rules = CaptionConfig(fields={"lnog": 1, "caption": 1, "style": 1, "unused": 0})
    check_fields(rules, {"caption", "lnog", "style"})
    with pytest.raises(DataError, match=r"no sample has 'lnog', 'style'; the fields of this data are: caption, long$"):
        check_fields(rules, {"long", "caption"})
    with pytest.raises(DataError, match=r"field17, .*…$"):
        check_fields(rules, {f"field{i}" for i in range(100)})


@pytest.mark.parametrize(
    ("caption", "finished"),
    [
        ("The image shows a dog.", "A dog."),
        ("the IMAGE shows: a dog", "A dog"),
        ("The image depicts, in ink, a cat", "In ink, a cat"),  # the longest, not the first
        ("The images show a dog", "The images show a dog"),
        ("A dog. The image shows it", "A dog. The image shows it"),
        ("The image shows.", "The image shows."),
        ("", ""),
    ],
)
def test_openings_are_taken_off(caption: str, finished: str) -> None:
    rules = CaptionConfig(openings=["the image", "the image shows", "the image depicts"])
    assert finish_caption(caption, rules, no_draws) == finished


def test_tags_stay_as_written_but_for_spaces() -> None:
    assert chosen({"caption": "a,b ,  , c d,"}, CaptionConfig(tag_separator=", ")) == "a, b, c d"
    assert chosen({"caption": "a  b\nc"}, CaptionConfig(tag_separator=" ")) == "a b\nc"


def test_tags_are_shuffled_in_a_share_of_visits_and_the_first_stay() -> None:
    rules = CaptionConfig(tag_separator=", ", shuffle_tags_prob=0.4, num_kept_tags=2)
    seen = [chosen({"caption": TAGS}, rules, i).split(", ") for i in range(2000)]
    assert all(tags[:2] == ["one", "two"] and sorted(tags) == sorted(TAGS.split(", ")) for tags in seen)
    assert np.mean([tags != TAGS.split(", ") for tags in seen]) == pytest.approx(0.4, abs=0.04)
    shuffled = [tags for tags in seen if tags != TAGS.split(", ")]
    places = Counter(tags.index("three") for tags in shuffled)
    assert set(places) == set(range(2, 8))
    assert min(places.values()) > 0.6 * len(shuffled) / 6


def test_each_tag_is_dropped_on_its_own_and_the_first_stay() -> None:
    rules = CaptionConfig(tag_separator=", ", drop_tag_prob=0.25, num_kept_tags=1)
    seen = [chosen({"caption": TAGS}, rules, i).split(", ") for i in range(2000)]
    counts = Counter(tag for tags in seen for tag in tags)
    assert counts["one"] == 2000
    assert all(counts[tag] / 2000 == pytest.approx(0.75, abs=0.04) for tag in TAGS.split(", ")[1:])
    assert all(tags == [tag for tag in TAGS.split(", ") if tag in tags] for tags in seen)


def test_all_tags_can_be_dropped() -> None:
    rules = CaptionConfig(tag_separator=", ", drop_tag_prob=1, prefix="photo ")
    assert chosen({"caption": TAGS}, rules) == "photo "
    assert chosen({"caption": "one"}, CaptionConfig(tag_separator=",", shuffle_tags_prob=1, num_kept_tags=9)) == "one"


def test_one_option_does_not_move_the_draws_of_another() -> None:
    texts = {"a": TAGS, "b": json.dumps([TAGS, "x, " + TAGS])}
    fields = {"a": 1.0, "b": 1.0}
    plain = CaptionConfig(fields=fields, tag_separator=", ", shuffle_tags_prob=0.5)
    dropping = CaptionConfig(fields=fields, tag_separator=", ", shuffle_tags_prob=0.5, drop_tag_prob=0.3, prefix="p ")
    for position in range(200):
        order = chosen(texts, plain, position).split(", ")
        left = chosen(texts, dropping, position).removeprefix("p ").split(", ")
        assert left == [""] or left == [tag for tag in order if tag in left]


def test_every_decision_has_a_generator_of_its_own() -> None:
    asked: list[str] = []

    def rng(purpose: str) -> np.random.Generator:
        asked.append(purpose)
        return generator(7, purpose, 0)

    texts = {"a": json.dumps([TAGS, TAGS]), "b": json.dumps([TAGS, TAGS])}
    rules = CaptionConfig(
        fields={"a": 1, "b": 1},
        tag_separator=", ",
        shuffle_tags_prob=0.5,
        drop_tag_prob=0.5,
    )
    choose_caption(texts.get, rules, rng)
    assert sorted(asked) == ["caption", "caption_entry", "tag_drop", "tag_shuffle"]


def test_captions_depend_on_the_position_alone() -> None:
    rules = CaptionConfig(fields={"a": 1, "b": 1}, tag_separator=", ", shuffle_tags_prob=0.5, drop_tag_prob=0.2)
    texts = {"a": TAGS, "b": TAGS.upper()}
    first = [chosen(texts, rules, i) for i in range(50)]
    assert [chosen(texts, pickle.loads(pickle.dumps(rules)), i) for i in reversed(range(50))] == first[::-1]
    assert len(set(first)) > 30


def test_a_caption_made_elsewhere_is_finished_alike() -> None:
    assert finish_caption("cat", CaptionConfig(prefix="a photo of a ", suffix="."), no_draws) == "a photo of a cat."


@pytest.mark.parametrize(("score", "expected"), [(101, ["a", "scr100"]), (100, ["a", "scr100"]), (99, ["a", "scr50"])])
def test_a_score_tag_is_given_from_its_threshold_on(score: int, expected: list[str]) -> None:
    assert with_score_tag(["a"], score, SCORE_TAGS) == expected


def test_at_most_one_score_tag() -> None:
    assert with_score_tag(["a"], 4, SCORE_TAGS) == ["a"]
    assert with_score_tag(["a"], 10_000, SCORE_TAGS) == ["a", "scr3200"]


def test_non_caption_tags_and_prefixes() -> None:
    tags = ["b", "a:x", "a", "ab", "scr", "ba:"]
    assert tag_caption(60, tags, TagConfig(non_caption_tags=["a", "scr50"], score_tags=[50]), no_draws) == (
        "a:x, ab, b, ba:, scr"
    )
    assert tag_caption(60, tags, TagConfig(non_caption_tag_prefixes=["a:", "sc"]), no_draws) == "a, ab, b, ba:"


def test_order_of_tags_that_are_not_shuffled() -> None:
    assert tag_caption(9, ["b", "C", "a"], TagConfig(score_tags=[5]), no_draws) == "C, a, b, scr5"
    rules = TagConfig(score_tags=[5], caption_sorter="as_written")
    assert tag_caption(9, ["b", "C", "a"], rules, no_draws) == "b, C, a, scr5"


def test_replacements_in_their_order_before_separators() -> None:
    def caption(separator: str, **replacements: str) -> str:
        rules = TagConfig(replacements=replacements, tag_separator=separator)
        return tag_caption(0, ["artist:x y", "cat"], rules, no_draws)

    assert caption(", ", **{"artist:": "by=", ":": "="}) == "by=x y, cat"
    assert caption(", ", **{":": "=", "artist:": "by="}) == "artist=x y, cat"
    assert caption(" ", **{" ": "_"}) == "artist:x_y cat"
    assert caption(", ", a="b", b="c") == "crtist:x y, cct"
    assert caption("|", **{"cat": ""}) == "artist:x y|"


def test_tags_with_bars_survive_without_replacements() -> None:
    assert tag_caption(0, ["a||b", "c|"], TagConfig(), no_draws) == "a||b, c|"


def test_final_separator_and_empty_captions() -> None:
    assert tag_caption(0, ["a", "b"], TagConfig(final_tag_separator=True), no_draws) == "a, b, "
    assert tag_caption(0, ["a"], TagConfig(final_tag_separator=True, skip_caption=True), no_draws) == ""
    assert tag_caption(0, [], TagConfig(), no_draws) == ""


def test_shuffling_is_drawn_at_every_request() -> None:
    rules, tags = TagConfig(shuffle_tag_p=0.5), ["b", "c", "a", "d"]
    counts = Counter(tag_caption(0, tags, rules, visit(i)) for i in range(4800))
    assert len(counts) == 24
    assert counts["a, b, c, d"] / 4800 == pytest.approx(0.5 + 0.5 / 24, abs=0.03)
    assert all(
        count / 4800 == pytest.approx(0.5 / 24, abs=0.01) for caption, count in counts.items() if caption[0] != "a"
    )
    assert tag_caption(0, tags, rules, visit(3)) == tag_caption(0, tags, rules, visit(3))
