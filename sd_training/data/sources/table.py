"""CSV, TSV and JSON-lines tables that name image files.

CSV, TSV and JSON lines → rows with line numbers. A row that cannot be read is named, not an error.
"""

import csv
import io
import json
import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import PurePosixPath
from typing import Any, BinaryIO, NamedTuple

from sd_training.data.index.columns import read_scalars
from sd_training.data.index.store import DatasetIndex
from sd_training.data.problems import BadSample, Problems
from sd_training.data.sources.arrow_cells import IMAGE_COLUMNS, PATH_COLUMNS, Columns, pick_columns
from sd_training.data.sources.base import Shard, ShardScan
from sd_training.data.sources.files import (
    ROWS_AT_ONCE,
    FileReader,
    FileSample,
    SampleColumns,
    caption_of,
    checked_path,
    folder_of,
    join,
    length_of,
    measure,
)
from sd_training.data.storage.files import Access, file_state, open_bytes, seekable
from sd_training.data.storage.locations import is_remote, local_path, shown
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


_STATES_AT_ONCE = 16
_READ_BYTES = 1 << 20
"""Of a table, at once."""


class TableSource:
    """The source of tables; one unit per table.

    A row is a sample: an image file (which paths are read: see `checked_path`), a caption, and metadata in all columns
    but the image's. Rows that cannot be used are named by their line. A table is indexed again when it changes, not
    when only the files that it names do: after adding missing images, save or `touch` it.

    Args:
        paths: tables, local or remote.
        access: how remote files are read.
        image_column: the one with paths; None looks for usual names.
        caption_column: likewise.
    """

    def __init__(
        self, paths: Sequence[str], access: Access, image_column: str | None = None, caption_column: str | None = None
    ) -> None:
        self.paths = [path if is_remote(path) else local_path(path) for path in paths]
        self.access, self.wanted = access, Columns(image_column, caption_column)

    @property
    def identity(self) -> str:
        return json.dumps(["table with paths by ..", *self.wanted])

    def shards(self) -> list[Shard]:
        if not self.paths:
            raise DataError("dataset.params.path: names no table")
        with ThreadPoolExecutor(_STATES_AT_ONCE) as pool:
            states = list(pool.map(lambda path: file_state(path, self.access), self.paths))
        return [Shard(state.location, state.size, state.version) for state in states]

    def scan(self, unit: Shard) -> ShardScan:
        """As `Source.scan`."""
        problems = Problems()
        columns = SampleColumns(shown(unit.location), problems)
        file = open_bytes(unit.location, self.access)
        try:
            table = read_table(shown(unit.location), seekable(file, buffer_size=_READ_BYTES))
            _TableScan(unit.location, table, self.wanted, self.access, columns).run()
        finally:
            file.close()
        return ShardScan(columns.columns(), problems)

    def reader(self, index: DatasetIndex) -> FileReader:
        return FileReader(index, self.access, [folder_of(unit.location) for unit in index.shards])


class _Found(NamedTuple):
    """A row whose image path may be followed."""

    line: int
    path: str
    """As `join` takes it."""
    values: dict[str, Any]
    """The other columns."""


class _TableScan:
    def __init__(self, location: str, table: Table, wanted: Columns, access: Access, columns: SampleColumns) -> None:
        self.base, self.table, self.access, self.columns = folder_of(location), table, access, columns
        self.image, self.caption = pick_columns(shown(location), table.names, wanted, PATH_COLUMNS + IMAGE_COLUMNS)
        self.seen: set[str] = set()

    def run(self) -> None:
        num_rows = 0
        while rows := list(islice(self.table.rows, ROWS_AT_ONCE)):
            num_rows += len(rows)
            found = [row for row in map(self._found, rows) if row is not None]
            self.columns.add(list(self._samples(found)))
        if not num_rows:
            self.columns.name("", "table has no rows")

    def _found(self, row: TableRow) -> _Found | None:
        values = dict(row.values)
        path = values.pop(self.image, None)
        try:
            if row.problem:
                raise BadSample(row.problem)
            if not isinstance(path, str):
                raise BadSample(f"image is no path: {type(path).__name__}")
            return _Found(row.line, checked_path(self.base, path.strip()), values)
        except BadSample as error:
            self._problem(row.line, str(error))
            return None
        except DataError as error:
            raise DataError(f"line {row.line}: {error}") from error

    def _samples(self, rows: Sequence[_Found]) -> Iterator[FileSample]:
        infos = measure([join(self.base, row.path) for row in rows], self.access)
        for row, info in zip(rows, infos, strict=True):
            if info is None:
                self._problem(row.line, f"image file missing: {shown(row.path)}")
                continue
            caption = caption_of(row.values.get(self.caption))
            if caption is None:
                self._problem(row.line, "caption is empty")
            metadata = read_scalars({name: value for name, value in row.values.items() if name and value != ""})
            key = self._key(row)
            yield FileSample(key, row.path, info, caption, caption_length=length_of(caption), metadata=metadata)

    def _key(self, row: _Found) -> str:
        """The image path; of an image that is named again, for example with another caption, also the line."""
        if row.path not in self.seen:
            self.seen.add(row.path)
            return row.path
        self._problem(row.line, f"image named again: {shown(row.path)}")
        return f"{row.path} line {row.line}"

    def _problem(self, line: int, reason: str) -> None:
        self.columns.name(f"line {line}", reason)
