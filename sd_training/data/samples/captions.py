"""The caption of a sample and its tokens.

A caption is one of several texts of the sample, with its tags shuffled and dropped, put into a template; or a prompt of
the sample's class; or, for tag folders, assembled from tags. Every random decision has a generator of its own
(`rng(purpose)`), so enabling one option does not change what another one draws. Purposes: `caption` (which field),
`caption_entry` (which of several captions in it), `tag_shuffle`, `tag_drop`, `tag_order` (tag folders) and
`template:<field>` (which of several texts of a template's field).
"""

import json
import re
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sd_training.config.data_schema import CaptionConfig, TagConfig, class_name
from sd_training.data.index.columns import captions_in
from sd_training.data.index.dataset_index import DatasetIndex
from sd_training.data.problems import BadSample, printable
from sd_training.data.sources.base import IndexedReader
from sd_training.errors import ConfigError, DataError

CAPTION = "caption"
"""As a field: the sample's own caption (`txt` member, caption column). In a template: the caption that was drawn."""
OPTION = "dataset.params.captions"
Texts = Callable[[str], str | None]
"""Field → its text for one sample; None when the sample does not have it."""
Generators = Callable[[str], np.random.Generator]
"""Purpose → the generator of one request for it."""
Captioner = Callable[[int, Generators], str]
"""Sample → caption; a partial of one of the three functions below, pickled into loader processes."""
Prompts = dict[str, list[str]]
"""Class → at least one prompt; classes are spelled as `class_name` does."""
_PLACEHOLDER = re.compile(r"\{\{|\}\}|\{(?P<field>[^{}]+)\}|(?P<text>[^{}]+)|(?P<stray>[{}])")
_TAG_JOINT = "||"
"""Stands between tags while replacements are made, so that they cannot touch the separators."""
_TOKENS_CACHED = 8192
"""Captions whose tokens each loader process remembers; class prompts and `""` come back all the time."""
_MAX_TOKENS = 100_000


def field_caption(
    index: DatasetIndex, reader: IndexedReader, rules: CaptionConfig, sample: int, rng: Generators
) -> str:
    """The sample's own caption or a metadata field, by `dataset.params.captions`. Raises BadSample or DataError."""

    def text(field: str) -> str | None:
        if field != CAPTION:
            return index.metadata_text(field, sample)
        return reader.caption(sample) if index.numbers("caption_length")[sample] >= 0 else None

    return choose_caption(text, rules, rng)


def class_caption(index: DatasetIndex, prompts: Prompts, rules: CaptionConfig, sample: int, rng: Generators) -> str:
    """One of the prompts of the sample's class in the place of a caption."""
    prompt = _entry(prompts[class_name(index.text("cls", sample) or "")], "caption", rng)
    return finish_caption(prompt, lambda field: index.metadata_text(field, sample), rules, rng)


def tag_folder_caption(index: DatasetIndex, rules: TagConfig, sample: int, rng: Generators) -> str:
    """The caption of a sample of a tag folder, whose index holds the tags (`write_tags` in `sources/files.py`)."""
    score, *tags = json.loads(index.text("caption", sample) or "[0]")
    return tag_caption(score, tags, rules, rng)


def caption_weights(rules: CaptionConfig) -> dict[str, float]:
    """Caption field → weight above 0, by name: the order in the configuration file changes nothing."""
    return {name: weight for name, weight in sorted((rules.fields or {CAPTION: 1.0}).items()) if weight > 0}


def template_fields(rules: CaptionConfig) -> set[str]:
    """The fields of the template, all of them required of every sample; `caption` alone without a template."""
    return set(_template_parts(rules.template)[1::2]) if rules.template is not None else {CAPTION}


def fields_needed(rules: CaptionConfig) -> set[str]:
    """The fields that `choose_caption` may ask for; `caption` is the sample's own."""
    fields = template_fields(rules)
    return (fields - {CAPTION}) | (caption_weights(rules).keys() if CAPTION in fields else set())


def check_rules(rules: CaptionConfig) -> None:
    """Raises ConfigError with every option that cannot be read, or that would do nothing beside the others."""
    problems = []
    if rules.fields and not caption_weights(rules):
        problems.append(f"{OPTION}.fields: every weight is 0; give one field a weight above 0")
    try:
        if CAPTION not in template_fields(rules) and (rules.fields or rules.tag_separator):
            problems.append(
                f"{OPTION}.template: has no {{{CAPTION}}}, which fields and tag_separator are about; add it"
            )
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)


def check_fields(rules: CaptionConfig, known: Collection[str]) -> None:
    """Raises DataError when captions need a field that no sample has.

    Args:
        known: metadata fields, and `caption` where samples have one of their own.
    """
    if unknown := sorted(fields_needed(rules) - set(known)):
        fields = printable(", ".join(sorted(known)) or "none")
        missing = ", ".join(f"'{printable(name)}'" for name in unknown)
        raise DataError(f"{OPTION}: no sample has {missing}; the fields of this data are: {fields}")


