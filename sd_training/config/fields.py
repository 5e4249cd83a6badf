"""The schema seen as a flat table of dotted options, for messages, suggestions and the key reference."""

import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from sd_training.config.schema import Config

SECRETS = frozenset({"wandb.api_key"})
"""Options whose values are never printed or written."""

_ONE = {str: "a text", bool: "true or false", type(None): "null", Any: "any value"}
_SEVERAL = {str: "texts", int: "whole numbers", float: "numbers", Any: "any values"}


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


def walk(group: type = Config, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Dotted name and field of every group and every option, in the order of the schema."""
    for name, field in group_fields(group).items():
        yield prefix + name, field
        if isinstance(field.annotation, type) and is_group(field.annotation):
            yield from walk(field.annotation, f"{prefix}{name}.")


@cache
def options() -> dict[str, Option]:
    """Every option by its dotted name."""
    return {key: _option(key, field) for key, field in walk() if not is_group(field.annotation)}


@cache
def groups() -> dict[str, FieldInfo]:
    """Every group of options by its dotted name."""
    return {key: field for key, field in walk() if is_group(field.annotation)}


def defaults(group: type = Config) -> dict[str, Any]:
    """Plain defaults of a group; a required option is `???`."""
    return {name: _default(field) for name, field in group_fields(group).items()}


def _default(field: FieldInfo) -> Any:
    if isinstance(field.annotation, type) and is_group(field.annotation):
        return defaults(field.annotation)
    return "???" if field.is_required() else field.get_default(call_default_factory=True, validated_data={})


def _option(key: str, field: FieldInfo) -> Option:
    annotation: Any = field.annotation
    for item in field.metadata:
        annotation = Annotated[annotation, item]
    extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
    allowed = str(extra.get("allowed") or describe(annotation))
    return Option(key, annotation, allowed, field.is_required(), _default(field), field.description or "")


def describe(annotation: Any) -> str:
    """A type in plain words: "a whole number of at least 1"."""
    kind, bounds = _unwrap(annotation)
    members = _members(kind)
    if len(members) > 1:
        # Short words first: "a text or a mapping of … to … or null" reads unambiguously.
        named = sorted(map(describe, members), key=lambda word: (word == "null", word.startswith("a mapping")))
        return " or ".join(named)
    if get_origin(kind) is Literal:
        return _either([str(value) for value in get_args(kind)])
    if get_origin(kind) is list:
        return f"a list of {_describe_many(get_args(kind)[0])}"
    if get_origin(kind) is dict:
        key, value = get_args(kind)
        return f"a mapping of {_describe_many(key)} to {_describe_many(value)}"
    if kind in (int, float):
        return ("a whole number" if kind is int else "a number") + _bounds(bounds)
    return _ONE.get(kind, getattr(kind, "__name__", str(kind)))


def accepts(annotation: Any, kind: type) -> bool:
    """Whether a value of this Python type can be right for the option."""
    bare = [_unwrap(member)[0] for member in _members(_unwrap(annotation)[0])]
    return Any in bare or any((get_origin(member) or member) is kind for member in bare)


def accepts_as_typed(annotation: Any, text: str) -> bool:
    """Whether the option takes this very text: it holds free text, or has it among its words."""
    bare = [_unwrap(member)[0] for member in _members(_unwrap(annotation)[0])]
    return str in bare or any(text in get_args(member) for member in bare if get_origin(member) is Literal)


def words_of(annotation: Any) -> list[str]:
    """The words that an option allows; none where it takes no fixed words."""
    members = [_unwrap(member)[0] for member in _members(_unwrap(annotation)[0])]
    return [str(word) for member in members if get_origin(member) is Literal for word in get_args(member)]


def _describe_many(annotation: Any) -> str:
    members = [_unwrap(member)[0] for member in _members(_unwrap(annotation)[0])]
    words = [_SEVERAL.get(m) or f"lists of {_describe_many(get_args(m)[0])}" for m in members]
    return " or ".join(words)


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


def _bounds(metadata: list[Any]) -> str:
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    found = [
        f"{word} {getattr(item, name):g}" for name, word in words.items() for item in metadata if hasattr(item, name)
    ]
    if not found:
        return ""
    return (" of " if found[0].startswith("at") else " ") + " and ".join(found)


def _either(words: list[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
