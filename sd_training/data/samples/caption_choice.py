"""Which caption a visit gets: one of several texts, its tags shuffled and dropped, put into a template.

Every random decision has a generator of its own (`rng(purpose)`), so that turning one option on does not move what
another one draws. Purposes: `caption` which field, `caption_entry` which of several captions in it, `tag_shuffle`,
`tag_drop`, and `template:<field>` which of several texts of a template's field.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from sd_training.config.data_schema import CaptionConfig
from sd_training.data.problems import BadSample, printable
from sd_training.errors import ConfigError, DataError

CAPTION = "caption"
"""As a field: the sample's own caption (`txt` member, caption column). In a template: the caption that was chosen."""
OPTION = "dataset.params.captions"
Texts = Callable[[str], str | None]
"""Field → its text for one sample; None when the sample does not have it."""
Draws = Callable[[str], np.random.Generator]
"""Purpose → the generator of one visit for it."""
_FIELDS_SHOWN = 20
_PART = re.compile(r"\{\{|\}\}|\{(?P<field>[^{}]+)\}|(?P<text>[^{}]+)|(?P<stray>[{}])")


@dataclass(frozen=True)
class CaptionRules:
    """The options of `dataset.params.captions`, read by `caption_rules`."""

    fields: Mapping[str, float] = field(default_factory=dict)
    """Caption source → weight of at least 0; empty means the sample's own caption."""
    prefix: str = ""
    suffix: str = ""
    """Put before and after everything else, as they are: a space between is part of them."""
    template: str | None = None
    """Read by `parse_template`."""
    tag_separator: str | None = None
    """Makes captions lists of tags. Given with spaces, as `, `, it splits at `,` and joins with `, `."""
    shuffle_tags_prob: float = 0.0
    drop_tag_prob: float = 0.0
    num_kept_tags: int = 0

    @property
    def weights(self) -> Mapping[str, float]:
        """Source → weight above 0, by name: the order in the file changes nothing."""
        return {name: weight for name, weight in sorted((self.fields or {CAPTION: 1.0}).items()) if weight > 0}


class Placeholder(NamedTuple):
    """Where a template takes the text of a field."""

    field: str


def caption_rules(config: CaptionConfig, option: str = OPTION) -> CaptionRules:
    """The rules that a config asks for.

    Raises:
        ConfigError: every option that cannot be read, or that would do nothing beside the others.
    """
    rules = CaptionRules(
        fields=dict(config.fields or {}),
        prefix=config.prefix,
        suffix=config.suffix,
        template=config.template,
        tag_separator=config.tag_separator,
        shuffle_tags_prob=config.shuffle_tags_prob,
        drop_tag_prob=config.drop_tag_prob,
        num_kept_tags=config.num_kept_tags,
    )
    if problems := _field_problems(rules, option) + _template_problems(rules, option) + _tag_problems(rules, option):
        raise ConfigError(problems)
    return rules


def _field_problems(rules: CaptionRules, option: str) -> list[str]:
    if rules.fields and not rules.weights:
        return [f"{option}.fields: every weight is 0; give one field a weight above 0"]
    return []


def _template_problems(rules: CaptionRules, option: str) -> list[str]:
    try:
        has_caption = uses_caption(rules)
    except ValueError as error:
        return [f"{option}.template: {rules.template!r} {error}"]
    idle = [name for name in ("fields", "tag_separator") if getattr(rules, name)]
    if has_caption or not idle:
        return []
    return [
        f"{option}.template: has no {{{CAPTION}}}, so {' and '.join(idle)} would do nothing; add it or take them out"
    ]


def _tag_problems(rules: CaptionRules, option: str) -> list[str]:
    if rules.tag_separator == "":
        return [f"{option}.tag_separator: '' separates nothing; write what stands between tags, such as ', ', or null"]
    idle = [name for name in ("shuffle_tags_prob", "drop_tag_prob", "num_kept_tags") if getattr(rules, name)]
    if rules.tag_separator is None:
        return [f"{option}.{name}: needs {option}.tag_separator, such as ', '" for name in idle]
    if idle == ["num_kept_tags"]:
        return [f"{option}.num_kept_tags: does nothing without shuffle_tags_prob or drop_tag_prob above 0"]
    return []


@lru_cache(maxsize=64)
def parse_template(template: str) -> tuple[str | Placeholder, ...]:
    """Texts and placeholders in turn. `{name}` is a placeholder, `{{` and `}}` are braces; there is nothing else.

    Raises:
        ValueError: a brace that belongs to no placeholder.
    """
    parts: list[str | Placeholder] = []
    for match in _PART.finditer(template):
        name = (match["field"] or "").strip()
        if match["stray"] or (match["field"] and not name):
            raise ValueError("has a brace without a field; write {field} for a field, {{ or }} for a brace")
        parts.append(Placeholder(name) if name else match["text"] or match[0][0])
    return tuple(parts)


def template_fields(rules: CaptionRules) -> set[str]:
    """What the template takes, all of it needed by every sample; `caption` alone without a template."""
    parts = parse_template(rules.template) if rules.template is not None else (Placeholder(CAPTION),)
    return {part.field for part in parts if isinstance(part, Placeholder)}


