import json
import pickle
from collections import Counter
from collections.abc import Callable, Mapping

import numpy as np
import pytest

from sd_training.config.data_schema import CaptionConfig
from sd_training.data.order.draws import generator
from sd_training.data.problems import BadSample
from sd_training.data.samples.caption_choice import (
    CaptionRules,
    Placeholder,
    caption_rules,
    check_fields,
    choose_caption,
    fields_needed,
    finish_caption,
    parse_template,
)
from sd_training.errors import ConfigError, DataError

TAGS = "one, two, three, four, five, six, seven, eight"


def visit(position: int = 0) -> Callable[[str], np.random.Generator]:
    return lambda purpose: generator(7, purpose, position)


def no_draws(purpose: str) -> np.random.Generator:
    raise AssertionError(f"{purpose} drawn")


def chosen(texts: Mapping[str, str], rules: CaptionRules, position: int = 0) -> str:
    return choose_caption(texts.get, rules, visit(position))


def shares(texts: Mapping[str, str], rules: CaptionRules, visits: int = 4000) -> dict[str, float]:
    counts = Counter(chosen(texts, rules, position) for position in range(visits))
    return {caption: count / visits for caption, count in counts.items()}


def test_without_options_the_samples_own_caption_without_any_draw() -> None:
    assert choose_caption({"caption": " a cat\n"}.get, caption_rules(CaptionConfig()), no_draws) == "a cat"


def test_fields_are_drawn_by_weight() -> None:
    rules = CaptionRules(fields={"long": 3, "short": 1, "never": 0})
    texts = {"long": "L", "short": "S", "never": "N"}
    assert shares(texts, rules) == pytest.approx({"L": 0.75, "S": 0.25}, abs=0.03)


@pytest.mark.parametrize("missing", [None, "", "  \n", "[]", '[" "]'])
def test_weights_count_among_the_fields_a_sample_has(missing: str | None) -> None:
    rules = CaptionRules(fields={"a": 1, "b": 2, "gone": 7})
    texts = {"a": "A", "b": "B"} | ({} if missing is None else {"gone": missing})
    assert shares(texts, rules) == pytest.approx({"A": 1 / 3, "B": 2 / 3}, abs=0.03)


@pytest.mark.parametrize("fields", [{}, {"long": 1.0}, {"long": 1.0, "short": 2.0}, {"caption": 0.0, "long": 1.0}])
def test_no_caption_at_all_is_a_bad_sample(fields: dict[str, float]) -> None:
    texts = {"caption": "has weight 0"} if fields.get("caption") == 0 else {"short": " "}
    with pytest.raises(BadSample, match=r"^caption missing$"):
        chosen(texts, CaptionRules(fields=fields))


def test_a_text_is_read_only_when_its_field_was_drawn() -> None:
    asked: list[str] = []

    def texts(name: str) -> str:
        asked.append(name)
        return name

    for position in range(50):
        asked.clear()
        assert choose_caption(texts, CaptionRules(fields={"a": 1, "b": 1}), visit(position)) == asked[0]
        assert len(asked) == 1


def test_a_list_holds_several_captions() -> None:
    assert shares({"caption": '["x", "", "y ", "z"]'}, CaptionRules()) == pytest.approx(
        {"x": 1 / 3, "y": 1 / 3, "z": 1 / 3}, abs=0.03
    )


@pytest.mark.parametrize("text", ["[artist] a cat", "[a]", "[1, 2]", '["a", 1]', "[" * 50_000 + "]" * 50_000, "[NaN]"])
def test_what_only_looks_like_a_list_is_a_caption(text: str) -> None:
    assert chosen({"caption": text}, CaptionRules()) == text


def test_the_order_of_fields_in_the_file_changes_nothing() -> None:
    texts = {"a": "A", "b": "B", "c": "C"}
    one, other = CaptionRules(fields={"a": 1, "b": 2, "c": 3}), CaptionRules(fields={"c": 3, "a": 1, "b": 2})
    assert [chosen(texts, one, i) for i in range(100)] == [chosen(texts, other, i) for i in range(100)]


