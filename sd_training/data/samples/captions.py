"""The caption of a sample and its tokens.

A caption is one of several texts of the sample, with its tags shuffled and dropped; or a prompt of the sample's class;
or, for tag folders, assembled from tags. Every random decision has a generator of its own (`rng(purpose)`), so enabling
one option does not change what another one draws. Purposes: `caption` (which field), `caption_entry` (which of several
captions in it), `tag_shuffle`, `tag_drop` and `tag_order` (tag folders).
"""

import json
import re
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sd_training.config.data_schema import CaptionConfig, TagConfig, class_name
from sd_training.data.sources.base import IndexedReader, captions_in, printable
from sd_training.errors import BadSample, ConfigError, DataError

CAPTION = "caption"
"""As a field: the sample's own caption (`txt` member, caption column)."""
OPTION = "dataset.params.captions"
Texts = Callable[[str], str | None]
"""Field → its text for one sample; None when the sample does not have it."""
Generators = Callable[[str], np.random.Generator]
"""Purpose → the generator of one request for it."""
Captioner = Callable[[int, Generators], str]
"""Sample → caption; a partial of `draw_caption`, pickled into loader processes."""
Prompts = dict[str, list[str]]
"""Class → at least one prompt; classes are spelled as `class_name` does."""
_DRAWN_ANEW = {
    "tag_shuffle": f"{OPTION}.shuffle_tags_prob",
    "tag_drop": f"{OPTION}.drop_tag_prob",
    "tag_order": "dataset.params.tags.shuffle_tag_p",
}
"""Purpose of a generator → the option that asks for it."""
_TAG_JOINT = "||"
"""Stands between tags while replacements are made, so that they cannot touch the separators."""
_TOKENS_CACHED = 3 * 8192
"""Captions whose tokens each loader process remembers, for up to three text encoders; class prompts and `""` come back
all the time."""
_MAX_TOKENS = 100_000


def draw_caption(
    reader: IndexedReader, rules: CaptionConfig | TagConfig, prompts: Prompts | None, sample: int, rng: Generators
) -> str:
    """The caption of one request: assembled from the tags of a tag folder, whose index holds them (`write_tags` in
    `sources/files.py`); one of the prompts of the sample's class; or its own caption or a metadata field.

    Raises:
        BadSample, DataError: there is none, or it cannot be read.
    """
    index = reader.index
    if isinstance(rules, TagConfig):
        score, *tags = json.loads(index.text("caption", sample) or "[0]")
        return tag_caption(score, tags, rules, rng)
    if rules.text is not None:
        return finish_caption(rules.text, rules, rng)
    if prompts is not None:
        prompt = _entry(prompts[class_name(index.text("cls", sample) or "")], "caption", rng)
        return finish_caption(prompt, rules, rng)
    return choose_caption(partial(_text_of, reader, sample), rules, rng)


def _text_of(reader: IndexedReader, sample: int, field: str) -> str | None:
    """The text of a field; None when the sample does not have it."""
    if field != CAPTION:
        return reader.index.metadata_text(field, sample)
    return reader.caption(sample) if reader.index.numbers("caption_length")[sample] >= 0 else None


def all_captions(
    reader: IndexedReader, rules: CaptionConfig | TagConfig, prompts: Prompts | None, sample: int
) -> list[str]:
    """Every caption that `draw_caption` may draw of a sample.

    Raises:
        BadSample, DataError: as `draw_caption`.
        ConfigError: they are drawn anew at every visit.
    """

    def drawn_anew(purpose: str) -> np.random.Generator:
        raise ConfigError(
            f"{_DRAWN_ANEW[purpose]}: captions are arranged anew at every visit, so their states cannot be stored; "
            "set it to 0, or make the cache with text=none, and the text encoders run in training"
        )

    if isinstance(rules, TagConfig) or rules.text is not None:
        return [draw_caption(reader, rules, prompts, sample, drawn_anew)]
    entries = list[str]()
    if prompts is not None:
        entries = prompts[class_name(reader.index.text("cls", sample) or "")]
    else:
        for field in caption_weights(rules):
            with suppress(BadSample):  # another field may be drawn
                text = _text_of(reader, sample, field)
                # An empty file is a caption where there is no other field.
                entries += captions_in(text) or ([""] if text is not None and len(caption_weights(rules)) == 1 else [])
    return [finish_caption(entry, rules, drawn_anew) for entry in entries]


