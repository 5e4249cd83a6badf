"""Tokens of captions, how many were cut off, and which conditioners a visit goes without."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from sd_training.data.order.draws import generator
from sd_training.errors import ConfigError

Tokens = NDArray[np.int64]
Prompts = dict[str, list[str]]
"""Class → at least one prompt; classes are spelled as `class_name` does."""
TOKENS_CACHED = 8192
"""Captions whose tokens each loader process remembers; class prompts and `""` come back all the time."""
_MAX_TOKENS = 100_000
_DROPOUT = "conditioning_dropout"
"""Purpose of the joint draw; independent draws add the conditioner's name to it."""
SIZE, CROP = "size", "crop"
"""Conditioners beside the text encoders."""


def class_name(value: object) -> str:
    """One spelling per class id: `7`, `"7"` and `"07"` are the same class."""
    text = str(value).strip()
    return str(int(text)) if text.isascii() and text.isdigit() else text


class Encoded(NamedTuple):
    """A caption as the text encoder gets it."""

    tokens: Tokens
    """[L] int64."""
    mask: NDArray[np.bool_]
    """[L] false where a token only fills up."""
    num_cut: int
    """Tokens of the caption that did not fit; 0 when the encoder sees all of it."""


class Tokenizer:
    """Caption → fixed-length tokens, cached.

    Args:
        tokenizer: of a text encoder.
        length: tokens per caption; longer captions are cut. None takes the tokenizer's `model_max_length`.
        is_lowercase: captions are written in small letters first, as some pipelines do.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, length: int | None = None, *, is_lowercase: bool = False
    ) -> None:
        self.tokenizer, self.is_lowercase = tokenizer, is_lowercase
        self.length = length or int(tokenizer.model_max_length)
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
        if self.is_lowercase:
            caption = caption.lower().strip()
        row = self.tokenizer(caption, truncation=True, max_length=self.length)["input_ids"]
        # Filled on the right, whatever side the tokenizer prefers, so that a decoder's states do not depend on it.
        fillers = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id, 0)
        tokens = np.full(self.length, next(token for token in fillers if token is not None), dtype=np.int64)
        tokens[: len(row)] = row
        # Only a caption that fills its place can have been cut. Its overflow could be asked for in the same call, but
        # fast and slow tokenizers then answer in different shapes.
        num_cut = self._num_tokens(caption) - self.length if len(row) == self.length else 0
        return Encoded(tokens, np.arange(self.length) < len(row), num_cut)

    def _num_tokens(self, caption: str) -> int:
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


@dataclass(frozen=True)
class Dropout:
    """Which conditioners a visit goes without; every decision is drawn per sample."""

    text_prob: float = 0.0
    """Probability that all text encoders are dropped together: the null that guidance starts from."""
    encoder_prob: float = 0.0
    """Probability of each text encoder to be dropped, independently of that and of each other."""
    size_prob: float = 0.0
    """Probability that the original size is dropped."""
    crop_prob: float = 0.0
    """Probability that the crop is dropped."""

    def draw(self, seed: int, position: int, encoders: Sequence[str]) -> dict[str, bool]:
        """The decisions at a position of the run."""
        joint = drops(seed, position, self.text_prob, encoders, joint=True)
        own = drops(seed, position, self.encoder_prob, encoders, joint=False)
        numbers = drops(seed, position, self.size_prob, [SIZE], joint=False)
        numbers |= drops(seed, position, self.crop_prob, [CROP], joint=False)
        return {name: joint[name] or own[name] for name in encoders} | numbers