def test_prefix_and_suffix_stand_outside_the_template() -> None:
    rules = CaptionRules(prefix="photo: ", suffix=" .", template="<{caption}>")
    assert chosen({"caption": "cat"}, rules) == "photo: <cat> ."


def test_a_template_takes_fields_and_the_chosen_caption() -> None:
    rules = CaptionRules(fields={"long": 1}, template="{{{caption}}} by {artist} ({ artist })")
    assert chosen({"long": "{artist}", "artist": "Ann", "caption": "unused"}, rules) == "{{artist}} by Ann (Ann)"
    assert fields_needed(rules) == {"long", "artist"}


def test_a_list_in_a_template_is_drawn_once_per_visit() -> None:
    rules = CaptionRules(template="{style}/{style}")
    texts = {"style": '["oil", "ink"]'}
    assert set(shares(texts, rules, 100)) == {"oil/oil", "ink/ink"}
    assert fields_needed(rules) == {"style"}


def test_a_field_of_the_template_without_text_is_a_bad_sample() -> None:
    with pytest.raises(BadSample, match=r"^caption template has no text: style$"):
        chosen({"caption": "cat", "style": ""}, CaptionRules(template="{caption}, {style}"))


def test_templates_are_no_format_strings() -> None:
    assert parse_template("{caption.__class__} {a!r:>9}") == (
        Placeholder("caption.__class__"),
        " ",
        Placeholder("a!r:>9"),
    )
    with pytest.raises(DataError, match=r"no sample has 'caption\.__class__'"):
        check_fields(CaptionRules(template="{caption.__class__}"), {"caption"})


@pytest.mark.parametrize("template", ["{", "}", "{}", "{ }", "{a", "a}", "{a{b}}", "{{{a}}"])
def test_a_stray_brace_is_a_config_error(template: str) -> None:
    with pytest.raises(ConfigError, match=r"captions\.template: .* has a brace without a field"):
        caption_rules(CaptionConfig(template=template))


def test_unknown_fields_are_named_with_those_there_are() -> None:
    rules = CaptionRules(fields={"lnog": 1, "caption": 1, "unused": 0}, template="{caption} {style}")
    check_fields(rules, {"caption", "lnog", "style"})
    with pytest.raises(DataError, match=r"no sample has 'lnog', 'style'; the fields of this data are: caption, long$"):
        check_fields(rules, {"long", "caption"})
    with pytest.raises(DataError, match="and 80 more"):
        check_fields(rules, {f"field{i}" for i in range(100)})


def test_tags_stay_as_written_but_for_spaces() -> None:
    assert chosen({"caption": "a,b ,  , c d,"}, CaptionRules(tag_separator=", ")) == "a, b, c d"
    assert chosen({"caption": "a  b\nc"}, CaptionRules(tag_separator=" ")) == "a b\nc"


def test_tags_are_shuffled_in_a_share_of_visits_and_the_first_stay() -> None:
    rules = CaptionRules(tag_separator=", ", shuffle_tags_prob=0.4, num_kept_tags=2)
    seen = [chosen({"caption": TAGS}, rules, i).split(", ") for i in range(2000)]
    assert all(tags[:2] == ["one", "two"] and sorted(tags) == sorted(TAGS.split(", ")) for tags in seen)
    assert np.mean([tags != TAGS.split(", ") for tags in seen]) == pytest.approx(0.4, abs=0.04)
    shuffled = [tags for tags in seen if tags != TAGS.split(", ")]
    places = Counter(tags.index("three") for tags in shuffled)
    assert set(places) == set(range(2, 8))
    assert min(places.values()) > 0.6 * len(shuffled) / 6


def test_each_tag_is_dropped_on_its_own_and_the_first_stay() -> None:
    rules = CaptionRules(tag_separator=", ", drop_tag_prob=0.25, num_kept_tags=1)
    seen = [chosen({"caption": TAGS}, rules, i).split(", ") for i in range(2000)]
    counts = Counter(tag for tags in seen for tag in tags)
    assert counts["one"] == 2000
    assert all(counts[tag] / 2000 == pytest.approx(0.75, abs=0.04) for tag in TAGS.split(", ")[1:])
    assert all(tags == [tag for tag in TAGS.split(", ") if tag in tags] for tags in seen)