@lru_cache(maxsize=64)
def _template_parts(template: str) -> list[str]:
    """Text, field, text, field, …, text. `{name}` is a field, `{{` and `}}` are braces; there is nothing else.

    Raises:
        ConfigError: a brace belongs to no field.
    """
    parts = [""]
    for match in _PLACEHOLDER.finditer(template):
        name = (match["field"] or "").strip()
        if match["stray"] or (match["field"] and not name):
            remedy = "write {field} for a field, {{ or }} for a brace"
            raise ConfigError(f"{OPTION}.template: {template!r} has a brace without a field; {remedy}")
        if name:
            parts += [name, ""]
        else:
            parts[-1] += match["text"] or match[0][0]
    return parts


def choose_caption(texts: Texts, rules: CaptionConfig, rng: Generators) -> str:
    """The caption of one request.

    A field is drawn by weight among those that the sample has; an empty text, or one of spaces, counts as missing,
    unless the sample's own caption is the only field. A text that is a JSON list of texts holds several captions, of
    which one is drawn uniformly.

    Args:
        texts: asked for a field only when it was drawn: reading one may mean a file or a request.
        rules: of the data set.
        rng: of the request.

    Raises:
        BadSample: there is no caption, or no text for a field of the template.
    """
    caption = _draw_caption(texts, caption_weights(rules), rng) if CAPTION in template_fields(rules) else ""
    return finish_caption(caption, texts, rules, rng)


def finish_caption(caption: str, texts: Texts, rules: CaptionConfig, rng: Generators) -> str:
    """Tags, template, prefix and suffix for a caption that is drawn already. Raises as `choose_caption` does."""
    if rules.tag_separator:
        caption = _arrange_tags(caption, rules.tag_separator, rules, rng)
    if rules.template is not None:
        found, parts = {CAPTION: caption}, list(_template_parts(rules.template))
        for number, field in enumerate(parts[1::2]):
            if field not in found:
                entries = captions_in(texts(field))
                if not entries:
                    raise BadSample(f"caption template has no text: {field}")
                found[field] = _entry(entries, f"template:{field}", rng)
            parts[2 * number + 1] = found[field]
        caption = "".join(parts)
    return f"{rules.prefix}{caption}{rules.suffix}"


def _draw_caption(texts: Texts, weights: dict[str, float], rng: Generators) -> str:
    """Drawing again without the missing field gives the others the same odds as drawing among those that are there."""
    left = dict(weights)
    generator = rng("caption") if len(left) > 1 else None
    while left:
        names, limits = list(left), np.cumsum(list(left.values()))
        place = 0
        if generator is not None and len(names) > 1:
            place = int(np.searchsorted(limits, generator.random() * limits[-1], side="right"))
        name = names[min(place, len(names) - 1)]
        if entries := captions_in(texts(name)):
            return _entry(entries, "caption_entry", rng)
        del left[name]
    if weights.keys() == {CAPTION} and texts(CAPTION) is not None:
        return ""  # an empty caption file says that the picture has none: it trains the null conditioning
    raise BadSample("caption missing")


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
        rng: asked for `tag_order`, which is not the draw of `dataset.params.captions`.
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
    num_cut: int
    """Tokens of the caption that did not fit."""


class Tokenizer:
    """Caption → fixed-length tokens, cached.

    Args:
        tokenizer: transformers' of a text encoder. (Checks of options import this module, and transformers is slow.)
        length: tokens per caption; longer captions are truncated. None takes the tokenizer's `model_max_length`.
        is_lowercase: captions are lower-cased first, as some pipelines do.
    """

    def __init__(self, tokenizer: Any, length: int | None = None, *, is_lowercase: bool = False) -> None:
        self.tokenizer, self.is_lowercase = tokenizer, is_lowercase
        self.length = length or int(tokenizer.model_max_length)
        if self.length > _MAX_TOKENS:
            raise ConfigError("model.tokenizer: the tokenizer does not say its model_max_length [tokens per caption]")
        self._cached: Callable[[str], Encoded] | None = None

    def __call__(self, caption: str) -> NDArray[np.int64]:
        """[L] tokens."""
        return self.encode_counted(caption).tokens

    def encode_counted(self, caption: str) -> Encoded:
        """Tokens, their mask, and how many did not fit."""
        if self._cached is None:
            self._cached = lru_cache(maxsize=_TOKENS_CACHED)(self._encode)
        return self._cached(caption)

    def _encode(self, caption: str) -> Encoded:
        if self.is_lowercase:
            caption = caption.lower().strip()
        row = self.tokenizer(caption, truncation=True, max_length=self.length)["input_ids"]
        # Padded on the right, whatever side the tokenizer prefers, so that a decoder's states do not depend on it.
        padding = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id, 0)
        tokens = np.full(self.length, next(token for token in padding if token is not None), dtype=np.int64)
        tokens[: len(row)] = row
        # Only a caption that fills its place can have been cut; it is tokenized a second time to count, because fast
        # and slow tokenizers report the overflow of one call in different shapes.
        num_cut = 0
        if len(row) == self.length:
            num_cut = len(self.tokenizer(caption, truncation=False, verbose=False)["input_ids"]) - self.length
        return Encoded(tokens, np.arange(self.length) < len(row), num_cut)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cached": None}
