"""Tokens of captions, how many were cut off, and which conditioners a visit goes without."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from sd_training.data.draws import generator
from sd_training.errors import ConfigError

Tokens = NDArray[np.int64]
Prompts = dict[str, list[str]]
"""Class → at least one prompt; classes are spelled as `class_name` does."""
TOKENS_CACHED = 8192
"""Captions whose tokens each loader process remembers; class prompts and `""` come back all the time."""
_MAX_TOKENS = 100_000
_DROPOUT = "conditioning_dropout"
"""Purpose of the joint draw; independent draws add the conditioner's name to it."""


def class_name(value: object) -> str:
    """One spelling per class id: `7`, `"7"` and `"07"` are the same class."""
    text = str(value).strip()
    return str(int(text)) if text.isascii() and text.isdigit() else text


class Encoded(NamedTuple):
    """A caption as the text encoder gets it."""

    tokens: Tokens
    """[L] int64."""
    num_cut: int
    """Tokens of the caption that did not fit; 0 when the encoder sees all of it."""


class Tokenizer:
    """Caption → fixed-length tokens, cached; without a tokenizer every caption has no tokens.

    Attributes:
        length: tokens per caption, the tokenizer's `model_max_length`; longer captions are cut.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self.tokenizer = tokenizer
        self.length = 0 if tokenizer is None else int(tokenizer.model_max_length)
        if self.length > _MAX_TOKENS:
            raise ConfigError("model.tokenizer: the tokenizer does not say its model_max_length [tokens per caption]")
        self._cached: Callable[[str], Encoded] | None = None

    def __call__(self, caption: str) -> Tokens:
        """[L] int64."""
        return self.encode_counted(caption).tokens

    def encode_counted(self, caption: str) -> Encoded:
        """Tokens and what was cut off. A caption that fills its place is tokenized twice, the first time it comes."""
        if self._cached is None:
            self._cached = lru_cache(maxsize=TOKENS_CACHED)(self._encode)
        return self._cached(caption)

    def _encode(self, caption: str) -> Encoded:
        if self.tokenizer is None:
            return Encoded(np.empty(0, dtype=np.int64), 0)
        encoded = self.tokenizer(
            caption, padding="max_length", truncation=True, max_length=self.length, return_attention_mask=True
        )
        # Only a caption without padding can have been cut. Its overflow could be asked for in the same call, but fast
        # and slow tokenizers then answer in different shapes.
        num_cut = self._num_tokens(caption) - self.length if all(encoded["attention_mask"]) else 0
        return Encoded(np.array(encoded["input_ids"], dtype=np.int64), num_cut)

    def _num_tokens(self, caption: str) -> int:
        assert self.tokenizer is not None, "called with a tokenizer only"
        return len(self.tokenizer(caption, truncation=False, verbose=False)["input_ids"])

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cached": None}


def drops(seed: int, position: int, prob: float, conditioners: Sequence[str], joint: bool) -> dict[str, bool]:
    """Which conditioners are replaced by their null conditioning at a position of the run.

    Args:
        seed: of the run.
        position: of the sample in the global order of the run.
        prob: probability in [0, 1] that a conditioner is dropped.
        conditioners: their names, for example `text`. The answer for one does not depend on which others there are.
        joint: one draw for all: all n are dropped with probability `prob`, and never some of them. Otherwise each
            has a draw of its own: each is dropped with probability `prob`, all of them together with `prob`ⁿ only,
            which is what unconditional guidance needs, so choose `prob` = p^(1/n) for a share p of it.
    """
    purposes = [_DROPOUT if joint else f"{_DROPOUT}:{name}" for name in conditioners]
    if prob <= 0:
        return dict.fromkeys(conditioners, False)
    drawn = {purpose: generator(seed, purpose, position).random() for purpose in dict.fromkeys(purposes)}
    return {name: drawn[purpose] < prob for name, purpose in zip(conditioners, purposes, strict=True)}
