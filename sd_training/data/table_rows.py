"""CSV, TSV and JSON lines → rows with line numbers. A row that cannot be read is named, not an error."""

import csv
import io
import json
import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
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
    lines = _Lines(_text(file, ""))
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    try:
        names = next(reader, [])
    except csv.Error as error:
        raise DataError(f"{name}: is not a table ({error})") from error
    if any(_NOT_UTF8.search(column) for column in names):
        raise DataError(f"{name}: is not UTF-8 text; save it as UTF-8")
    if twice := [column for column, count in Counter(names).items() if column and count > 1]:
        raise DataError(f"{name}: has two columns named '{twice[0]}'; rename one")
    return Table(names, _delimited_rows(lines, reader, names))


class _Lines:
    """Lines for a `csv.reader`, which can be given back: a quote that is never closed takes many lines."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._lines = iter(lines)
        self._ahead: deque[str] = deque()
        self._row: list[str] = []
        self._number = 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = self._ahead.popleft() if self._ahead else next(self._lines)
        self._row.append(line)
        return line

    def begin_row(self) -> int:
        """The number of the next line, counted from 1."""
        self._number += len(self._row)
        self._row = []
        return self._number + 1

    def give_back(self) -> None:
        """Leaves the row that was begun its first line only."""
        self._ahead.extendleft(reversed(self._row[1:]))
        del self._row[1:]


def _delimited_rows(lines: _Lines, reader: Any, names: list[str]) -> Iterator[TableRow]:
    while True:
        line = lines.begin_row()
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            lines.give_back()
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
