import copy
import logging
import time

import numpy as np
import pytest

from sd_training.data.samples.captions import Dropout, Tokenizer, class_name, drops
from sd_training.errors import ConfigError
from tests import makers


def test_one_spelling_per_class() -> None:
    assert {class_name(7), class_name("7"), class_name(" 07\n")} == {"7"}


def test_tokens_are_the_tokenizers() -> None:
    theirs, ours = makers.tiny_tokenizer(), Tokenizer(makers.tiny_tokenizer())
    for caption in ("", "cat", "a much longer caption than sixteen characters"):
        expected = theirs(caption, padding="max_length", truncation=True, max_length=16).input_ids
        assert ours(caption).tolist() == expected
        assert len(expected) == 16
    assert ours("cat") is ours("cat")
    assert ours.length == 16


def test_very_long_captions_are_cut_quickly() -> None:
    ours = Tokenizer(makers.tiny_tokenizer())
    start = time.perf_counter()
    for caption in ("x" * 10_000, "word " * 2_000, "🙂" * 10_000):
        assert ours(caption).shape == (16,)
    assert time.perf_counter() - start < 5


def test_travels_to_other_processes_after_use() -> None:
    ours = Tokenizer(makers.tiny_tokenizer())
    tokens = ours("cat").tolist()
    assert copy.deepcopy(ours)("cat").tolist() == tokens


def test_a_tokenizer_without_a_length_is_a_config_error() -> None:
    tokenizer = makers.tiny_tokenizer()
    tokenizer.model_max_length = int(1e30)
    with pytest.raises(ConfigError, match="model_max_length"):
        Tokenizer(tokenizer)


@pytest.mark.parametrize(
    ("caption", "num_cut"), [("", 0), ("a" * 13, 0), ("a" * 14, 0), ("a" * 15, 1), ("ab c" * 9, 13)]
)
def test_cut_tokens_are_counted(caption: str, num_cut: int) -> None:
    ours = Tokenizer(makers.tiny_tokenizer())
    encoded = ours.encode_counted(caption)
    assert encoded.num_cut == num_cut
    whole = makers.tiny_tokenizer()(caption, verbose=False).input_ids
    # Begin and end marks stay, so the cut is in the caption's own tokens.
    assert encoded.tokens.tolist()[: min(len(whole), 16) - 1] == whole[: min(len(whole), 16) - 1]
    assert encoded.tokens is ours(caption) is ours.encode_counted(caption).tokens


def test_counting_prints_no_warning() -> None:
    """With a handler of its own: whether transformers' records reach pytest's depends on the variable CI."""
    records: list[logging.LogRecord] = []
    handler, theirs = logging.Handler(), logging.getLogger("transformers")
    handler.emit = records.append  # type: ignore[method-assign]
    theirs.addHandler(handler)
    try:
        assert Tokenizer(makers.tiny_tokenizer()).encode_counted("word " * 9).num_cut == 22
        assert records == []
        makers.tiny_tokenizer()("word " * 9)
        assert len(records) == 1
    finally:
        theirs.removeHandler(handler)


def dropped(prob: float, joint: bool, visits: int = 4000) -> dict[str, np.ndarray]:
    rows = [drops(3, position, prob, ("clip", "t5"), joint) for position in range(visits)]
    return {name: np.array([row[name] for row in rows]) for name in ("clip", "t5")}


def test_joint_dropout_takes_all_or_none() -> None:
    draws = dropped(0.3, joint=True)
    assert np.array_equal(draws["clip"], draws["t5"])
    assert draws["clip"].mean() == pytest.approx(0.3, abs=0.03)


def test_independent_dropout_draws_for_each() -> None:
    draws = dropped(0.3, joint=False)
    assert [draws[name].mean() for name in draws] == pytest.approx([0.3, 0.3], abs=0.03)
    assert (draws["clip"] & draws["t5"]).mean() == pytest.approx(0.09, abs=0.02)


def test_dropout_of_one_conditioner_does_not_depend_on_others() -> None:
    for position in range(200):
        both = drops(3, position, 0.5, ("clip", "t5"), joint=False)
        assert drops(3, position, 0.5, ("t5",), joint=False) == {"t5": both["t5"]}
        assert drops(3, position, 0.5, ("t5", "clip"), joint=False) == both


@pytest.mark.parametrize("joint", [True, False])
def test_dropout_never_and_always(joint: bool) -> None:
    for position in range(100):
        assert drops(3, position, 0.0, ("clip", "t5"), joint) == {"clip": False, "t5": False}
        assert drops(3, position, 1.0, ("clip", "t5"), joint) == {"clip": True, "t5": True}
    assert drops(3, 0, 0.5, (), joint) == {}


def test_joint_and_independent_dropout_add_up() -> None:
    """P(all) = d + (1 - d) pⁿ, P(one encoder) = d + (1 - d) p; size and crop by themselves."""
    rule, names = Dropout(text_prob=0.1, encoder_prob=0.4, size_prob=0.2, crop_prob=0.3), ["clip", "t5"]
    rows = [rule.draw(5, position, names) for position in range(8000)]
    share = {name: np.mean([row[name] for row in rows]) for name in (*names, "size", "crop")}
    assert share == {
        "clip": pytest.approx(0.46, abs=0.02),
        "t5": pytest.approx(0.46, abs=0.02),
        "size": pytest.approx(0.2, abs=0.02),
        "crop": pytest.approx(0.3, abs=0.02),
    }
    assert np.mean([row["clip"] and row["t5"] for row in rows]) == pytest.approx(0.1 + 0.9 * 0.16, abs=0.02)
    assert np.mean([row["size"] and row["crop"] for row in rows]) == pytest.approx(0.06, abs=0.01)


def test_masks_say_which_tokens_fill_up() -> None:
    ours = Tokenizer(makers.tiny_tokenizer(), length=8)
    encoded = ours.encode_counted("a")
    assert encoded.tokens.shape == encoded.mask.shape == (8,)
    whole = makers.tiny_tokenizer()("a").input_ids
    assert encoded.mask.tolist() == [True] * len(whole) + [False] * (8 - len(whole))
