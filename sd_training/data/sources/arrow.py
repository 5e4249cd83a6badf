"""Arrow tables with images as bytes or as paths: Parquet files, and data sets saved by the `datasets` library.

Captions and metadata are in the index; training reads single images, in the order of the run.

- Parquet is read by row groups. The images of a row group are unpacked once per machine into one file of the shard
  cache, and read from there by offset. The cache (`dataset.params.remote.cache_dir`, `.cache_gib`) needs room for the
  row groups of a window; row groups are the blocks of the order, so a window is worked through before its files go.
  Indexing and unpacking hold one row group at a time, as stored and unpacked: a process needs some 70 MB and 3 to 4
  times the largest row group, whatever the size of the table (pyarrow 26).
- A saved data set is a list of Arrow stream files. The index keeps where in its file each image lies. No file is mapped
  while training, where a disk's failure would end the process, and `datasets` with pandas and dill (87 MB per process,
  datasets 5.2) is only imported to find the files of a data set of the Hugging Face hub.
"""

import json
import posixpath
import reprlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq

from sd_training.data.index.columns import read_scalars
from sd_training.data.problems import BadSample, printable
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
from sd_training.data.sources.base import ImageInfo, IndexedShards, Report, Row, Shard, ShardScan, caption_of, collect
from sd_training.data.sources.reader import IndexedReader, checked_path, folder_of, join, measure
from sd_training.data.storage.byte_file import Access, FileState, LocalFile, seekable
from sd_training.data.storage.files import file_state, find_state, open_bytes
from sd_training.data.storage.locations import HUB, exists, is_remote, local_path, shown
from sd_training.data.storage.shard_cache import shard_cache
from sd_training.errors import ConfigError, DataError

ROWS_AT_ONCE = 64
"""Rows of Parquet that are Python objects at the same time."""
MAX_GROUP_BYTES = 4 << 30
"""Larger row groups are refused [bytes, unpacked, as the file says]."""
_MAX_JSON_BYTES = 16 << 20
"""Largest `state.json`; an Arrow file takes about 50 bytes of it."""
_SHOWN_SPLITS = 10
_END = b"\xff\xff\xff\xff\0\0\0\0"
"""Of every Arrow stream."""


class ArrowSource:
    """The source of Arrow tables; one shard per file.

    The image column holds image files (binary, `Image()`, `struct{bytes, path}`) or paths (see `checked_path`), the
    caption column texts or lists of texts. All other columns of numbers, texts and lists of texts, and the caption
    column, are metadata.

    Args:
        paths: Parquet files; or, with `saved`, what `saved_files` takes.
        access: how remote files are read, and where row groups are unpacked.
        image_column: None looks for usual names.
        caption_column: likewise.
        saved: whether the paths are data sets of the `datasets` library.
    """

    def __init__(
        self,
        paths: Sequence[str],
        access: Access,
        image_column: str | None = None,
        caption_column: str | None = None,
        saved: bool = False,
    ) -> None:
        self.paths, self.access, self.saved = list(paths), access, saved
        self.wanted = Columns(image_column, caption_column)

    @property
    def identity(self) -> str:
        return json.dumps(["huggingface" if self.saved else "parquet", *self.wanted])

    def shards(self) -> list[Shard]:
        """As `Source.shards`."""
        files = self.paths
        if self.saved:
            files = list(dict.fromkeys(file for path in self.paths for file in saved_files(path, self.access)))
        if not files:
            names = ", ".join(map(shown, self.paths)) or "no folder"
            raise DataError(f"dataset.params.path: no Arrow file in {names}")
        states = [file_state(file, self.access) for file in files]
        return [Shard(state.location, state.size, state.version) for state in states]

    def scan(self, shard: Shard) -> ShardScan:
        """As `Source.scan`."""

        def rows(report: Report) -> Iterator[Row]:
            with (_opened_stream if self.saved else _opened_parquet)(shard, self.access) as table:
                yield from _rows(table, self.wanted, self.access, report)

        return collect(shown(shard.location), rows, ["at:image_offset", *(() if self.saved else ("at:group", "block"))])

    def reader(self, index: IndexedShards) -> IndexedReader:
        """As `Source.reader`."""
        bases = [folder_of(shard.location) for shard in index.shards]
        unpack = None if self.saved else partial(_unpacked, self.wanted, self.access)
        return IndexedReader(index, self.access, bases, unpack=unpack)


@dataclass
class _Table:
    """An open file."""

    location: str
    schema: pa.Schema
    batches: Callable[[Sequence[str]], Iterator[tuple[int | None, pa.RecordBatch]]]
    """Columns to read → (row group or None, batch in plain types)."""
    content: pa.Buffer | None = None
    """Of a stream: the whole file, which its images are views of."""

    def columns(self, wanted: Columns) -> tuple[str, str]:
        """Image and caption column. Raises ConfigError."""
        return pick_columns(shown(self.location), self.schema.names, wanted, IMAGE_COLUMNS + PATH_COLUMNS)