def caption_weights(rules: CaptionConfig) -> dict[str, float]:
    """Caption field → weight above 0, by name: the order in the configuration file changes nothing."""
    return {name: weight for name, weight in sorted((rules.fields or {CAPTION: 1.0}).items()) if weight > 0}


def check_fields(rules: CaptionConfig, known: Collection[str]) -> None:
    """Raises DataError when captions need a field that no sample has.

    Args:
        known: metadata fields, and `caption` where samples have one of their own.
    """
    if unknown := sorted(caption_weights(rules).keys() - set(known)):
        fields = printable(", ".join(sorted(known)) or "none")
        missing = ", ".join(f"'{printable(name)}'" for name in unknown)
        raise DataError(f"{OPTION}: no sample has {missing}; the fields of this data are: {fields}")


def choose_caption(texts: Texts, rules: CaptionConfig, rng: Generators) -> str:
    """The caption of one request.

    A field is drawn by weight among those that the sample has; an empty text, or one of spaces, counts as missing,
    unless the sample's own caption is the only field. A text that is a JSON list of texts holds several captions, of
    which one is drawn uniformly.

    Args:
        texts: called for a field only when it was drawn: reading one may need a file or a request.
        rules: of the data set.
        rng: of the request.

    Raises:
        BadSample: there is no caption.
    """
    weights = caption_weights(rules)
    left, generator = dict(weights), rng("caption") if len(weights) > 1 else None
    while left:  # drawing again without a missing field gives the others the odds of a draw among those that are there
        names, place = list(left), 0
        if generator is not None and len(names) > 1:
            limits = np.cumsum(list(left.values()))
            place = int(np.searchsorted(limits, generator.random() * limits[-1], side="right"))
        name = names[min(place, len(names) - 1)]
        if entries := captions_in(texts(name)):
            return finish_caption(_entry(entries, "caption_entry", rng), rules, rng)
        del left[name]
    if weights.keys() == {CAPTION} and texts(CAPTION) is not None:
        return finish_caption("", rules, rng)  # an empty file says that the picture has none: the null conditioning
    raise BadSample("caption missing")


def finish_caption(caption: str, rules: CaptionConfig, rng: Generators) -> str:
    """Opening, tags, prefix and suffix for a caption that is drawn already."""
    caption = _without_opening(caption, rules.openings)
    if rules.tag_separator:
        caption = _arrange_tags(caption, rules.tag_separator, rules, rng)
    return f"{rules.prefix}{caption}{rules.suffix}"


def _without_opening(caption: str, openings: Sequence[str]) -> str:
    """Takes off the longest opening that ends where a word does."""
    ends = [m.end() for o in openings if (m := re.match(rf"{re.escape(o)}(?!\w)", caption, re.IGNORECASE))]
    rest = caption[max(ends) :].lstrip(" \t\n,.:;-") if ends else ""
    return rest[0].upper() + rest[1:] if rest else caption


def _entry(entries: Sequence[str], purpose: str, rng: Generators) -> str:
    return entries[0] if len(entries) == 1 else entries[int(rng(purpose).integers(len(entries)))]


def _arrange_tags(caption: str, separator: str, rules: CaptionConfig, rng: Generators) -> str:
    """Both draws are made for the tags as written, so that neither depends on the other. May drop all tags."""
    tags = [tag for tag in map(str.strip, caption.split(separator.strip() or separator)) if tag]
    order, first = np.arange(len(tags)), rules.num_kept_tags
    if rules.shuffle_tags_prob > 0 and len(tags) > first:
        generator = rng("tag_shuffle")
        if generator.random() < rules.shuffle_tags_prob:
            order[first:] = first + generator.permutation(len(tags) - first)
    kept = np.ones(len(tags), dtype=np.bool_)
    if rules.drop_tag_prob > 0 and len(tags) > first:
        kept[first:] = rng("tag_drop").random(len(tags) - first) >= rules.drop_tag_prob
    return separator.join(tags[i] for i in order if kept[i])


