import copy
import time

import pytest

from sd_training.data.captions import Tokenizer, class_name
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


def test_without_a_tokenizer_there_are_no_tokens() -> None:
    assert Tokenizer(None)("anything").shape == (0,)


def test_travels_to_other_processes_after_use() -> None:
    ours = Tokenizer(makers.tiny_tokenizer())
    tokens = ours("cat").tolist()
    assert copy.deepcopy(ours)("cat").tolist() == tokens


def test_a_tokenizer_without_a_length_is_a_config_error() -> None:
    tokenizer = makers.tiny_tokenizer()
    tokenizer.model_max_length = int(1e30)
    with pytest.raises(ConfigError, match="model_max_length"):
        Tokenizer(tokenizer)
