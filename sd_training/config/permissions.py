"""Permissions that only the person at the command line can give: a configuration file may come from elsewhere."""

from collections.abc import Iterator, Mapping
from typing import Any

from sd_training.config.problems import COMMAND_LINE, Problem, shown, where

PERMISSIONS = ("allow_pipe",)
"""Names of options that a file cannot set to true."""


def not_permitted(values: Any, origins: Mapping[str, str]) -> list[Problem]:
    """One problem per permission that a file gives.

    Asked twice: for the content of each file, whose merge keys hide where a value stands, and for what all sources
    together say, where a value may have come from another option.

    Args:
        values: containers.
        origins: dotted key → where it was set.
    """
    dotted = plain_keys(origins)
    found = []
    for path, value in _permissions(values, ""):
        origin = where(path, dotted)
        if value is not False and value is not None and origin != f" ({COMMAND_LINE})":
            text = f"is {shown(value)}{origin}; this permission is given on the command line only ({path}=true)"
            found.append(Problem(path, text))
    return found


def plain_keys(origins: Mapping[str, str]) -> dict[str, str]:
    """The same with `mix[0].params` written as `mix.0.params`."""
    return {key.replace("[", ".").replace("]", ""): origin for key, origin in origins.items()}


def without_permissions(holder: Any) -> Any:
    """A copy in which no option of that name stands: what is written to a file."""
    if isinstance(holder, Mapping):
        return {key: without_permissions(value) for key, value in holder.items() if key not in PERMISSIONS}
    return [without_permissions(value) for value in holder] if isinstance(holder, list) else holder


def _permissions(holder: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Every value of a permission, wherever it stands."""
    entries = holder.items() if isinstance(holder, Mapping) else enumerate(holder) if isinstance(holder, list) else ()
    for key, value in entries:
        if key in PERMISSIONS:
            yield f"{prefix}{key}", value
        else:
            yield from _permissions(value, f"{prefix}{key}.")
