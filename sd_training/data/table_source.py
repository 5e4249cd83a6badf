"""CSV, TSV and JSON-lines tables that name image files."""

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any, NamedTuple

from sd_training.data.byte_files import Access, file_state, open_bytes, seekable
from sd_training.data.column_names import IMAGE_COLUMNS, PATH_COLUMNS, Columns, pick_columns
from sd_training.data.file_reader import FileReader, checked_path, folder_of, join
from sd_training.data.file_samples import ROWS_AT_ONCE, FileSample, SampleColumns, caption_of, length_of, measure
from sd_training.data.index import DatasetIndex
from sd_training.data.index_columns import read_scalars
from sd_training.data.locations import is_remote, local_path, shown
from sd_training.data.problems import BadSample, Problems
from sd_training.data.source import Unit, UnitScan
from sd_training.data.table_rows import Table, TableRow, read_table
from sd_training.errors import DataError

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

    def units(self) -> list[Unit]:
        if not self.paths:
            raise DataError("dataset.params.path: names no table")
        with ThreadPoolExecutor(_STATES_AT_ONCE) as pool:
            states = list(pool.map(lambda path: file_state(path, self.access), self.paths))
        return [Unit(state.location, state.size, state.version) for state in states]

    def scan(self, unit: Unit) -> UnitScan:
        """As `Source.scan`."""
        problems = Problems()
        columns = SampleColumns(shown(unit.location), problems)
        file = open_bytes(unit.location, self.access)
        try:
            table = read_table(shown(unit.location), seekable(file, buffer_size=_READ_BYTES))
            _TableScan(unit.location, table, self.wanted, self.access, columns).run()
        finally:
            file.close()
        return UnitScan(columns.columns(), problems)

    def reader(self, index: DatasetIndex) -> FileReader:
        return FileReader(index, self.access, [folder_of(unit.location) for unit in index.units])


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
