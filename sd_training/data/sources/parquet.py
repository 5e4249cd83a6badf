"""Parquet tables with images as bytes or as paths.

Training reads single rows, in the order of the run; Parquet is read by row groups. So the images of a row group are
unpacked once per machine into one file of the shard cache, one image after the other, and read from there by offset.
The cache (`dataset.params.remote.cache_dir`, `.cache_gib`) needs room for the row groups of a window; row groups are
the blocks of the order, so a window is worked through before its files are let go. Captions and metadata are in the
index. Indexing and unpacking go through one row group at a time, which Arrow holds as stored and unpacked: a process
needs some 70 MB and 3 to 4 times the largest row group, whatever the size of the table (pyarrow 26).
"""

import json
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from sd_training.data.index.columns import read_scalars
from sd_training.data.index.store import DatasetIndex
from sd_training.data.problems import BadSample, Problems
from sd_training.data.samples.image import image_size
from sd_training.data.sources.arrow_cells import (
    IMAGE_COLUMNS,
    PATH_COLUMNS,
    Columns,
    check_caption,
    image_cells,
    is_metadata,
    pick_columns,
    plain,
    plain_type,
    without_long_texts,
)
from sd_training.data.sources.base import Shard, ShardScan
from sd_training.data.sources.files import (
    FileReader,
    FileSample,
    ImageInfo,
    SampleColumns,
    caption_of,
    checked_path,
    folder_of,
    join,
    length_of,
    measure,
)
from sd_training.data.storage.files import Access, FileState, LocalFile, file_state, open_bytes, seekable
from sd_training.data.storage.locations import shown
from sd_training.data.storage.shard_cache import ShardCache, shard_cache
from sd_training.errors import DataError

ROWS_AT_ONCE = 64
"""Rows that are Python objects at the same time."""
MAX_GROUP_BYTES = 4 << 30
"""Larger row groups are refused [bytes, unpacked, as the file says]."""
MAX_OPEN_GROUPS = 64
"""Unpacked row groups kept open per process."""


class ParquetSource:
    """The source of Parquet tables; one unit per file.

    Args:
        files: paths or URLs.
        access: how remote files are read, and where row groups are unpacked.
        image_column: bytes, `struct{bytes, path}` or paths (see `checked_path`); None looks for usual names.
        caption_column: texts or lists of texts; None looks for usual names.
    """

    def __init__(
        self, files: Sequence[str], access: Access, image_column: str | None = None, caption_column: str | None = None
    ) -> None:
        self.files, self.access, self.wanted = list(files), access, Columns(image_column, caption_column)

    @property
    def identity(self) -> str:
        return json.dumps(["parquet", *self.wanted])

    def shards(self) -> list[Shard]:
        states = [file_state(file, self.access) for file in self.files]
        return [Shard(state.location, state.size, state.version) for state in states]

    def scan(self, unit: Shard) -> ShardScan:
        problems = Problems()
        state = FileState(unit.location, unit.size, unit.version)
        with _opened(state, self.access) as table:
            scan = _ParquetScan(unit.location, table, self.wanted, self.access, problems)
            return ShardScan(scan.run(), problems)

    def reader(self, index: DatasetIndex) -> "ParquetReader":
        return ParquetReader(index, self.access, self.wanted)


@contextmanager
def _opened(state: FileState, access: Access) -> Iterator[pq.ParquetFile]:
    file = open_bytes(state, access)
    try:
        with pq.ParquetFile(seekable(file)) as table:
            yield table
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"'{shown(state.location)}' is not a readable Parquet file: {error}") from error
    finally:
        file.close()


def _image_column(location: str, table: pq.ParquetFile, wanted: Columns) -> tuple[str, str]:
    return pick_columns(shown(location), table.schema_arrow.names, wanted, IMAGE_COLUMNS + PATH_COLUMNS)


