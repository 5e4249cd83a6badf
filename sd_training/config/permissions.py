"""Permissions that only the person at the command line can give: a configuration file may come from elsewhere."""

from collections.abc import Iterator, Mapping
from typing import Any

from sd_training.config.problems import Problem, where
from sd_training.config.sources import COMMAND_LINE

PERMISSIONS = ("allow_pipe",)
"""Names of options that a file cannot set to true."""


def not_permitted(values: Mapping[str, Any], origins: Mapping[str, str]) -> list[Problem]:
    """One problem per permission that a file gives.

    Args:
        values: fitted containers.
        origins: dotted key → where it was set.
    """
    dotted = {key.replace("[", ".").replace("]", ""): origin for key, origin in origins.items()}
    found = []
    for path, value in _permissions(values, ""):
        origin = where(path, dotted)
        if value is not False and value is not None and origin != f" ({COMMAND_LINE})":
            text = f"is true{origin}; this permission is given on the command line only ({path}=true)"
            found.append(Problem(path, text))
    return found


def _permissions(holder: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Every value of a permission, wherever it stands."""
    entries = holder.items() if isinstance(holder, Mapping) else enumerate(holder) if isinstance(holder, list) else ()
    for key, value in entries:
        if key in PERMISSIONS:
            yield f"{prefix}{key}", value
        else:
            yield from _permissions(value, f"{prefix}{key}.")
