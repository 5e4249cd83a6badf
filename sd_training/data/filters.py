"""Metadata filters on columns: no image is read, no text is evaluated."""

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from sd_training.config.filter_rules import Comparison, IsNull, Junction, Negation, OneOf, Rule, Value
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
    return _judge(rule, columns, num_samples).passes


def _judge(rule: Rule, columns: pa.Table, n: int) -> Verdict:
    match rule:
        case Negation():
            passes, fails = _judge(rule.rule, columns, n)
            return Verdict(fails, passes)
        case Junction():
            verdicts = [_judge(part, columns, n) for part in rule.rules]
            every, some = (np.logical_and, np.logical_or) if rule.word == "and" else (np.logical_or, np.logical_and)
            return Verdict(every.reduce([v.passes for v in verdicts]), some.reduce([v.fails for v in verdicts]))
        case IsNull():
            present = _Field(rule.field, columns, n).present()
            return Verdict(~present, present)
        case OneOf():
            field = _Field(rule.field, columns, n)
            passes = np.logical_or.reduce([field.equals(value) for value in rule.values])
            return Verdict(passes, field.present() & ~passes)
        case Comparison():
            return _compare(rule, _Field(rule.field, columns, n))


def _compare(rule: Comparison, field: "_Field") -> Verdict:
    if rule.operator in ("==", "!="):
        equal = field.equals(rule.value)
        verdict = Verdict(equal, field.present() & ~equal)
        return verdict if rule.operator == "==" else Verdict(verdict.fails, verdict.passes)
    passes = _OPERATORS[rule.operator](field.numbers, rule.value)
    return Verdict(passes, ~np.isnan(field.numbers) & ~passes)


class _Field:
    """The values of one field."""

    def __init__(self, name: str, columns: pa.Table, n: int) -> None:
        self.numbers, self.texts = _numbers(name, columns, n), _texts(name, columns, n)

    def present(self) -> Mask:
        """Where there is a value; NaN is none."""
        present: Mask = ~np.isnan(self.numbers)
        return present if self.texts is None else present | pc.is_valid(self.texts).to_numpy(zero_copy_only=False)

    def equals(self, value: Value) -> Mask:
        """Numbers written as text are equal to the number."""
        number = _as_number(value) if isinstance(value, str) else value
        equal: Mask = np.zeros(len(self.numbers), dtype=np.bool_) if number is None else self.numbers == number
        if isinstance(value, str) and self.texts is not None:
            equal = equal | pc.fill_null(pc.equal(self.texts, value), False).to_numpy(zero_copy_only=False)
        return equal


def _numbers(name: str, columns: pa.Table, n: int) -> NDArray[np.float64]:
    """[N] with NaN where there is no number: every comparison is false for NaN."""
    names = columns.column_names
    if NUMBER + name in names:
        return np.asarray(columns[NUMBER + name].to_numpy(), dtype=np.float64)
    if TEXT + name in names or name not in BUILT_IN or not BUILT_IN - {"aspect_ratio"} <= set(names):
        return np.full(n, np.nan)
    if name == "aspect_ratio":
        with np.errstate(divide="ignore", invalid="ignore"):
            return _known(columns, "width", 1) / _known(columns, "height", 1)
    return _known(columns, name, 0 if name == "caption_length" else 1)


def _known(columns: pa.Table, name: str, least: int) -> NDArray[np.float64]:
    values = np.asarray(columns[name].to_numpy(), dtype=np.float64)
    return np.where(values >= least, values, np.nan)


def _texts(name: str, columns: pa.Table, n: int) -> pa.Array | None:
    return columns[TEXT + name].combine_chunks() if TEXT + name in columns.column_names else None


def _as_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
