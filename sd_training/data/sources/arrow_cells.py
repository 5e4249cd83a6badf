"""Cells of Arrow tables as images, captions and metadata: Parquet files and saved datasets.

Which column of a table holds the image and which the caption: as named, else by usual names.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from sd_training.errors import ConfigError, DataError

MAX_TEXT_BYTES = 1 << 20
"""Longest caption or metadata text of a row, as an average over the rows that are read at once [bytes]."""


def is_metadata(kind: pa.DataType) -> bool:
    """Whether values of this type can be metadata or captions."""
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        kind = kind.value_type
        return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    return bool(is_number or pa.types.is_string(kind) or pa.types.is_large_string(kind))


def plain_type(kind: pa.DataType) -> pa.DataType:
    """The type that holds the same values without dictionaries (pandas' categories), views and decimals."""
    if pa.types.is_dictionary(kind):
        return plain_type(kind.value_type)
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(plain_type(field.type)) for field in kind])
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(plain_type(kind.value_type)))
    if pa.types.is_null(kind):  # what pandas writes where no row has bytes
        return pa.binary()
    if kind == pa.string_view():
        return pa.large_string()
    if kind == pa.binary_view():
        return pa.large_binary()
    return pa.float64() if pa.types.is_decimal(kind) else kind


def plain(column: pa.Array) -> pa.Array:
    """The column in its plain type, with texts that are UTF-8: Arrow does not check what is written as text."""
    kind = plain_type(column.type)
    column = column if kind == column.type else column.cast(kind)
    if not pa.types.is_string(kind) and not pa.types.is_large_string(kind):
        return column
    try:
        column.validate(full=True)
    except pa.ArrowInvalid:
        texts = column.cast(pa.large_binary()).to_pylist()
        return pa.array([None if text is None else text.decode("utf-8", "replace") for text in texts], kind)
    return column


def without_long_texts(batch: pa.RecordBatch) -> tuple[pa.RecordBatch, list[str]]:
    """The batch with the columns nulled that hold more than `MAX_TEXT_BYTES` per row, and their names: as Python
    objects a few bytes of a packed file would fill the memory."""
    most = MAX_TEXT_BYTES * max(1, batch.num_rows)
    long = [name for name, column in zip(batch.schema.names, batch.columns, strict=True) if column.nbytes > most]
    for name in long:
        place = batch.schema.get_field_index(name)
        batch = batch.set_column(place, name, pa.nulls(batch.num_rows, batch.column(place).type))
    return batch, long


def check_caption(table: str, field: pa.Field) -> None:
    """Refuses a caption column that holds no texts.

    Raises:
        ConfigError: naming the column and its type.
    """
    kind = plain_type(field.type)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        kind = kind.value_type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_null(field.type)):
        raise ConfigError(
            f"dataset.params.caption_column: column '{field.name}' of {table} is {field.type}; it must hold texts or "
            "lists of texts"
        )


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
    if pa.types.is_null(column.type):
        return [None] * len(column)
    _, places, data = column.buffers()
    if data is None:
        return [None] * len(column)
    kind = np.int64 if pa.types.is_large_binary(column.type) else np.int32
    ends = np.frombuffer(places, kind)[column.offset : column.offset + len(column) + 1].tolist()
    is_there = column.is_valid().to_pylist()
    return [data.slice(ends[i], ends[i + 1] - ends[i]) if is_there[i] else None for i in range(len(column))]


IMAGE_COLUMNS = ("image", "jpg", "jpeg", "png", "webp", "img", "image_bytes", "bytes")
PATH_COLUMNS = ("image_path", "img_path", "path", "file_name", "filename", "filepath", "image_file", "file")
CAPTION_COLUMNS = ("caption", "text", "txt", "prompt", "description", "title")


class Columns(NamedTuple):
    """Column names that the user gave; None looks for the usual ones."""

    image: str | None = None
    caption: str | None = None


class ColumnOptions(NamedTuple):
    """What the options are called where the user gives them."""

    image: str = "dataset.params.image_column"
    caption: str = "dataset.params.caption_column"


def pick_columns(
    table: str,
    names: Sequence[str],
    columns: Columns,
    image_names: Sequence[str],
    options: ColumnOptions = ColumnOptions(),  # noqa: B008  # immutable
) -> tuple[str, str]:
    """The image column and the caption column.

    Args:
        table: what a message calls the table.
        names: its columns.
        columns: what the user asked for.
        image_names: usual names of the image column, the most likely one first; upper and lower case are the same.
        options: for messages.

    Raises:
        ConfigError: a column is missing, the table's columns are named; or both are the same.
    """
    image = _pick(table, names, columns.image, image_names, options.image)
    caption = _pick(table, names, columns.caption, CAPTION_COLUMNS, options.caption)
    if image == caption:
        raise ConfigError(f"{options.caption}: {image!r} is the image column of {table} already")
    return image, caption


def _pick(table: str, names: Sequence[str], wanted: str | None, usual: Sequence[str], option: str) -> str:
    if wanted is None:
        known = {name.strip().lower(): name for name in reversed(names)}
        found = next((known[name] for name in usual if name in known), None)
    else:
        found = wanted if wanted in names else None
    if found is None:
        missing = f"no column {wanted!r}" if wanted else f"none of the columns {', '.join(usual)}"
        raise ConfigError(f"{option}: {table} has {missing}; it has {', '.join(names) or 'none'}")
    return found
