import copy
import logging

import pytest

from sd_training.config.data_schema import class_name
from sd_training.data.samples.captions import Tokenizer
from sd_training.errors import ConfigError
from tests import makers
from tests.cpu_time import least_cpu_s


def test_one_spelling_per_class() -> None:
    assert {class_name(7), class_name("7"), class_name(" 07\n")} == {"7"}


def test_tokens_are_the_tokenizers() -> None:
    theirs, ours = makers.tiny_tokenizer(), Tokenizer(makers.tiny_tokenizer())
    for caption in ("", "cat", "a much longer caption than sixteen characters"):
        expected = theirs(caption, padding="max_length", truncation=True, max_length=16).input_ids
        assert ours.encode(caption).tokens.tolist() == expected
        assert len(expected) == 16
    assert ours.encode("cat").tokens is ours.encode("cat").tokens
    assert ours.length == 16


@pytest.mark.parametrize("unit", ["x", "word ", "🙂"])
def test_a_caption_costs_what_its_length_says(unit: str) -> None:
    """64 times the length takes 64 times as long; 4,096 times if every character were compared with every other."""
    theirs = makers.tiny_tokenizer()

    def cost_s(caption: str) -> float:
        assert Tokenizer(theirs).encode(caption).tokens.shape == (16,)
        return least_cpu_s(lambda: Tokenizer(theirs).encode(caption))  # a new one has nothing in its cache

    assert cost_s(unit * 32_000) < 4 * 64 * cost_s(unit * 500)


def test_travels_to_other_processes_after_use() -> None:
    ours = Tokenizer(makers.tiny_tokenizer())
    tokens = ours.encode("cat").tokens.tolist()
    assert copy.deepcopy(ours).encode("cat").tokens.tolist() == tokens


def test_a_tokenizer_without_a_length_is_a_config_error() -> None:
    tokenizer = makers.tiny_tokenizer()
    tokenizer.model_max_length = int(1e30)
    with pytest.raises(ConfigError, match="model_max_length"):
        Tokenizer(tokenizer)


@pytest.mark.parametrize(
    ("caption", "is_cut"), [("", False), ("a" * 13, False), ("a" * 14, False), ("a" * 15, True), ("ab c" * 9, True)]
)
def test_captions_that_do_not_fit_are_noticed(caption: str, is_cut: bool) -> None:
    ours = Tokenizer(makers.tiny_tokenizer())
    encoded = ours.encode(caption)
    assert ours.is_cut(caption) == is_cut
    whole = makers.tiny_tokenizer()(caption, verbose=False).input_ids
    # Begin and end marks stay, so the cut is in the caption's own tokens.
    assert encoded.tokens.tolist()[: min(len(whole), 16) - 1] == whole[: min(len(whole), 16) - 1]
    assert encoded.tokens is ours.encode(caption).tokens is ours.encode(caption).tokens


def test_counting_prints_no_warning() -> None:
    """With a handler of its own: whether transformers' records reach pytest's depends on the variable CI."""
    records: list[logging.LogRecord] = []
    handler, theirs = logging.Handler(), logging.getLogger("transformers")
    handler.emit = records.append  # type: ignore[method-assign]
    theirs.addHandler(handler)
    try:
        assert Tokenizer(makers.tiny_tokenizer()).is_cut("word " * 9)
        assert records == []
        makers.tiny_tokenizer()("word " * 9)
        assert len(records) == 1
    finally:
        theirs.removeHandler(handler)


def test_masks_say_which_tokens_fill_up() -> None:
    ours = Tokenizer(makers.tiny_tokenizer(), length=8)
    encoded = ours.encode("a")
    assert encoded.tokens.shape == encoded.mask.shape == (8,)
    whole = makers.tiny_tokenizer()("a").input_ids
    assert encoded.mask.tolist() == [True] * len(whole) + [False] * (8 - len(whole))
