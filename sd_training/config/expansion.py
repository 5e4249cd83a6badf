"""How much a configuration grows when its interpolations are replaced, told before any of them is.

Thirty lines in which each names the one before twice stand for a billion copies of the first: OmegaConf would work on
them for ever. Here sizes are added up, each value once.
"""

import re
from typing import Any

from omegaconf import DictConfig, OmegaConf

MAX_REPLACEMENTS = 10_000
"""Interpolations that are replaced in all [count]; OmegaConf does some thousand per second."""
MAX_CHARACTERS = 64 * 2**20
"""Text of all values together, after replacing [characters]."""
_VALUE = 64
"""A value counts as so many characters besides its text: a million of them are a gigabyte of Python objects."""
_REFERENCE = re.compile(r"\$\{([^${}]*)\}")
_INDEX = re.compile(r"\[([^\[\]]*)\]")
_Path = tuple[str, ...]


def expansion_problem(tree: DictConfig) -> str | None:
    """Why this tree is not resolved; None where it may be.

    Raises:
        RecursionError: values are nested, or name one another, too deeply.
    """
    replacements, characters = _Sizes(OmegaConf.to_container(tree, resolve=False)).of(())
    if replacements > MAX_REPLACEMENTS:
        return f"interpolations multiply: {_count(replacements)} have to be replaced, at most {MAX_REPLACEMENTS:,} are"
    if characters > MAX_CHARACTERS:
        return f"interpolations make it {_count(characters)} characters long, at most {MAX_CHARACTERS:,} are read"
    return None


class _Sizes:
    """Replacements and characters below each path; a value that contains itself counts as nothing, resolving names it.

    Args:
        values: plain containers, not resolved.
    """

    def __init__(self, values: Any) -> None:
        self.values = values
        self._known: dict[_Path, tuple[int, int]] = {}

    def of(self, path: _Path) -> tuple[int, int]:
        """Of the value at `path` and everything below it."""
        return self._known[path] if path in self._known else self._of(path, self._at(path))

    def _of(self, path: _Path, value: Any) -> tuple[int, int]:
        if path not in self._known:
            self._known[path] = (0, 0)
            self._known[path] = self._measure(path, value)
        return self._known[path]

    def _measure(self, path: _Path, value: Any) -> tuple[int, int]:
        if isinstance(value, str):
            targets = [self.of(_target(path, name)) for name in _REFERENCE.findall(value)]
            own = (len(targets), _VALUE + len(value))
        else:
            entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
            targets = [self._of((*path, str(key)), entry) for key, entry in entries]
            own = (0, _VALUE)
        return own[0] + sum(t[0] for t in targets), own[1] + sum(t[1] for t in targets)

    def _at(self, path: _Path) -> Any:
        value = self.values
        for step in path:
            if isinstance(value, dict):
                value = value[step] if step in value else next((v for k, v in value.items() if str(k) == step), None)
            elif isinstance(value, list) and step.isdecimal() and len(step) < 10 and int(step) < len(value):
                value = value[int(step)]
            elif isinstance(value, str) and (found := _REFERENCE.fullmatch(value)):
                value = self._below(found[1], step)
            else:
                return None
        return value

    def _below(self, name: str, step: str) -> Any:
        """The value `step` of what `${name}` means."""
        return None if name.startswith(".") else self._at((*_target((), name), step))


def _target(path: _Path, name: str) -> _Path:
    """The path that `${name}` at `path` means; each dot in front goes up by one."""
    steps = tuple(step for step in _INDEX.sub(r".\1", name.strip()).split(".") if step)
    up = len(name.strip()) - len(name.strip().lstrip("."))
    return (*path[: max(0, len(path) - up)], *steps) if up else steps


def _count(number: int) -> str:
    return f"{number:,}" if number < 10**12 else "more than 10^12"
