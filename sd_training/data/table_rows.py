"""CSV, TSV and JSON lines → rows with line numbers. A row that cannot be read is named, not an error."""

import csv
import io
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import PurePosixPath
from typing import Any, BinaryIO, NamedTuple

from sd_training.errors import DataError

TABLE_EXTENSIONS = (".csv", ".tsv", ".jsonl", ".ndjson")
_MAX_CELL = 1 << 24
_ROWS_FOR_NAMES = 1_000
"""Objects of JSON lines that are looked at for names of columns: not every row need have every column."""
_NOT_UTF8 = re.compile("[\ud800-\udfff]")


class TableRow(NamedTuple):
    """One row."""

    line: int
    """First line of the row, counted from 1."""
    values: Mapping[str, Any]
    """Column → value; texts in CSV and TSV."""
    problem: str = ""
    """Why there are no values."""


@dataclass(frozen=True)
class Table:
    """A table that is being read."""

    names: list[str]
    rows: Iterator[TableRow]


def read_table(name: str, file: BinaryIO) -> Table:
    """Begins to read a table; rows are read when they are asked for.

    Args:
        name: path or URL, which tells the format and is used in messages.
        file: its content.

    Raises:
        DataError: the format is not known, or the header cannot be read.
    """
    extension = PurePosixPath(name.partition("?")[0] if "://" in name else name).suffix.lower()
    if extension in (".csv", ".tsv"):
        return _delimited(name, file, "\t" if extension == ".tsv" else ",")
    if extension in TABLE_EXTENSIONS:
        return _json_lines(file)
    raise DataError(f"{name}: is not a table; {', '.join(TABLE_EXTENSIONS)} files are read")


def _text(file: BinaryIO, newline: str) -> io.TextIOWrapper:
    """Bytes that are not UTF-8 become surrogates, by which their rows are found."""
    return io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline=newline)


def _delimited(name: str, file: BinaryIO, delimiter: str) -> Table:
    csv.field_size_limit(_MAX_CELL)
    reader = csv.reader(_text(file, ""), delimiter=delimiter)
    try:
        names = next(reader, [])
    except csv.Error as error:
        raise DataError(f"{name}: is not a table ({error})") from error
    if any(_NOT_UTF8.search(column) for column in names):
        raise DataError(f"{name}: is not UTF-8 text; save it as UTF-8")
    return Table(names, _delimited_rows(reader, names))


def _delimited_rows(reader: Any, names: list[str]) -> Iterator[TableRow]:
    while True:
        line = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:  # the reader goes on with the next line
            yield TableRow(line, {}, f"row is malformed: {error}")
            continue
        if not cells:
            continue
        if len(cells) != len(names):
            yield TableRow(line, {}, f"row has {len(cells)} cells where the header has {len(names)}")
        elif any(not cell.isascii() and _NOT_UTF8.search(cell) for cell in cells):
            yield TableRow(line, {}, "row is not UTF-8 text")
        else:
            yield TableRow(line, dict(zip(names, cells, strict=True)))


def _json_lines(file: BinaryIO) -> Table:
    rows = (_json_row(line, text) for line, text in enumerate(_text(file, "\n"), 1) if text.strip())
    first = list(islice(rows, _ROWS_FOR_NAMES))
    names = dict.fromkeys(name for row in first for name in row.values)
    return Table(list(names), chain(first, rows))


def _json_row(line: int, text: str) -> TableRow:
    if not text.isascii() and _NOT_UTF8.search(text):
        return TableRow(line, {}, "row is not UTF-8 text")
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        return TableRow(line, {}, f"row is malformed: {error}")
    return TableRow(line, values) if isinstance(values, dict) else TableRow(line, {}, "row is no JSON object")
