"""The schema as a flat table of dotted options: for messages, suggestions, the reference, and what reads which one."""

import json
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from sd_training.config.schema import Config
from sd_training.config.value_types import ReadWith

SECRETS = frozenset({"wandb.api_key"})
"""Options whose values are never printed or written."""
OLD_NAMES: Mapping[str, str] = {
    "dataset.params.batch_size": "system.batch_size",
    "dataset.params.num_examples_to_see": "experiment.num_examples_to_see",
    "dataset.params.workers": "system.workers",
    "model.ema.path": "ema.path",
    "model.max_grad_norm": "optimizer.max_grad_norm",
    "system.dist_backend": "distributed.dist_backend",
    "system.dist_url": "distributed.dist_url",
}
"""Name of an option in sd-training, perhaps its second one → its name here."""
OLD_WORDS: Mapping[str, Mapping[str, str]] = {"dataset.type": {"ParquetDataset": "Parquet"}}
"""Option → word of sd-training → the word here."""

_SHOWN_CHARACTERS = 80
_ONE = {str: "a text", bool: "true or false", type(None): "null", Any: "any value"}
_SEVERAL = {str: "texts", int: "whole numbers", float: "numbers", Any: "any values"}
_BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}


@dataclass(frozen=True)
class Option:
    """One leaf of the schema."""

    key: str
    """Dotted name."""
    annotation: Any
    """Type, with its bounds inside `Annotated`."""
    allowed: str
    """Type and bounds in plain words."""
    required: bool
    default: Any
    doc: str
    readers: Mapping[str, ReadWith]
    """Dotted name of another option → with which of its values this one is read."""


def group_fields(group: type) -> Mapping[str, FieldInfo]:
    """The fields of a schema dataclass by name."""
    fields: Mapping[str, FieldInfo] = group.__pydantic_fields__  # type: ignore[attr-defined]
    for name, field in fields.items():
        if field.description is None:  # pydantic reads attribute docstrings of the class itself, not of its bases
            inherited = (getattr(base, "__pydantic_fields__", {}).get(name) for base in group.__mro__[1:])
            field.description = next((f.description for f in inherited if f is not None), None)
    return fields


def is_group(annotation: Any) -> bool:
    """Whether a field holds options of its own."""
    return isinstance(annotation, type) and hasattr(annotation, "__pydantic_fields__")


Scopes = tuple[tuple[str, type], ...]
"""Prefix and class of the groups around a field, the innermost first."""


def walk(
    group: type = Config, prefix: str = "", around: Scopes = (), above: Mapping[str, ReadWith] | None = None
) -> Iterator[tuple[str, FieldInfo, dict[str, ReadWith]]]:
    """Every group and every option in the order of the schema: dotted name, field, and what decides whether it is read.

    Of two rules about the same deciding option, the one of the inner group or field holds.
    """
    around = ((prefix, group), *around)
    for name, field in group_fields(group).items():
        readers = dict(above or {})
        for rule in field.metadata:
            if isinstance(rule, ReadWith) and (decider := _decider(rule.option, around)):
                readers[decider] = rule
        yield prefix + name, field, readers
        if is_group(field.annotation):
            assert isinstance(field.annotation, type)
            yield from walk(field.annotation, f"{prefix}{name}.", around, readers)


def _decider(name: str, around: Scopes) -> str | None:
    return next((prefix + name for prefix, group in around if name.partition(".")[0] in group_fields(group)), None)


@cache
def options(group: type = Config) -> dict[str, Option]:
    """Every option of a group by its dotted name inside the group."""
    return {key: _option(key, field, readers) for key, field, readers in walk(group) if not is_group(field.annotation)}


@cache
def groups() -> dict[str, FieldInfo]:
    """Every group of options by its dotted name."""
    return {key: field for key, field, _ in walk() if is_group(field.annotation)}


def option_of(key: str) -> Option:
    """The option that a place inside its value, such as `dataset.mix.0.weight`, belongs to."""
    while key and key not in options():
        key = key.rpartition(".")[0]
    return options()[key]


def defaults(group: type = Config) -> dict[str, Any]:
    """Plain defaults of a group; a required option is `???`."""
    return {name: _default(field) for name, field in group_fields(group).items()}