def test_all_tags_can_be_dropped() -> None:
    rules = CaptionRules(tag_separator=", ", drop_tag_prob=1, prefix="photo ")
    assert chosen({"caption": TAGS}, rules) == "photo "
    assert chosen({"caption": "one"}, CaptionRules(tag_separator=",", shuffle_tags_prob=1, num_kept_tags=9)) == "one"


def test_one_option_does_not_move_the_draws_of_another() -> None:
    texts = {"a": TAGS, "b": json.dumps([TAGS, "x, " + TAGS])}
    fields = {"a": 1.0, "b": 1.0}
    plain = CaptionRules(fields=fields, tag_separator=", ", shuffle_tags_prob=0.5)
    dropping = CaptionRules(fields=fields, tag_separator=", ", shuffle_tags_prob=0.5, drop_tag_prob=0.3, prefix="p ")
    for position in range(200):
        order = chosen(texts, plain, position).split(", ")
        left = chosen(texts, dropping, position).removeprefix("p ").split(", ")
        assert left == [""] or left == [tag for tag in order if tag in left]


def test_every_decision_has_a_generator_of_its_own() -> None:
    asked: list[str] = []

    def rng(purpose: str) -> np.random.Generator:
        asked.append(purpose)
        return generator(7, purpose, 0)

    texts = {"a": json.dumps([TAGS, TAGS]), "b": json.dumps([TAGS, TAGS]), "style": '["oil", "ink"]'}
    rules = CaptionRules(
        fields={"a": 1, "b": 1},
        template="{caption} {style}",
        tag_separator=", ",
        shuffle_tags_prob=0.5,
        drop_tag_prob=0.5,
    )
    choose_caption(texts.get, rules, rng)
    assert sorted(asked) == ["caption", "caption_entry", "tag_drop", "tag_shuffle", "template:style"]


def test_captions_depend_on_the_position_alone() -> None:
    rules = CaptionRules(fields={"a": 1, "b": 1}, tag_separator=", ", shuffle_tags_prob=0.5, drop_tag_prob=0.2)
    texts = {"a": TAGS, "b": TAGS.upper()}
    first = [chosen(texts, rules, i) for i in range(50)]
    assert [chosen(texts, pickle.loads(pickle.dumps(rules)), i) for i in reversed(range(50))] == first[::-1]
    assert len(set(first)) > 30


def test_a_caption_made_elsewhere_is_finished_alike() -> None:
    rules = CaptionRules(template="{caption} in {style}", prefix="p ")
    assert finish_caption("cat", {"style": "oil"}.get, rules, no_draws) == "p cat in oil"


def test_all_problems_of_a_config_at_once() -> None:
    config = CaptionConfig(fields={"a": 0}, template="{", shuffle_tags_prob=0.5, num_kept_tags=1)
    with pytest.raises(ConfigError) as error:
        caption_rules(config, "dataset.mix[0].params.captions")
    assert [problem.partition(": ")[0].rpartition(".")[2] for problem in error.value.problems] == [
        "fields",
        "template",
        "shuffle_tags_prob",
        "num_kept_tags",
    ]
    assert all(problem.startswith("dataset.mix[0].params.captions.") for problem in error.value.problems)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (CaptionConfig(template="a {style}", fields={"a": 1}), "fields would do nothing"),
        (CaptionConfig(template="a {style}", tag_separator=","), "tag_separator would do nothing"),
        (CaptionConfig(tag_separator=""), "separates nothing"),
        (CaptionConfig(tag_separator=",", num_kept_tags=2), "does nothing without"),
        (CaptionConfig(drop_tag_prob=0.1), r"drop_tag_prob: needs"),
    ],
)
def test_an_option_that_would_do_nothing_is_a_config_error(config: CaptionConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        caption_rules(config)


def test_every_option_arrives() -> None:
    config = CaptionConfig(
        fields={"a": 2},
        prefix="p",
        suffix="s",
        template="{caption}",
        tag_separator=";",
        shuffle_tags_prob=0.1,
        drop_tag_prob=0.2,
        num_kept_tags=3,
    )
    assert caption_rules(config) == CaptionRules({"a": 2}, "p", "s", "{caption}", ";", 0.1, 0.2, 3)