def _rows(table: _Table, wanted: Columns, access: Access, report: Report) -> Iterator[Row]:
    """All rows that have an image."""
    location, base = shown(table.location), folder_of(table.location)
    image, caption = table.columns(wanted)
    check_caption(location, table.schema.field(caption))
    metadata = [field.name for field in table.schema if field.name != image and is_metadata(plain_type(field.type))]
    number, offset, last_group = 0, 0, None
    for group, batch in table.batches(list(dict.fromkeys([*metadata, caption, image]))):
        if group != last_group:
            offset, last_group = 0, group
        keys = [f"row {number + i}" for i in range(batch.num_rows)]
        cells = image_cells(location, image, batch.column(image))
        texts, long = without_long_texts(batch.drop_columns([image]))
        for name in long:
            report(keys[0], f"texts have too many bytes: column {name}")
        paths = [_path(base, cell, key, report) for key, cell in zip(keys, cells, strict=True)]
        infos = iter(measure([join(base, path) for path in paths if path is not None], access))
        for key, (content, _), path, values in zip(keys, cells, paths, texts.to_pylist(), strict=True):
            where: int | None = -1
            if content is not None:
                info: ImageInfo | None = ImageInfo(content.size, *image_size(pa.BufferReader(content)))
                where = offset if table.content is None else _offset(content, table.content, location)
                offset += content.size
            elif path is None:
                continue
            elif (info := next(infos)) is None:
                report(key, f"image file missing: {shown(path)}")
                continue
            text = caption_of(values[caption])
            if text is None:
                report(key, "caption is empty")
            assert info is not None
            yield Row(key, info, read_scalars(values), path, where, group, text)
        number += batch.num_rows


def _path(base: str, cell: tuple[pa.Buffer | None, str | None], key: str, report: Report) -> str | None:
    """The image file of a row, as `join` takes it; None where the image is in the table or cannot be used."""
    content, path = cell
    try:
        if content is None and path is None:
            raise BadSample("image is empty")
        return checked_path(base, path or "") if content is None else None
    except BadSample as error:
        report(key, str(error))
        return None


def _offset(part: pa.Buffer, content: pa.Buffer, location: str) -> int:
    offset = int(part.address - content.address)
    if not 0 <= offset <= content.size - part.size:  # pyarrow unpacked it into memory of its own
        raise DataError(f"'{location}' is a compressed Arrow file; save_to_disk writes plain ones: save it again")
    return offset


def _plain_batch(batch: pa.RecordBatch) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([plain(column) for column in batch.columns], names=batch.schema.names)


# --- Parquet ---


@contextmanager
def _opened_parquet(shard: Shard, access: Access, only_group: int | None = None) -> Iterator[_Table]:
    file = open_bytes(FileState(*shard), access)
    try:
        with pq.ParquetFile(seekable(file)) as table:

            def batches(columns: Sequence[str]) -> Iterator[tuple[int | None, pa.RecordBatch]]:
                for group in range(table.num_row_groups) if only_group is None else [only_group]:
                    _check_group(shard, group, table.metadata.row_group(group).total_byte_size)
                    for batch in table.iter_batches(ROWS_AT_ONCE, row_groups=[group], columns=list(columns)):
                        yield group, _plain_batch(batch)

            yield _Table(shard.location, table.schema_arrow, batches)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"'{shown(shard.location)}' is not a readable Parquet file: {error}") from error
    finally:
        file.close()


def _check_group(shard: Shard, group: int, size: int) -> None:
    if size > MAX_GROUP_BYTES:
        raise DataError(
            f"row group {group} of '{shown(shard.location)}' unpacks to {size:,} bytes, at most {MAX_GROUP_BYTES:,} "
            "are read at once; write the table with smaller row groups (pyarrow: row_group_size=1000)"
        )


def _unpacked(wanted: Columns, access: Access, index: IndexedShards, sample: int) -> LocalFile:
    """The images of the row group of a sample, one after the other, as a file of the shard cache."""
    shard = index.shards[index.numbers("unit")[sample]]
    group = int(index.numbers("at:group")[sample])

    def contents() -> Iterator[pa.Buffer]:
        """In the order in which the index counted their bytes. A generator, so that a full disk where they are written
        is not reported as damage of the table."""
        with _opened_parquet(shard, access, group) as table:
            image, _ = table.columns(wanted)
            for _, batch in table.batches([image]):
                for content, _ in image_cells(shown(shard.location), image, batch.column(0)):
                    if content is not None:
                        yield content

    def produce(path: Path) -> None:
        with path.open("wb") as output:
            for content in contents():
                output.write(content)

    name = f"{shown(shard.location)} row group {group}"
    key = json.dumps(["parquet", *shard, group, *wanted])
    return shard_cache(access.cache_dir, access.cache_gib).open(key, produce, lambda path: LocalFile(str(path), name))


# --- Saved data sets ---


