"""Metadata filters on columns: no image is read, no text is evaluated."""

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from sd_training.config.filter_grammar import Comparison
from sd_training.data.index_file import NUMBER, TEXT

Mask = NDArray[np.bool_]
_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
    "==": operator.eq,
    "!=": operator.ne,
}


def evaluate(comparison: Comparison, metadata: pa.Table, num_samples: int) -> Mask:
    """[N] bool: which samples pass; one whose value is null, missing or NaN fails.

    Args:
        metadata: columns `number:<field>` and `text:<field>`; a field without columns is missing everywhere.
        num_samples: N, also when `metadata` has no columns.
    """
    numbers = _numbers(comparison.field, metadata, num_samples)
    texts = _texts(comparison.field, metadata, num_samples)
    if isinstance(comparison.value, str):
        equal = pc.fill_null(pc.equal(texts, comparison.value), False).to_numpy(zero_copy_only=False)
        if (number := _as_number(comparison.value)) is not None:
            equal = equal | (numbers == number)
        return np.asarray(equal if comparison.operator == "==" else ~equal & _present(numbers, texts))
    passed: Mask = _OPERATORS[comparison.operator](numbers, comparison.value)
    return passed & _present(numbers, texts) if comparison.operator == "!=" else passed


def _numbers(field: str, metadata: pa.Table, num_samples: int) -> NDArray[np.float64]:
    """[N] with NaN where there is no number: every comparison but `!=` is false for NaN."""
    if NUMBER + field not in metadata.column_names:
        return np.full(num_samples, np.nan)
    return np.asarray(metadata[NUMBER + field].to_numpy(), dtype=np.float64)


def _texts(field: str, metadata: pa.Table, num_samples: int) -> pa.Array:
    if TEXT + field not in metadata.column_names:
        return pa.nulls(num_samples, pa.string())
    return metadata[TEXT + field].combine_chunks()


def _present(numbers: NDArray[np.float64], texts: pa.Array) -> Mask:
    present: Mask = ~np.isnan(numbers) | pc.is_valid(texts).to_numpy(zero_copy_only=False)
    return present


def _as_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
