"""Cells of Arrow tables as images, captions and metadata: Parquet files and saved datasets."""

import numpy as np
import pyarrow as pa

from sd_training.errors import DataError


def is_metadata(kind: pa.DataType) -> bool:
    """Whether values of this type can be metadata or captions."""
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        kind = kind.value_type
        return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    return bool(is_number or pa.types.is_string(kind) or pa.types.is_large_string(kind))


def image_cells(table: str, name: str, column: pa.Array) -> list[tuple[pa.Buffer | None, str | None]]:
    """Content, as a view of the file, and path of each cell."""
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    kind, nothing = column.type, [None] * len(column)
    if pa.types.is_struct(kind):
        parts = dict(zip((field.name for field in kind), column.flatten(), strict=True))
        if parts.keys() & {"bytes", "path"}:
            contents = _views(parts["bytes"]) if "bytes" in parts else nothing
            return list(zip(contents, parts["path"].to_pylist() if "path" in parts else nothing, strict=True))
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return list(zip(_views(column), nothing, strict=True))
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return list(zip(nothing, column.to_pylist(), strict=True))
    raise DataError(
        f"dataset.params.image_column: column '{name}' of {table} is {kind}; it must hold image files (Image or "
        "binary) or paths"
    )


def _views(column: pa.Array) -> list[pa.Buffer | None]:
    """The values of a binary column without copying them, as taking a scalar does."""
    _, places, data = column.buffers()
    if data is None:
        return [None] * len(column)
    kind = np.int64 if pa.types.is_large_binary(column.type) else np.int32
    ends = np.frombuffer(places, kind)[column.offset : column.offset + len(column) + 1].tolist()
    is_there = column.is_valid().to_pylist()
    return [data.slice(ends[i], ends[i + 1] - ends[i]) if is_there[i] else None for i in range(len(column))]
