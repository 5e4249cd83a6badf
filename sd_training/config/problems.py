"""A configuration problem and the words it is told in: option, value, what is allowed."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from sd_training.config.fields import SECRETS, Option, accepts, groups, options, words_of
from sd_training.config.suggest import elsewhere, suggest, suggest_value

COMMAND_LINE = "command line"
"""Where an option was set, when no file set it."""
_SHOWN_CHARACTERS = 80


@dataclass(frozen=True)
class Problem:
    """What is wrong with one option or source."""

    key: str
    """Dotted option, or the file or argument."""
    text: str
    is_option: bool = True
    """False when `key` is a file or an argument that was not understood."""

    def __str__(self) -> str:
        return f"{self.key}: {self.text}"


def shown(value: Any, key: str = "") -> str:
    """A value as it would stand in YAML, shortened; values of secret options are not shown."""
    if key in SECRETS:
        return "(hidden)"
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 3]}..."


def where(key: str, origins: dict[str, str]) -> str:
    """The file and line (or the command line) that set a key, in brackets; empty when unknown."""
    while key and key not in origins:
        key = key.rpartition(".")[0]
    return f" ({origins[key]})" if key else ""


def unknown_key(key: str, origins: dict[str, str]) -> Problem:
    """A key that nothing reads, with what it is called here, or else the nearest known one."""
    near = elsewhere(key) or suggest(key, [*options(), *groups()])
    hint = f"; did you mean {near}?" if near else "; docs/config.md lists every option"
    return Problem(key, f"unknown option{where(key, origins)}{hint}")


def not_a_group(key: str, value: Any, origins: dict[str, str]) -> Problem:
    """A single value where options are expected."""
    members = [name for name in (*options(), *groups()) if name.rpartition(".")[0] == key]
    return Problem(key, f"is {shown(value)}{where(key, origins)}, but it is a group of options such as {members[0]}")


def required(option: Option, source: str = "") -> Problem:
    """An option without which there is no run."""
    taken = f"; it is taken from {source}, which has no value" if source else ""
    return Problem(option.key, f"is required{taken} ({option.allowed}): {option.doc}")


def wrong_values(error: ValidationError, values: dict[str, Any], origins: dict[str, str]) -> list[Problem]:
    """One problem for each wrong value, in plain words.

    Pydantic reports every branch of a union; the option's own description says it once.
    """
    found: dict[str, tuple[Option, Any]] = {}
    for item in error.errors(include_url=False):
        path, value = _locate(item["loc"], values)
        option = _option_of(path)
        if option is not None:
            found[path] = (option, value)
    deepest = [path for path in found if not any(other.startswith(f"{path}.") for other in found)]
    return [_wrong_value(path, *found[path], origins) for path in deepest]


def _wrong_value(path: str, option: Option, value: Any, origins: dict[str, str]) -> Problem:
    quotable = isinstance(value, (int, float)) and accepts(option.annotation, str)
    hint = "; put it in quotes to make it a text" if quotable else ""
    if value is None and option.key == "dataset.params.filters":
        hint = f"; quote it on the command line ('{path}=>=512'), or the shell takes > as a redirection"
    if isinstance(value, (str, int)) and (near := suggest_value(str(value), words_of(option.annotation))):
        hint = f"; did you mean {near}?"
    allowed = option.allowed if path == option.key else f"{option.allowed} for {option.key}"
    return Problem(path, f"is {shown(value, option.key)}{where(path, origins)}; allowed: {allowed}{hint}")


def _locate(location: Iterable[int | str], values: Any) -> tuple[str, Any]:
    """The part of pydantic's location that exists in the values: it also names union branches."""
    path: list[str] = []
    for step in location:
        if isinstance(values, dict):
            step = next((key for key in values if str(key) == str(step)), step)
        if not (isinstance(values, dict) and step in values) and not _is_index(step, values):
            continue
        values = values[step]
        path.append(str(step))
    return ".".join(path), values


def _is_index(step: Any, values: Any) -> bool:
    return isinstance(values, list) and isinstance(step, int) and step < len(values)


def _option_of(path: str) -> Option | None:
    while path and path not in options():
        path = path.rpartition(".")[0]
    return options().get(path)


def is_below(key: str, groups_or_options: Iterable[str]) -> bool:
    """Whether a dotted key is one of these or stands inside one of them."""
    return any(key == other or key.startswith(f"{other}.") for other in groups_or_options)


def mentions(text: str, keys: Sequence[str]) -> bool:
    """Whether a sentence is about one of these options, or about a group above or below one of them."""
    words = {word.strip(".,:;()'\"`") for word in text.replace("=", " ").split()}
    about = text.split(maxsplit=1)[0].rstrip(":")
    return is_below(about, keys) or any(key in words or is_below(key, [about]) for key in keys)
