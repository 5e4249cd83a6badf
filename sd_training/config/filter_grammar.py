"""Metadata filters are read by this small grammar and never evaluated as code.

A filter is a number or a text (equality), or an operator followed by a number (`>=512`), or `==`/`!=` followed by a
text: a bare word or anything in quotes (`!=en`, `=="two words"`). The comparing is done in `data/filters.py`: numbers
stored as text compare as numbers, and a null, missing or NaN value drops the sample.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast

Operator = Literal[">=", "<=", ">", "<", "==", "!="]

GRAMMAR = "a number, a word, >= <= > < == or != and a number (>=512), or == or != and a word or quoted text (==en)"

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_OPERATOR = re.compile(r"(>=|<=|==|!=|>|<)\s*(.*)", re.DOTALL)
_QUOTED = re.compile(r"\"([^\"\\]*)\"|'([^'\\]*)'")
_WORD = re.compile(r"[^\W\d_][\w.:/+-]*")
_RESERVED = frozenset({"and", "or", "not", "in", "is", "null", "none", "nan", "inf", "infinity"})


@dataclass(frozen=True)
class Comparison:
    """`field operator value`, for example `original_width >= 512.0`."""

    field: str
    operator: Operator
    value: float | str

    def __str__(self) -> str:
        value = f"{self.value:.15g}" if isinstance(self.value, float) else f'"{self.value}"'
        return f"{self.field} {self.operator} {value}"


def parse_filters(filters: Mapping[str, str | int | float] | None) -> tuple[list[Comparison], list[str]]:
    """Reads `dataset.params.filters`.

    Args:
        filters: metadata field → filter as written by the user; None means no filter.

    Returns:
        The comparisons that could be read, and one sentence per filter that could not.
    """
    comparisons, problems = [], []
    for field, written in (filters or {}).items():
        parsed = _parse(field, written)
        if parsed is None:
            problems.append(_problem(field, written))
        else:
            comparisons.append(parsed)
    return comparisons, problems


def _problem(field: str, written: object) -> str:
    shown = repr(written)
    shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
    return f"dataset.params.filters.{field}: {shown} is not a filter; write {GRAMMAR}"


def _parse(field: str, written: object) -> Comparison | None:
    if isinstance(written, bool) or not isinstance(written, (int, float, str)):
        return None
    if not isinstance(written, str):
        return Comparison(field, "==", float(written)) if math.isfinite(written) else None
    text = written.strip()
    match = _OPERATOR.fullmatch(text)
    operator, operand = (match[1], match[2].strip()) if match else ("==", text)
    value = _value(operand)
    if value is None or (isinstance(value, str) and operator not in ("==", "!=")):
        return None
    return Comparison(field, cast(Operator, operator), value)


def _value(text: str) -> float | str | None:
    """A number, a quoted text (which may be empty), or one bare word without anything that looks like code."""
    if _NUMBER.fullmatch(text):
        number = float(text)
        return number if math.isfinite(number) else None
    if quoted := _QUOTED.fullmatch(text):
        return quoted[1] if quoted[1] is not None else quoted[2]
    return text if _WORD.fullmatch(text) and text.lower() not in _RESERVED else None