def rename_old(values: Any, origins: dict[str, str]) -> dict[str, str]:
    """Puts values under the names of `OLD_NAMES` where today's names are, in place, and likewise words.

    Args:
        values: plain containers of a configuration.
        origins: where the options come from that were given; those must not contradict an old name.

    Returns:
        Old name → what is wrong with its value.
    """
    problems = {}
    for old, new in OLD_NAMES.items():
        (source, old_name), (group, name) = place_of(values, old), place_of(values, new)
        value = source.pop(old_name, None)
        above = old.rpartition(".")[0]
        holder, above_name = place_of(values, above)
        if above not in groups() and not holder.get(above_name):  # a group that is unknown here, and empty now
            holder.pop(above_name, None)
        if value is None:
            continue
        if not group:  # with nothing but comments below it in a file
            group = values.setdefault(new.partition(".")[0], {})
        if new in origins and group.get(name, value) != value:
            problems[old] = f"is {shown(value)}, but {new} is {shown(group[name])}; remove {old}, a second name of it"
            continue
        group[name] = value
        if old in origins:
            origins.setdefault(new, origins[old])
    for key, words in OLD_WORDS.items():
        group, name = place_of(values, key)
        if isinstance(group.get(name), str):
            group[name] = words.get(group[name], group[name])
    return problems


def place_of(values: Any, key: str) -> tuple[dict[str, Any], str]:
    """The mapping that holds a dotted option, an empty one where there is none, and the option's name in it."""
    *above, name = key.split(".")
    for step in above:
        values = values.get(step) if isinstance(values, dict) else None
    return (values if isinstance(values, dict) else {}), name


def value_of(group: Any, key: str) -> Any:
    """The value of a dotted option of a group."""
    for step in key.split("."):
        group = getattr(group, step)
    return group


def _default(field: FieldInfo) -> Any:
    if is_group(field.annotation):
        assert isinstance(field.annotation, type)
        return defaults(field.annotation)
    return "???" if field.is_required() else field.get_default(call_default_factory=True, validated_data={})


def _option(key: str, field: FieldInfo, readers: Mapping[str, ReadWith]) -> Option:
    annotation: Any = field.annotation
    for item in field.metadata:
        annotation = Annotated[annotation, item]
    extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
    allowed = str(extra.get("allowed") or describe(annotation))
    return Option(key, annotation, allowed, field.is_required(), _default(field), field.description or "", readers)


def shown(value: Any, key: str = "") -> str:
    """A value as it would stand in YAML, shortened; values of secret options are not shown."""
    if key in SECRETS:
        return "(hidden)"
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 3]}..."


def is_below(key: str, groups_or_options: Iterable[str]) -> bool:
    """Whether a dotted key is one of these or stands inside one of them."""
    return any(key == other or key.startswith(f"{other}.") for other in groups_or_options)


def either(words: Sequence[str]) -> str:
    """`a`, `a or b`, `a, b or c`."""
    return f"{', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else words[0]


def describe(annotation: Any) -> str:
    """A type in plain words: "a whole number of at least 1"."""
    kind, metadata = _unwrap(annotation)
    if len(members := _members(kind)) > 1:
        # Short words first: "a text or a mapping of … to … or null" reads unambiguously.
        named = sorted(map(describe, members), key=lambda word: (word == "null", word.startswith("a mapping")))
        return " or ".join(named)
    if get_origin(kind) is Literal:
        return either([str(value) for value in get_args(kind)])
    if get_origin(kind) is list:
        return f"a list of {_describe_many(get_args(kind)[0])}"
    if get_origin(kind) is dict:
        return f"a mapping of {' to '.join(map(_describe_many, get_args(kind)))}"
    if kind not in (int, float):
        return _ONE.get(kind, getattr(kind, "__name__", str(kind)))
    bounds = [f"{word} {getattr(m, name):g}" for name, word in _BOUNDS.items() for m in metadata if hasattr(m, name)]
    between = " of " if bounds and bounds[0].startswith("at") else " "
    return ("a whole number" if kind is int else "a number") + (between + " and ".join(bounds) if bounds else "")


def accepts(option: Option, value: Any) -> bool:
    """Whether a value is right for an option as it stands, without conversion."""
    try:
        TypeAdapter(option.annotation).validate_python(value, strict=True)
    except ValidationError:
        return False
    return True


def words_of(annotation: Any) -> list[str]:
    """The words that an option allows; none where it takes no fixed words."""
    members = [_unwrap(member)[0] for member in _members(_unwrap(annotation)[0])]
    return [str(word) for member in members if get_origin(member) is Literal for word in get_args(member)]


def _describe_many(annotation: Any) -> str:
    members = [_unwrap(member)[0] for member in _members(_unwrap(annotation)[0])]
    return " or ".join(_SEVERAL.get(m) or f"lists of {_describe_many(get_args(m)[0])}" for m in members)


def _unwrap(annotation: Any) -> tuple[Any, list[Any]]:
    """The type under `Annotated`, and what was annotated."""
    found: list[Any] = []
    while get_origin(annotation) is Annotated:
        annotation, *metadata = get_args(annotation)
        for item in metadata:
            found += item.metadata if isinstance(item, FieldInfo) else [item]
    return annotation, found


def _members(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