def uses_caption(rules: CaptionRules) -> bool:
    """Whether a caption is drawn at all: a template may do without."""
    return CAPTION in template_fields(rules)


def fields_needed(rules: CaptionRules) -> set[str]:
    """The fields that `choose_caption` may ask for; `caption` is the sample's own."""
    return (template_fields(rules) - {CAPTION}) | (set(rules.weights) if uses_caption(rules) else set())


def check_fields(rules: CaptionRules, known: Collection[str], option: str = OPTION) -> None:
    """Compares the rules with the fields of the data.

    Args:
        rules: what will be asked for.
        known: metadata fields, and `caption` where samples have one of their own.
        option: dotted name of the rules in the config.

    Raises:
        DataError: a field that no sample has; the fields there are, are named.
    """
    if unknown := sorted(fields_needed(rules) - set(known)):
        shown = ", ".join(map(printable, sorted(known)[:_FIELDS_SHOWN])) or "none"
        more = f" and {len(known) - _FIELDS_SHOWN} more" if len(known) > _FIELDS_SHOWN else ""
        missing = ", ".join(f"'{printable(name)}'" for name in unknown)
        raise DataError(f"{option}: no sample has {missing}; the fields of this data are: {shown}{more}")


def choose_caption(texts: Texts, rules: CaptionRules, rng: Draws) -> str:
    """The caption of one visit.

    A field is drawn by weight among those that the sample has; an empty text, or one of spaces, counts as missing,
    unless the sample's own caption is the only field. A text that is a JSON list of texts holds several captions, of
    which one is drawn, each as likely as the others.

    Args:
        texts: asked for a field only when it was drawn: reading one may mean a file or a request.
        rules: of the data set.
        rng: of the visit.

    Raises:
        BadSample: there is no caption, or no text for a field of the template.
    """
    caption = _draw_caption(texts, rules, rng) if uses_caption(rules) else ""
    return finish_caption(caption, texts, rules, rng)


def finish_caption(caption: str, texts: Texts, rules: CaptionRules, rng: Draws) -> str:
    """Tags, template, prefix and suffix for a caption that is chosen already. Raises as `choose_caption` does."""
    if rules.tag_separator is not None:
        caption = _arrange_tags(caption, rules.tag_separator, rules, rng)
    if rules.template is not None:
        caption = _fill(rules.template, caption, texts, rng)
    return f"{rules.prefix}{caption}{rules.suffix}"


def _draw_caption(texts: Texts, rules: CaptionRules, rng: Draws) -> str:
    """Drawing again without the missing field gives the others the same odds as drawing among those that are there."""
    weights = dict(rules.weights)
    generator = rng("caption") if len(weights) > 1 else None
    while weights:
        name = _pick(weights, generator)
        if entries := captions_in(texts(name)):
            return _entry(entries, "caption_entry", rng)
        del weights[name]
    if rules.weights.keys() == {CAPTION} and texts(CAPTION) is not None:
        return ""  # An empty caption file says that the picture has none: it trains the null conditioning.
    raise BadSample("caption missing")


def _pick(weights: Mapping[str, float], generator: np.random.Generator | None) -> str:
    names = list(weights)
    if generator is None or len(names) == 1:
        return names[0]
    limits = np.cumsum(list(weights.values()))
    place = np.searchsorted(limits, generator.random() * limits[-1], side="right")
    return names[min(int(place), len(names) - 1)]


def captions_in(text: str | None) -> list[str]:
    """The captions of a stored text: the entries of a JSON list of texts, else the text; without the empty ones."""
    text = (text or "").strip()
    entries = [text]
    if text.startswith("[") and text.endswith("]"):
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, list) and all(isinstance(entry, str) for entry in value):
            entries = [entry.strip() for entry in value]
    return [entry for entry in entries if entry]


def _entry(entries: list[str], purpose: str, rng: Draws) -> str:
    return entries[0] if len(entries) == 1 else entries[int(rng(purpose).integers(len(entries)))]


def _arrange_tags(caption: str, separator: str, rules: CaptionRules, rng: Draws) -> str:
    """Both draws are made for the tags as written, so that neither depends on the other. May leave no tag at all."""
    tags = [tag for tag in map(str.strip, caption.split(separator.strip() or separator)) if tag]
    order, first = np.arange(len(tags)), rules.num_kept_tags
    if rules.shuffle_tags_prob > 0 and len(tags) > first:
        generator = rng("tag_shuffle")
        if generator.random() < rules.shuffle_tags_prob:
            order[first:] = first + generator.permutation(len(tags) - first)
    stays = np.ones(len(tags), dtype=np.bool_)
    if rules.drop_tag_prob > 0 and len(tags) > first:
        stays[first:] = rng("tag_drop").random(len(tags) - first) >= rules.drop_tag_prob
    return separator.join(tags[i] for i in order if stays[i])


def _fill(template: str, caption: str, texts: Texts, rng: Draws) -> str:
    found = {CAPTION: caption}
    for part in parse_template(template):
        if isinstance(part, Placeholder) and part.field not in found:
            entries = captions_in(texts(part.field))
            if not entries:
                raise BadSample(f"caption template has no text: {part.field}")
            found[part.field] = _entry(entries, f"template:{part.field}", rng)
    return "".join(found[part.field] if isinstance(part, Placeholder) else part for part in parse_template(template))
