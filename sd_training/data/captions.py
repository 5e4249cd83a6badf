"""Which caption a visit gets, and its tokens."""

import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from sd_training.errors import ConfigError

Tokens = NDArray[np.int64]
Prompts = dict[str, list[str]]
TOKENS_CACHED = 8192
"""Captions whose tokens each loader process remembers; class prompts and `""` come back all the time."""
_MAX_TOKENS = 100_000
_OPTION = "dataset.params.idx_to_prompt"


def class_name(value: object) -> str:
    """One spelling per class id: `7`, `"7"` and `"07"` are the same class."""
    text = str(value).strip()
    return str(int(text)) if text.isascii() and text.isdigit() else text


def load_prompts(idx_to_prompt: Mapping[Any, Any] | str | None) -> Prompts:
    """Class id → prompts, from a dict or a JSON file.

    Raises:
        ConfigError: it is missing, the file cannot be read, or a value is not a text or a list of texts.
    """
    if idx_to_prompt is None:
        raise ConfigError(f"{_OPTION}: ClassificationWebDataset needs a prompt per class, inline or as a JSON file")
    table = _read_json(idx_to_prompt) if isinstance(idx_to_prompt, str) else idx_to_prompt
    if not isinstance(table, Mapping) or not table:
        raise ConfigError(f"{_OPTION}: a non-empty object of class id → prompt is expected, not {type(table).__name__}")
    prompts = {class_name(key): [value] if isinstance(value, str) else value for key, value in table.items()}
    bad = [key for key, value in prompts.items() if not _is_text_list(value)]
    if bad:
        raise ConfigError(f"{_OPTION}: class {bad[0]!r} must have a prompt or a non-empty list of prompts")
    return prompts


def _is_text_list(value: object) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(prompt, str) for prompt in value)


def _read_json(path: str) -> Any:
    try:
        return json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{_OPTION}: cannot read '{path}': {error}") from error


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
