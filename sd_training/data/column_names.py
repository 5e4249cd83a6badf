"""Which column of a table holds the image and which the caption: as named, else by usual names."""

from collections.abc import Sequence
from typing import NamedTuple

from sd_training.errors import ConfigError

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
