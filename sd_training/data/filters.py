"""Metadata filters as pyarrow expressions over the columns of the index: no image is read.

Logic has three values (Kleene 1938), as Arrow's `and_kleene` and its siblings have: a comparison with a null, missing
or NaN value is null, `not` leaves it null, and a sample passes only where the whole filter is true.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from sd_training.config.filters import Filter, Value, long_integer
from sd_training.data.index_columns import NUMBER, TEXT

Mask = NDArray[np.bool_]
BUILT_IN = frozenset({"width", "height", "aspect_ratio", "caption_length"})
"""Fields of the index itself, where no metadata field has the name: pixels, width / height, and bytes."""
_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}


def evaluate(condition: Filter, columns: pa.Table, num_samples: int) -> Mask:
    """[N] bool: which samples pass.

    Args:
        condition: the filter.
        columns: of the index: `number:<field>`, `text:<field>`, and `width`, `height`, `caption_length`; a field
            without columns is missing everywhere.
        num_samples: N, also when there are no columns.
    """
    from pyarrow import acero  # imports pyarrow.dataset, which runs without filters need not load

    columns = columns.select([name for name in columns.column_names if _is_read(name, condition.fields())])
    if not columns.num_columns:  # a table without columns has no rows
        columns = pa.table({"rows": pa.nulls(num_samples)})
    passes = pc.coalesce(_expression(condition, columns), pc.scalar(False))
    table = acero.Declaration.from_sequence(
        [
            acero.Declaration("table_source", acero.TableSourceNodeOptions(columns)),
            acero.Declaration("project", acero.ProjectNodeOptions([passes], ["passes"])),
        ]
    ).to_table(use_threads=False)  # threads would not keep the order of rows
    return np.asarray(table["passes"].to_numpy(), dtype=np.bool_)


def _is_read(column: str, fields: set[str]) -> bool:
    return column in ("width", "height", "caption_length") or column.removeprefix(NUMBER).removeprefix(TEXT) in fields


def _expression(node: Filter, columns: pa.Table) -> pc.Expression:
    """True, false or null for every row."""
    if node.parts:
        parts = [_expression(part, columns) for part in node.parts]
        return ~parts[0] if node.operator == "not" else _balanced(node.operator, parts)
    number, text = _number(node.field, columns), _text(node.field, columns)
    is_present = number.is_valid() if text is None else number.is_valid() | text.is_valid()
    if node.operator == "null":
        return ~is_present
    if node.operator in _COMPARISONS:
        return _COMPARISONS[node.operator](number, node.values[0])
    found = _is_one_of(number, text, node.values, columns, node.field)
    return pc.if_else(is_present, ~found if node.operator == "!=" else found, _null(pa.bool_()))


def _null(kind: pa.DataType) -> pc.Expression:
    """Not a constant of the module: making one imports pandas where it is installed, in every loader process."""
    return pc.scalar(pa.scalar(None, kind))


def _balanced(word: str, parts: Sequence[pc.Expression]) -> pc.Expression:
    """A balanced tree: Arrow recurses over the depth of an expression, and a filter may have thousands of parts."""
    if len(parts) == 1:
        return parts[0]
    half = len(parts) // 2
    left, right = _balanced(word, parts[:half]), _balanced(word, parts[half:])
    return left & right if word == "and" else left | right


def _number(field: str, columns: pa.Table) -> pc.Expression:
    """The field's number; null where it has none."""
    names = set(columns.column_names)
    if NUMBER + field in names:
        value = pc.field(NUMBER + field)
        return pc.if_else(pc.is_nan(value), _null(pa.float64()), value)
    if TEXT + field in names or field not in BUILT_IN or not BUILT_IN - {"aspect_ratio"} <= names:
        return _null(pa.float64())
    if field == "aspect_ratio":
        return _known("width", 1) / _known("height", 1)
    return _known(field, 0 if field == "caption_length" else 1)


def _known(column: str, least: int) -> pc.Expression:
    """A column of the index; smaller numbers mean that the value is not known."""
    value = pc.field(column).cast(pa.float64())
    return pc.if_else(value >= least, value, _null(pa.float64()))


def _text(field: str, columns: pa.Table) -> pc.Expression | None:
    """The field's text, null where the value was not written as text; None where no value was."""
    return pc.field(TEXT + field) if TEXT + field in columns.column_names else None


def _is_one_of(
    number: pc.Expression, text: pc.Expression | None, values: Sequence[Value], columns: pa.Table, field: str
) -> pc.Expression:
    """Never null. Numbers written as text are equal to the number."""
    numbers = [found for found in map(_as_number, values) if found is not None]
    is_number = number.isin(pa.array(numbers, pa.float64()))
    texts = [spelling for value in values if isinstance(value, str) for spelling in _spellings(value)]
    if text is None or not texts:
        return is_number
    return is_number | text.isin(pa.array(texts, columns.schema.field(TEXT + field).type))


def _spellings(value: str) -> set[str]:
    """Tables have true and false in other cases too: pandas writes True."""
    is_truth = value.lower() in ("true", "false")
    return {value, value.lower(), value.upper(), value.title()} if is_truth else {value}


def _as_number(value: Value) -> float | None:
    """The number that a text is. A long integer is none and is compared as text; neither are `1_000` and digits of
    other scripts, which `float` would read and the index does not."""
    if isinstance(value, str) and (not value.isascii() or "_" in value or long_integer(value)):
        return None
    try:
        return float(value)
    except ValueError:
        return None
