"""What a metadata filter means: a tree of comparisons, evaluated on columns in `data/filters.py`.

Logic has three values (Kleene 1938): a comparison with a null, missing or NaN value is neither true nor false, `not`
leaves it so, and a sample passes only when the whole rule is true. So such a value drops its sample unless the rule
asks for it (`null`) or another side of an `or` holds.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Operator = Literal[">=", "<=", ">", "<", "==", "!="]
Value = float | str
RESERVED = frozenset({"and", "or", "not", "in", "is", "null", "none", "nan", "inf", "infinity"})
"""Words of the grammar: as a text or a field's name they stand in quotes."""
EXACT_INTEGERS = 2**53
"""From here on not every integer is a float."""
_MAX_DIGITS = 300
"""Of an integer: more make no finite number."""
_BARE = re.compile(r"[A-Za-z_]\w*(\.\w+)*", re.ASCII)


@dataclass(frozen=True)
class Comparison:
    """`field operator value`, for example `original_width >= 512`."""

    field: str
    operator: Operator
    value: Value

    def __str__(self) -> str:
        return f"{_shown_field(self.field)} {self.operator} {_shown(self.value)}"

    def fields(self) -> set[str]:
        """The metadata fields that are read."""
        return {self.field}


@dataclass(frozen=True)
class OneOf:
    """`field in [values]`."""

    field: str
    values: tuple[Value, ...]

    def __str__(self) -> str:
        return f"{_shown_field(self.field)} in [{', '.join(map(_shown, self.values))}]"

    def fields(self) -> set[str]:
        """The metadata fields that are read."""
        return {self.field}


@dataclass(frozen=True)
class IsNull:
    """Whether a value is null or missing; never unknown."""

    field: str

    def __str__(self) -> str:
        return f"{_shown_field(self.field)} null"

    def fields(self) -> set[str]:
        """The metadata fields that are read."""
        return {self.field}


@dataclass(frozen=True)
class Negation:
    """`not rule`."""

    rule: "Rule"

    def __str__(self) -> str:
        return f"not ({self.rule})"

    def fields(self) -> set[str]:
        """The metadata fields that are read."""
        return self.rule.fields()


@dataclass(frozen=True)
class Junction:
    """`rule and rule and …`, or with `or`."""

    word: Literal["and", "or"]
    rules: tuple["Rule", ...]

    def __str__(self) -> str:
        return f" {self.word} ".join(self._parts())

    def _parts(self) -> Iterator[str]:
        for rule in self.rules:
            yield f"({rule})" if isinstance(rule, Junction) and rule.word != self.word else str(rule)

    def fields(self) -> set[str]:
        """The metadata fields that are read."""
        return set().union(*(rule.fields() for rule in self.rules))


Rule = Comparison | OneOf | IsNull | Negation | Junction


def long_integer(number: str) -> str | None:
    """An integer that floats would take for its neighbours, as text, by which it is compared; None for other texts."""
    digits = number[1:] if number[:1] in ("+", "-") else number
    if not (digits.isascii() and digits.isdecimal()) or len(digits) > _MAX_DIGITS or int(digits) < EXACT_INTEGERS:
        return None
    return str(int(number))


def _shown(value: Value) -> str:
    if isinstance(value, str):
        return f"'{value}'" if '"' in value else f'"{value}"'
    short = f"{value:.15g}"
    return short if float(short) == value else repr(value)


def _shown_field(name: str) -> str:
    return name if _BARE.fullmatch(name) and name not in RESERVED else f"`{name}`"