def _batches(table: pq.ParquetFile, group: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    for batch in table.iter_batches(ROWS_AT_ONCE, row_groups=[group], columns=list(columns)):
        yield pa.RecordBatch.from_arrays([plain(column) for column in batch.columns], names=batch.schema.names)


class _ParquetScan:
    def __init__(
        self, location: str, table: pq.ParquetFile, wanted: Columns, access: Access, problems: Problems
    ) -> None:
        self.location, self.table, self.access = location, table, access
        self.image, self.caption = _image_column(location, table, wanted)
        self.base, self.samples = folder_of(location), SampleColumns(shown(location), problems)
        self.groups: list[int] = []
        self.offsets: list[int] = []
        self.offset = self.row = 0

    def run(self) -> dict[str, pa.Array]:
        """Columns of all rows that have an image."""
        schema = self.table.schema_arrow
        check_caption(shown(self.location), schema.field(self.caption))
        metadata = [field.name for field in schema if field.name != self.image and is_metadata(plain_type(field.type))]
        read = list(dict.fromkeys([*metadata, self.caption, self.image]))
        for group in range(self.table.num_row_groups):
            self._check_size(group)
            self.offset = 0
            for batch in _batches(self.table, group, read):
                found = list(self._batch(batch))
                self.groups += [group] * len(found)
                self.samples.add(found)
        columns = self.samples.columns()
        groups = pa.array(self.groups, pa.int32())
        return columns | {"block": groups, "at:group": groups, "at:image_offset": pa.array(self.offsets, pa.int64())}

    def _check_size(self, group: int) -> None:
        size = self.table.metadata.row_group(group).total_byte_size
        if size > MAX_GROUP_BYTES:
            raise DataError(
                f"row group {group} of '{shown(self.location)}' unpacks to {size:,} bytes, at most {MAX_GROUP_BYTES:,} "
                "are read at once; write the table with smaller row groups (pyarrow: row_group_size=1000)"
            )

    def _batch(self, batch: pa.RecordBatch) -> Iterator[FileSample]:
        cells = image_cells(shown(self.location), self.image, batch.column(self.image))
        rest, long = without_long_texts(batch.drop_columns([self.image]))
        for name in long:
            self._problem(f"texts have too many bytes: column {name}")
        rows = rest.to_pylist() if rest.num_columns else [{}] * batch.num_rows
        paths = [self._path(path, self.row + i) if content is None else None for i, (content, path) in enumerate(cells)]
        infos = iter(measure([join(self.base, path) for path in paths if path is not None], self.access))
        for (content, _), path, values in zip(cells, paths, rows, strict=True):
            offset = self.offset
            if content is not None:
                info = ImageInfo(content.size, *image_size(pa.BufferReader(content)))
                self.offset += content.size
                yield self._sample(values, None, info, offset)
            elif path is not None and (found := next(infos)) is not None:
                yield self._sample(values, path, found, -1)
            elif path is not None:
                self._problem(f"image file missing: {shown(path)}")
            self.row += 1

    def _path(self, path: str | None, row: int) -> str | None:
        try:
            if path is None:
                raise BadSample("image is empty")
            return checked_path(self.base, path)
        except BadSample as error:
            self.samples.name(f"row {row}", str(error))
            return None

    def _sample(self, values: dict[str, Any], path: str | None, info: ImageInfo, offset: int) -> FileSample:
        text = caption_of(values.get(self.caption))
        if text is None:
            self._problem("caption is empty")
        metadata = read_scalars(values)
        self.offsets.append(offset)
        key = f"row {self.row}"
        return FileSample(key, path, info, text, caption_length=length_of(text), metadata=metadata)

    def _problem(self, reason: str) -> None:
        self.samples.name(f"row {self.row}", reason)


class ParquetReader:
    """The `SampleReader` of Parquet tables."""

    def __init__(self, index: DatasetIndex, access: Access, wanted: Columns) -> None:
        self.index, self.access, self.wanted = index, access, wanted
        self._files = FileReader(index, access, [folder_of(unit.location) for unit in index.shards])
        self._open: OrderedDict[int, LocalFile] = OrderedDict()

    def image(self, sample: int) -> bytes:
        numbers = self.index.numbers
        offset = int(numbers("at:image_offset")[sample])
        if offset < 0:
            return self._files.image(sample)
        return self._group_of(sample).pread(int(numbers("at:image_length")[sample]), offset)

    def caption(self, sample: int) -> str:
        return self._files.caption(sample)

    def _group_of(self, sample: int) -> LocalFile:
        """The unpacked row group of a sample."""
        block = int(self.index.numbers("block")[sample])
        if block in self._open:
            self._open.move_to_end(block)
            return self._open[block]
        if len(self._open) >= MAX_OPEN_GROUPS:
            self._open.popitem(last=False)[1].close()
        unit = self.index.shards[self.index.numbers("unit")[sample]]
        self._open[block] = self._unpacked(unit, int(self.index.numbers("at:group")[sample]))
        return self._open[block]

    def _unpacked(self, unit: Shard, group: int) -> LocalFile:
        key = json.dumps(["parquet", *unit, group, *self.wanted])

        def produce(path: Path) -> None:
            with path.open("wb") as output:
                for content in _contents(unit, self.access, self.wanted, group):
                    output.write(content)

        def opened(path: Path) -> LocalFile:
            if not path.exists():
                raise FileNotFoundError(path)
            return LocalFile(str(path), f"{shown(unit.location)} row group {group}")

        return self._cache().open(key, produce, opened)

    def _cache(self) -> ShardCache:
        return shard_cache(self.access.cache_dir, self.access.cache_gib)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": OrderedDict()}

    def __del__(self) -> None:
        for file in getattr(self, "_open", {}).values():
            file.close()


def _contents(unit: Shard, access: Access, wanted: Columns, group: int) -> Iterator[pa.Buffer]:
    """The images of a row group in the order in which the index counted their bytes.

    A generator, so that a full disk where they are written is not taken for damage of the table.
    """
    with _opened(FileState(unit.location, unit.size, unit.version), access) as table:
        image, _ = _image_column(unit.location, table, wanted)
        for batch in _batches(table, group, [image]):
            for content, _ in image_cells(shown(unit.location), image, batch.column(0)):
                if content is not None:
                    yield content
