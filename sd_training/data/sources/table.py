"""CSV, TSV and JSON-lines tables that name image files. A row that cannot be read is reported, not an error."""

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import chain, islice
from pathlib import PurePosixPath
from typing import Any, BinaryIO, NamedTuple

from sd_training.data.index.columns import read_scalars
from sd_training.data.problems import BadSample
from sd_training.data.sources.arrow import IMAGE_COLUMNS, PATH_COLUMNS, Columns
from sd_training.data.sources.base import Report, Row, Shard, caption_of, checked_path, folder_of
from sd_training.data.sources.files import FileSource
from sd_training.data.storage.byte_file import Access, seekable
from sd_training.data.storage.files import file_state, open_bytes
from sd_training.data.storage.locations import is_remote, local_path, shown
from sd_training.errors import DataError

TABLE_EXTENSIONS = (".csv", ".tsv", ".jsonl", ".ndjson")
_MAX_CELL = 1 << 24
_ROWS_FOR_NAMES = 1_000
"""Objects of JSON lines that are searched for names of columns: not every row need have every column."""
_NOT_UTF8 = re.compile("[\ud800-\udfff]")
_STATES_AT_ONCE = 16
_READ_BYTES = 1 << 20
"""Of a table, at once."""


class TableSource(FileSource):
    """The source of tables; one shard per table.

    A row is a sample: an image file (which paths are read: see `checked_path`), a caption, and metadata in all columns
    but the image's. Rows that cannot be used are reported by their line. A table is indexed again when it changes, not
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
        super().__init__(access)
        self.paths = [path if is_remote(path) else local_path(path) for path in paths]
        self.wanted = Columns(image_column, caption_column)

    @property
    def identity(self) -> str:
        return json.dumps(["table with paths by ..", *self.wanted])

    def base(self, shard: Shard) -> str:
        """As `FileSource.base`."""
        return folder_of(shard.location)

    def shards(self) -> list[Shard]:
        """As `Source.shards`."""
        if not self.paths:
            raise DataError("dataset.params.path: names no table")
        with ThreadPoolExecutor(_STATES_AT_ONCE) as pool:
            states = list(pool.map(lambda path: file_state(path, self.access), self.paths))
        return [Shard(state.location, state.size, state.version) for state in states]

    def rows(self, shard: Shard, report: Report) -> Iterator[Row]:
        """As `FileSource.rows`."""
        name, seen = shown(shard.location), set[str]()
        with closing(open_bytes(shard.location, self.access)) as file:
            names, rows = _read_table(name, seekable(file, buffer_size=_READ_BYTES))
            image, caption = self.wanted.pick(name, names, PATH_COLUMNS + IMAGE_COLUMNS)
            first = next(rows, None)
            if first is None:
                report("", "table has no rows")
                return
            named = self._named_images(self.base(shard), chain([first], rows), image, report)
            for row, path, info in self.measured(shard, named):
                line = f"line {row.line}"
                if info is None:
                    report(line, f"image file missing: {shown(path)}")
                    continue
                text = caption_of(row.values.get(caption))
                if text is None:
                    report(line, "caption is empty")
                if path in seen:  # for example with another caption
                    report(line, f"image named again: {shown(path)}")
                cells = {key: value for key, value in row.values.items() if key != image and key and value != ""}
                key = f"{path} {line}" if path in seen else path
                seen.add(path)
                yield Row(key, info, read_scalars(cells), path, caption=text)

    def _named_images(
        self, base: str, rows: Iterable["_TableRow"], image: str, report: Report
    ) -> Iterator[tuple["_TableRow", str]]:
        """Rows whose image path may be followed, and that path as `join` takes it."""
        for row in rows:
            try:
                path = row.values.get(image)
                if row.problem or not isinstance(path, str):
                    raise BadSample(row.problem or f"image is no path: {type(path).__name__}")
                yield row, checked_path(base, path.strip())
            except BadSample as error:
                report(f"line {row.line}", str(error))
            except DataError as error:
                raise DataError(f"line {row.line}: {error}") from error


class _TableRow(NamedTuple):
    line: int
    """First line of the row, counted from 1."""
    values: Mapping[str, Any]
    """Column → value; texts in CSV and TSV."""
    problem: str = ""
    """Why there are no values."""


def _read_table(name: str, file: BinaryIO) -> tuple[list[str], Iterator[_TableRow]]:
    """The columns of a table and its rows, which are read when they are asked for.

    Args:
        name: path or URL, which gives the format and is used in messages.
        file: its content.

    Raises:
        DataError: the format is not known, or the header cannot be read.
    """
    extension = PurePosixPath(name.partition("?")[0] if "://" in name else name).suffix.lower()
    if extension not in TABLE_EXTENSIONS:
        raise DataError(f"{name}: is not a table; {', '.join(TABLE_EXTENSIONS)} files are read")
    # Bytes that are not UTF-8 become surrogates, by which their rows are found.
    is_json = extension not in (".csv", ".tsv")
    newline = "\n" if is_json else ""
    text = io.TextIOWrapper(file, encoding="utf-8-sig", errors="surrogateescape", newline=newline)
    if not is_json:
        return _delimited(name, text, "\t" if extension == ".tsv" else ",")
    rows = (_json_row(number, line) for number, line in enumerate(text, 1) if line.strip())
    first = list(islice(rows, _ROWS_FOR_NAMES))
    return list(dict.fromkeys(column for row in first for column in row.values)), chain(first, rows)


def _json_row(line: int, text: str) -> _TableRow:
    if not text.isascii() and _NOT_UTF8.search(text):
        return _TableRow(line, {}, "row is not UTF-8 text")
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        return _TableRow(line, {}, f"row is malformed: {error}")
    return _TableRow(line, values) if isinstance(values, dict) else _TableRow(line, {}, "row is no JSON object")


def _delimited(name: str, text: Iterable[str], delimiter: str) -> tuple[list[str], Iterator[_TableRow]]:
    csv.field_size_limit(_MAX_CELL)
    reader = csv.reader(text, delimiter=delimiter, strict=True)
    try:
        names = next(reader, [])
    except csv.Error as error:
        raise DataError(f"{name}: is not a table ({error})") from error
    if any(_NOT_UTF8.search(column) for column in names):
        raise DataError(f"{name}: is not UTF-8 text; save it as UTF-8")
    if twice := [column for column, count in Counter(names).items() if column and count > 1]:
        raise DataError(f"{name}: has two columns named '{twice[0]}'; rename one")

    def rows() -> Iterator[_TableRow]:
        while True:
            line = reader.line_num + 1
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                # A quote that is not closed takes all lines up to the next quote with it.
                for lost in range(line, reader.line_num + 1):
                    yield _TableRow(lost, {}, f"row is malformed: {error}")
                continue
            if cells and len(cells) != len(names):
                yield _TableRow(line, {}, f"row has {len(cells)} cells where the header has {len(names)}")
            elif any(not cell.isascii() and _NOT_UTF8.search(cell) for cell in cells):
                yield _TableRow(line, {}, "row is not UTF-8 text")
            elif cells:
                yield _TableRow(line, dict(zip(names, cells, strict=True)))

    return names, rows()