def tag_caption(score: int, tags: Sequence[str], rules: TagConfig, rng: Generators) -> str:
    """The caption of a picture of a tag folder, empty with `skip_caption`: score tag, tags left out, shuffled or
    sorted, replacements, separators, in this order.

    Args:
        score, tags: of the picture, as its metadata file has them.
        rules: `dataset.params.tags`.
        rng: called with `tag_order`, which is not the draw of `dataset.params.captions`.
    """
    if rules.skip_caption:
        return ""
    hidden, prefixes = rules.non_caption_tags or (), tuple(rules.non_caption_tag_prefixes or ())
    shown = [t for t in with_score_tag(tags, score, rules.score_tags) if t not in hidden and not t.startswith(prefixes)]
    generator = rng("tag_order") if rules.shuffle_tag_p else None
    if generator is not None and generator.random() < (rules.shuffle_tag_p or 0):
        shown = [shown[i] for i in generator.permutation(len(shown))]
    elif rules.caption_sorter == "alphabetical":
        shown.sort()
    joined = _TAG_JOINT.join(shown)
    for old, new in (rules.replacements or {}).items():  # each works on the result of those before, also inside tags
        joined = joined.replace(old, new)
    caption = joined.replace(_TAG_JOINT, rules.tag_separator) if rules.replacements else rules.tag_separator.join(shown)
    return caption + rules.tag_separator if rules.final_tag_separator else caption


def with_score_tag(tags: Sequence[str], score: int, score_tags: Sequence[int]) -> list[str]:
    """`tags` and, last, `scr<threshold>` of the highest of `score_tags` that the picture's own score reaches."""
    reached = max((threshold for threshold in score_tags if score >= threshold), default=None)
    return [*tags] if reached is None else [*tags, f"scr{reached}"]


class Encoded(NamedTuple):
    """A caption as the text encoder gets it."""

    tokens: NDArray[np.int64]
    """[L]."""
    mask: NDArray[np.bool_]
    """[L] false where a token is padding."""


@dataclass(eq=False)
class Tokenizer:
    """Caption → fixed-length tokens, cached."""

    tokenizer: Any
    """transformers' of a text encoder. (Checks of options import this module, and transformers is slow.)"""
    length: int = 0
    """Tokens per caption; longer captions are truncated. 0 takes the tokenizer's `model_max_length`."""
    is_lowercase: bool = False
    """Captions are lower-cased first, as some pipelines do."""
    prefix: str = ""
    suffix: str = ""
    """What a pipeline puts around a caption. Their tokens count in `length`."""
    is_empty_bare: bool = False
    """Whether it does not around the empty caption."""

    def __post_init__(self) -> None:
        self.length = self.length or int(self.tokenizer.model_max_length)
        if self.length > _MAX_TOKENS:
            raise ConfigError("model.tokenizer: the tokenizer does not say its model_max_length [tokens per caption]")

    def encode(self, caption: str) -> Encoded:
        """Tokens and their mask."""
        return self._encode(caption)

    @lru_cache(maxsize=_TOKENS_CACHED)  # noqa: B019  # keeps tokenizers, which a process needs to its end
    def _encode(self, caption: str) -> Encoded:
        row = self._ids(caption, truncation=True, max_length=self.length)
        # Always padded on the right, so that a decoder's states do not depend on the tokenizer's preference.
        padding = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id, 0)
        tokens = np.full(self.length, next(token for token in padding if token is not None), dtype=np.int64)
        tokens[: len(row)] = row
        return Encoded(tokens, np.arange(self.length) < len(row))

    def is_cut(self, caption: str) -> bool:
        """Whether a caption has more tokens than are read."""
        return len(self._ids(caption, truncation=False, verbose=False)) > self.length

    def _ids(self, caption: str, **options: Any) -> list[int]:
        text = caption.lower().strip() if self.is_lowercase else caption
        is_bare = self.is_empty_bare and not text
        whole = text if is_bare else f"{self.prefix}{text}{self.suffix}"
        return list(self.tokenizer(whole, **options)["input_ids"])

    def decode(self, tokens: Any) -> str:
        """The caption that tokens were made of, as far as they hold it, in one line."""
        around = (self.tokenizer(text)["input_ids"] if text else [] for text in (self.prefix, self.suffix))
        texts = (self.tokenizer.decode(row, skip_special_tokens=True) for row in (tokens, *around))
        text, prefix, suffix = (" ".join(own.split()) for own in texts)
        return text.removeprefix(prefix).removesuffix(suffix).strip()
