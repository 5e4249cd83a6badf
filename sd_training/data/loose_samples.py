"""Samples that are not in shards yet: a folder of images with captions beside them, a CSV or TSV table, Parquet."""

import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from pyarrow import ArrowException

from sd_training.data.column_names import IMAGE_COLUMNS, PATH_COLUMNS, ColumnOptions, Columns, pick_columns
from sd_training.data.folder_source import partner_folders
from sd_training.data.local_listings import entries_of, folders_below
from sd_training.data.table_rows import TableRow, read_table
from sd_training.errors import DataError

IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff"})
"""Files of a folder that are meant as samples; those that training cannot read are named as skipped."""
_OPTIONS = ColumnOptions("--image-column", "--caption-column")


@dataclass(frozen=True)
class LooseSample:
    """Where the parts of one sample are."""

    name: str
    """What a report calls it: its path in the folder, or table and line."""
    image: Path | bytes | None
    """A file, or the content of one."""
    caption: Path | str | None
    """A text file, or the text."""
    metadata: Path | dict[str, Any]
    """A JSON file that may be missing, or the other columns."""
    problem: str | None = None
    """Why it cannot be used, when that is known already."""


@dataclass(frozen=True)
class LooseSource:
    """All samples of an input."""

    count: int
    samples: Iterator[LooseSample]
    """`count` samples in a fixed order."""


def open_source(path: Path, columns: Columns, shuffle_seed: int | None = None) -> LooseSource:
    """Finds the samples of a folder, CSV, TSV or Parquet file, or a folder of Parquet files.

    Args:
        path: what to read.
        columns: of a table.
        shuffle_seed: None keeps the order of the files' names and rows. Otherwise a fixed random order; Parquet is
            shuffled by row groups and inside each, so that no more than one of them is in memory.

    Raises:
        DataError: missing or unreadable input, or no samples in it.
        ConfigError: a table does not have the columns.
    """
    if not path.exists():
        raise DataError(f"{path}: no such file or folder")
    chance = None if shuffle_seed is None else random.Random(shuffle_seed)
    if path.is_dir() and (files := sorted(path.rglob("*.parquet"))):
        source = _parquet(files, columns, chance)
    elif path.suffix.lower() == ".parquet":
        source = _parquet([path], columns, chance)
    elif path.is_dir() or path.suffix.lower() in {".csv", ".tsv"}:
        found = _folder(path) if path.is_dir() else _table(path, columns)
        if chance is not None:
            chance.shuffle(found)
        source = LooseSource(len(found), iter(found))
    else:
        raise DataError(f"{path}: is not a folder, .csv, .tsv or .parquet file")
    if not source.count:
        raise DataError(f"{path}: has no samples" + (", no image files below it" if path.is_dir() else ""))
    return source


def _folder(folder: Path) -> list[LooseSample]:
    """As `FolderSource` finds them: without hidden files, through links, described beside or in a partner folder."""
    root, found = str(folder), list[LooseSample]()
    for below in folders_below(root):
        partner = next(filter(os.path.isdir, partner_folders(root, below)), None)
        described: dict[str, Path] = {}
        for entry in [*(entries_of(partner) if partner else ()), *entries_of(below)]:  # beside wins
            stem, suffix = os.path.splitext(entry.name)
            described[stem + suffix.lower()] = Path(entry.path)
        for entry in entries_of(below):
            stem, suffix = os.path.splitext(entry.name)
            if suffix.lower() in IMAGE_SUFFIXES and entry.is_file():
                image = Path(entry.path)
                caption, metadata = (described.get(stem + end, image.with_suffix(end)) for end in (".txt", ".json"))
                found.append(LooseSample(image.relative_to(folder).as_posix(), image, caption, metadata))
    return sorted(found, key=lambda sample: sample.name)


def _pick_both(path: Path, names: Sequence[str], columns: Columns, image_names: Sequence[str]) -> tuple[str, str]:
    return pick_columns(str(path), names, columns, image_names, _OPTIONS)


def _number(cell: str) -> str | int | float:
    """A CSV cell as a number when it is one, so that filters can compare it; "007" stays text."""
    plain = cell.lstrip("-")
    if plain.isascii() and plain.isdigit() and len(cell) - len(plain) <= 1:
        return cell if len(plain) > 1 and plain.startswith("0") else int(cell)
    try:
        return float(cell) if "." in cell and "_" not in cell else cell
    except ValueError:
        return cell


def _table(path: Path, columns: Columns) -> list[LooseSample]:
    try:
        with path.open("rb") as file:
            table = read_table(str(path), file)
            image, caption = _pick_both(path, table.names, columns, PATH_COLUMNS + IMAGE_COLUMNS)
            return [_from_table_row(path, row, image, caption) for row in table.rows]
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error


def _from_table_row(path: Path, row: TableRow, image: str, caption: str) -> LooseSample:
    name = f"{path.name} line {row.line}"
    if row.problem:
        return LooseSample(name, None, None, {}, row.problem)
    cells = dict(row.values)
    text = cells.pop(caption)
    return _from_row(name, path.parent, cells.pop(image), text, {k: _number(v) for k, v in cells.items() if v != ""})


def _from_row(name: str, base: Path, image: Any, caption: Any, metadata: dict[str, Any]) -> LooseSample:
    """A table's row; an image cell is bytes, a path relative to the table, or a struct of both."""
    if isinstance(image, dict):
        image = image.get("bytes") or image.get("path")
    problem = None
    if isinstance(image, str) and "://" in image:
        problem = f"image is a URL: download it first, {image}"
    elif not isinstance(image, (str, bytes)) or not image:
        problem = "image cell is empty"
    elif not isinstance(caption, str):
        problem = f"caption is no text: {type(caption).__name__}"
    if problem is not None:
        return LooseSample(name, None, None, {}, problem)
    return LooseSample(name, image if isinstance(image, bytes) else base / image, caption, metadata)


def _parquet(files: Sequence[Path], columns: Columns, chance: random.Random | None) -> LooseSource:
    groups: list[tuple[Path, int]] = []
    count = 0
    try:
        for path in files:
            with pq.ParquetFile(path) as table:
                _pick_both(path, table.schema_arrow.names, columns, IMAGE_COLUMNS + PATH_COLUMNS)
                groups += [(path, group) for group in range(table.num_row_groups)]
                count += table.metadata.num_rows
    except (OSError, ArrowException) as error:
        raise DataError(f"{path}: is not a readable Parquet file ({error})") from error
    if chance is not None:
        chance.shuffle(groups)
    return LooseSource(count, _parquet_rows(groups, columns, chance))


def _parquet_rows(
    groups: Sequence[tuple[Path, int]], columns: Columns, chance: random.Random | None
) -> Iterator[LooseSample]:
    """Rows of one row group after the other. Raises DataError when one cannot be read."""
    for path, group in groups:
        try:
            with pq.ParquetFile(path) as table:
                image, caption = _pick_both(path, table.schema_arrow.names, columns, IMAGE_COLUMNS + PATH_COLUMNS)
                rows = table.read_row_group(group)
        except (OSError, ArrowException) as error:
            raise DataError(f"{path}: row group {group} cannot be read ({error})") from error
        order = list(range(rows.num_rows))
        if chance is not None:
            chance.shuffle(order)
        for i in order:
            row = {name: rows.column(name)[i].as_py() for name in rows.column_names}
            name = f"{path.name} group {group} row {i}"
            text = row.pop(caption)
            yield _from_row(name, path.parent, row.pop(image), text, row)
