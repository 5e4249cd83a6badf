"""Metadata filters on columns: no image is read, no text is evaluated."""

import operator
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from sd_training.config.filter_rules import Comparison, IsNull, Junction, Negation, OneOf, Rule, Value, long_integer
from sd_training.data.index_columns import NUMBER, TEXT

Mask = NDArray[np.bool_]
BUILT_IN = frozenset({"width", "height", "aspect_ratio", "caption_length"})
"""Fields of the index itself, where no metadata field has the name: pixels, width / height, and bytes."""
_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}


class Verdict(NamedTuple):
    """[N] each: a sample of which neither holds has no value to judge by."""

    passes: Mask
    fails: Mask


def evaluate(rule: Rule, columns: pa.Table, num_samples: int) -> Mask:
    """[N] bool: which samples pass.

    Args:
        rule: the filter.
        columns: of the index: `number:<field>`, `text:<field>`, and `width`, `height`, `caption_length`; a field
            without columns is missing everywhere.
        num_samples: N, also when there are no columns.
    """
    fields = {name: _Field(name, columns, num_samples) for name in rule.fields()}
    return _judge(rule, fields).passes


def _judge(rule: Rule, fields: dict[str, "_Field"]) -> Verdict:
    match rule:
        case Negation():
            passes, fails = _judge(rule.rule, fields)
            return Verdict(fails, passes)
        case Junction():
            return _join(rule, fields)
        case IsNull():
            present = fields[rule.field].present
            return Verdict(~present, present)
        case OneOf():
            return _within(fields[rule.field], rule.values)
        case Comparison():
            return _compare(rule, fields[rule.field])


def _join(rule: Junction, fields: dict[str, "_Field"]) -> Verdict:
    """One part after the other: a list of a thousand conditions needs no thousand masks."""
    passes, fails = _judge(rule.rules[0], fields)
    for part in rule.rules[1:]:
        other = _judge(part, fields)
        if rule.word == "and":
            passes, fails = passes & other.passes, fails | other.fails
        else:
            passes, fails = passes | other.passes, fails & other.fails
    return Verdict(passes, fails)


def _compare(rule: Comparison, field: "_Field") -> Verdict:
    if rule.operator in ("==", "!="):
        equal = _within(field, [rule.value])
        return equal if rule.operator == "==" else Verdict(equal.fails, equal.passes)
    passes = _OPERATORS[rule.operator](field.numbers, rule.value)
    return Verdict(passes, ~np.isnan(field.numbers) & ~passes)


def _within(field: "_Field", values: Sequence[Value]) -> Verdict:
    passes = field.is_one_of(values)
    return Verdict(passes, field.present & ~passes)


class _Field:
    """The values of one field, taken from the columns when they are first asked for."""

    def __init__(self, name: str, columns: pa.Table, n: int) -> None:
        self.name, self.columns, self.n = name, columns, n

    @cached_property
    def numbers(self) -> NDArray[np.float64]:
        """[N] with NaN where there is no number: every comparison is false for NaN."""
        return _numbers(self.name, self.columns, self.n)

    @cached_property
    def texts(self) -> pa.ChunkedArray | None:
        """[N], null where the value is not written as text; None where none is."""
        return self.columns[TEXT + self.name] if TEXT + self.name in self.columns.column_names else None

    @cached_property
    def present(self) -> Mask:
        """[N] where there is a value; NaN is none."""
        present: Mask = ~np.isnan(self.numbers)
        return present if self.texts is None else present | _mask(pc.is_valid(self.texts))

    def is_one_of(self, values: Sequence[Value]) -> Mask:
        """[N] where the value is any of `values`; numbers written as text are equal to the number."""
        numbers = [number for number in map(_as_number, values) if number is not None]
        found: Mask = np.isin(self.numbers, np.array(numbers, dtype=np.float64))
        texts = [spelling for value in values if isinstance(value, str) for spelling in _spellings(value)]
        if texts and self.texts is not None:
            found = found | _mask(pc.is_in(self.texts, value_set=pa.array(texts, self.texts.type)))
        return found


def _spellings(value: str) -> set[str]:
    """Tables have true and false in other cases too: pandas writes True."""
    is_truth = value.lower() in ("true", "false")
    return {value, value.lower(), value.upper(), value.title()} if is_truth else {value}


def _mask(answers: pa.ChunkedArray) -> Mask:
    return np.asarray(answers.to_numpy(), dtype=np.bool_)


def _numbers(name: str, columns: pa.Table, n: int) -> NDArray[np.float64]:
    names = columns.column_names
    if NUMBER + name in names:
        return np.asarray(columns[NUMBER + name].to_numpy(), dtype=np.float64)
    if TEXT + name in names or name not in BUILT_IN or not BUILT_IN - {"aspect_ratio"} <= set(names):
        return np.full(n, np.nan)
    if name == "aspect_ratio":
        return _known(columns, "width", 1) / _known(columns, "height", 1)
    return _known(columns, name, 0 if name == "caption_length" else 1)


def _known(columns: pa.Table, name: str, least: int) -> NDArray[np.float64]:
    values = np.asarray(columns[name].to_numpy(), dtype=np.float64)
    return np.where(values >= least, values, np.nan)


def _as_number(value: Value) -> float | None:
    """The number that a text is; a long integer is none, and compared as text. `float` would also read 1_000 and digits
    of other scripts; the index does not."""
    if isinstance(value, str) and (not value.isascii() or "_" in value or long_integer(value)):
        return None
    try:
        return float(value)
    except ValueError:
        return None
