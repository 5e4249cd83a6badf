"""Which caption a visit gets, and its tokens."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from sd_training.errors import ConfigError

Tokens = NDArray[np.int64]
Prompts = dict[str, list[str]]
"""Class → at least one prompt; classes are spelled as `class_name` does."""
TOKENS_CACHED = 8192
"""Captions whose tokens each loader process remembers; class prompts and `""` come back all the time."""
_MAX_TOKENS = 100_000


def class_name(value: object) -> str:
    """One spelling per class id: `7`, `"7"` and `"07"` are the same class."""
    text = str(value).strip()
    return str(int(text)) if text.isascii() and text.isdigit() else text


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
        self._cached: Callable[[str], Tokens] | None = None

    def __call__(self, caption: str) -> Tokens:
        """[L] int64."""
        if self._cached is None:
            self._cached = lru_cache(maxsize=TOKENS_CACHED)(self._encode)
        return self._cached(caption)

    def _encode(self, caption: str) -> Tokens:
        if self.tokenizer is None:
            return np.empty(0, dtype=np.int64)
        encoded = self.tokenizer(caption, padding="max_length", truncation=True, max_length=self.length)
        return np.array(encoded["input_ids"], dtype=np.int64)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cached": None}
