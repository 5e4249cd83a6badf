"""Plain containers laid over the schema: unknown keys out, unset options left to their defaults."""

from dataclasses import dataclass, field
from typing import Any

from sd_training.config.fields import accepts, group_fields, is_group, options
from sd_training.config.interpolation import MISSING
from sd_training.config.problems import Problem, not_a_group, required, unknown_key
from sd_training.config.schema import Config


@dataclass
class Fitted:
    """Values of known options only."""

    values: dict[str, Any]
    problems: list[Problem] = field(default_factory=list)
    missing: list[Problem] = field(default_factory=list)
    """Required options without a value; apart, because they say nothing when a file could not be read."""


def fit(values: dict[Any, Any], origins: dict[str, str], sources: dict[str, str]) -> Fitted:
    """Keeps what the schema knows.

    Args:
        values: resolved containers; `???` marks a missing value.
        origins: dotted key → where it was set, for messages.
        sources: missing option → the interpolation it was to come from.
    """
    result = Fitted({})
    result.values = _fit_group(values, Config, "", origins, result)
    given = {key for key in options() if _has(result.values, key)}
    result.missing += [required(o, sources.get(k, "")) for k, o in options().items() if o.required and k not in given]
    return result


def _fit_group(values: Any, group: type, prefix: str, origins: dict[str, str], result: Fitted) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    fields = group_fields(group)
    for key, value in values.items():
        path = f"{prefix}{key}"
        if key not in fields:
            result.problems.append(unknown_key(_only_leaf(path, value), origins))
        elif is_group(annotation := fields[key].annotation):
            if isinstance(value, dict):
                assert isinstance(annotation, type), "is_group says so"
                kept[key] = _fit_group(value, annotation, f"{path}.", origins, result)
            elif value is not None and value != MISSING:  # A group with nothing but comments is null in YAML.
                result.problems.append(not_a_group(path, value, origins))
        elif value != MISSING and not _is_empty_container(path, value):
            result.missing += _holes(path, value)
            kept[key] = value
    return kept


def _is_empty_container(path: str, value: Any) -> bool:
    """`params:` with nothing but comments below it is null in YAML, and means its empty default."""
    option = options()[path]
    return value is None and isinstance(option.default, (dict, list)) and not accepts(option.annotation, type(None))


def _only_leaf(path: str, value: Any) -> str:
    """The whole dotted name of a misspelt key, where it holds a single value."""
    while isinstance(value, dict) and len(value) == 1:
        [(key, value)] = value.items()
        path = f"{path}.{key}"
    return path


def _holes(path: str, value: Any) -> list[Problem]:
    """`???` inside a free mapping or list has no default."""
    if isinstance(value, str):
        return [Problem(path, "is required (it is ???)")] if value == MISSING else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [problem for key, item in items for problem in _holes(f"{path}.{key}", item)]


def _has(values: dict[str, Any], key: str) -> bool:
    node: Any = values
    for step in key.split("."):
        if not isinstance(node, dict) or step not in node:
            return False
        node = node[step]
    return True