@contextmanager
def _opened_stream(shard: Shard, access: Access) -> Iterator[_Table]:
    try:
        if is_remote(shard.location):
            file = open_bytes(shard.location, access)
            try:
                content = pa.py_buffer(file.pread(file.size, 0))
            finally:
                file.close()
        else:
            content = pa.memory_map(shard.location).read_buffer()
        if content.size < len(_END) or content.slice(content.size - len(_END)).to_pybytes() != _END:
            raise pa.ArrowInvalid("truncated, or not an Arrow stream")  # pyarrow takes a cut between parts for the end
        with pa.ipc.open_stream(content) as stream:

            def batches(columns: Sequence[str]) -> Iterator[tuple[int | None, pa.RecordBatch]]:
                for batch in stream:
                    yield None, _plain_batch(batch.select(list(columns)))

            yield _Table(shard.location, stream.schema, batches, content)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"'{shown(shard.location)}' is not a readable Arrow file: {error}") from error


def saved_files(path: str, access: Access) -> list[str]:
    """The Arrow files of a data set, in order.

    Args:
        path: a folder of `Dataset.save_to_disk`, local or remote (of a `DatasetDict` the folder of one split); or
            `hf://datasets/OWNER/NAME`, perhaps with `?split=…&name=…&revision=…`, which the `datasets` library
            downloads.
        access: how remote files are read.

    Raises:
        DataError: it is not such a data set, or has several splits.
        ConfigError: the `datasets` library is missing.
    """
    if path.startswith(HUB):
        return _hub_files(path)
    folder = path.rstrip("/") if is_remote(path) else local_path(path)
    state = _read_json(f"{folder}/state.json", access)
    if state is None:
        splits = (_read_json(f"{folder}/dataset_dict.json", access) or {}).get("splits")
        if not isinstance(splits, list):
            raise DataError(
                f"dataset.params.path: '{shown(folder)}' is not a folder written by save_to_disk: it has no state.json"
            )
        known = " or ".join(f"'{shown(folder)}/{printable(str(split))}'" for split in splits[:_SHOWN_SPLITS])
        more = f", or one of {len(splits) - _SHOWN_SPLITS} more" if len(splits) > _SHOWN_SPLITS else ""
        raise DataError(f"dataset.params.path: '{shown(folder)}' holds several splits; name one: {known}{more}")
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise DataError(
            f"dataset.params.path: '{shown(folder)}' was saved with a table of row numbers, by an old version of "
            "datasets; load it and save it again"
        )
    entries = state.get("_data_files") or []
    entries = entries if isinstance(entries, list) else [entries]
    names = [entry.get("filename") if isinstance(entry, dict) else None for entry in entries]
    for name, entry in zip(names, entries, strict=True):
        if not isinstance(name, str) or posixpath.basename(name) != name or not name.isprintable():
            raise DataError(
                f"'{shown(folder)}/state.json': '_data_files' must be a list of entries such as "
                f"{{'filename': 'x.arrow'}} for files beside it, not {printable(reprlib.repr(entry))}"
            )
    return [f"{folder}/{name}" for name in names]


def _read_json(location: str, access: Access) -> dict[str, Any] | None:
    """A JSON object; None where there is no such file."""
    if not is_remote(location) and not exists(location):
        return None
    state = find_state(location, access)
    if state is None:
        return None
    file = open_bytes(state, access)
    try:
        if state.size > _MAX_JSON_BYTES:
            raise ValueError(f"{state.size:,} bytes, at most {_MAX_JSON_BYTES:,} are read")
        value = json.loads(file.pread(file.size, 0))
        if not isinstance(value, dict):
            raise ValueError("it holds no JSON object")
        return value
    except (ValueError, RecursionError) as error:
        raise DataError(f"'{shown(location)}' is not JSON as save_to_disk writes it: {error}") from error
    finally:
        file.close()


def _hub_files(path: str) -> list[str]:
    parts = urlsplit(path)
    options = dict(parse_qsl(parts.query))
    if unknown := options.keys() - {"split", "name", "revision"}:
        raise ConfigError(f"dataset.params.path: '{path}': unknown {min(unknown)}; write split, name or revision")
    try:
        import datasets
    except ImportError:
        raise ConfigError(
            f"dataset.params.path: '{path}' is a data set of the Hugging Face hub, which needs a package: "
            "pip install 'datasets>=4.0'"
        ) from None
    if int(datasets.__version__.partition(".")[0]) < 4:  # older ones run scripts of a data set
        raise ConfigError(f"dataset.params.path: '{path}' needs 'datasets>=4.0', not {datasets.__version__}")
    repository = f"{parts.netloc}{parts.path}".removeprefix("datasets/").strip("/")
    try:
        found = datasets.load_dataset(repository, split=options.pop("split", "train"), **options)
    except Exception as error:  # of many libraries below it
        raise DataError(f"dataset.params.path: '{path}' cannot be loaded by datasets: {error}") from error
    return [str(file["filename"]) for file in found.cache_files]
