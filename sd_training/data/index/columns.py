"""Metadata of samples as index columns that filters and captions read.

A field `f` becomes `number:f` (float64, null where it is no number) and, where some value was written as text,
`text:f`. Numbers stored as text compare as numbers; true and false are the words, and 1 and 0.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence

import pyarrow as pa

from sd_training.config.filters import EXACT_INTEGERS

NUMBER, TEXT = "number:", "text:"
_NUMBER = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*", re.ASCII)

Scalar = str | float


def field_names(column_names: Sequence[str]) -> frozenset[str]:
    """The metadata fields among index columns."""
    return frozenset(name.partition(":")[2] for name in column_names if name.startswith((NUMBER, TEXT)))


def metadata_columns(rows: Sequence[Mapping[str, Scalar]]) -> dict[str, pa.Array]:
    """The columns of per-sample metadata."""
    columns: dict[str, pa.Array] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row.get(name) for row in rows]
        texts = [value if isinstance(value, str) else None for value in values]
        columns[NUMBER + name] = pa.array([_number(value) for value in values], pa.float64())
        if any(text is not None for text in texts):
            columns[TEXT + name] = pa.array(texts, pa.large_string())
    return columns


def _number(value: Scalar | None) -> float | None:
    if not isinstance(value, str):
        return value
    if len(value) <= 5 and value.lower() in ("true", "false"):  # pandas writes True
        return float(value.lower() == "true")
    if not _NUMBER.fullmatch(value):
        return None
    number = float(value)
    return number if math.isfinite(number) else None


def read_metadata(text: str) -> dict[str, Scalar]:
    """Values of a JSON object: numbers, texts, true and false; a list of texts stays a JSON text, for captions.

    Null, NaN, other lists and objects are left out, as a missing value is.

    Raises:
        ValueError: not JSON, or not an object.
    """
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("not an object")
    return read_scalars(value)


def read_scalars(value: Mapping[str, object]) -> dict[str, Scalar]:
    """As `read_metadata`, from values that are read already."""
    scalars = ((storable(str(name)), _scalar(entry)) for name, entry in value.items())
    return {name: scalar for name, scalar in scalars if scalar is not None}


def _scalar(value: object) -> Scalar | None:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return storable(value)
    if isinstance(value, list) and value and all(isinstance(entry, str) for entry in value):
        return storable(json.dumps(value, ensure_ascii=False))
    if not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    if isinstance(value, int) and abs(value) >= EXACT_INTEGERS:  # identifiers stay apart
        return str(value)
    return number if math.isfinite(number) else None


def storable(name: str) -> str:
    """Text that is not UTF-8 comes with surrogates, which parquet and JSON cannot store."""
    return name.encode("utf-8", "backslashreplace").decode("utf-8")


def captions_in(text: str | None) -> list[str]:
    """The captions of a stored text: the entries of a JSON list of texts, else the text; without the empty ones."""
    text = (text or "").strip()
    entries = [text]
    if text.startswith("[") and text.endswith("]"):
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, list) and all(isinstance(entry, str) for entry in value):
            entries = [entry.strip() for entry in value]
    return [entry for entry in entries if entry]
