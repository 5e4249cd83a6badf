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
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sd_training.data.index.columns import read_scalars
from sd_training.data.problems import BadSample, printable
from sd_training.data.samples.image import image_size
from sd_training.data.sources.base import (
    MAX_TEXT_BYTES,
    ImageInfo,
    IndexedReader,
    IndexedShards,
    Report,
    Row,
    Shard,
    ShardScan,
    caption_of,
    checked_path,
    collect,
    folder_of,
    join,
    measure,
)
from sd_training.data.storage.byte_file import Access, FileState, LocalFile, seekable
from sd_training.data.storage.files import file_state, find_state, open_bytes
from sd_training.data.storage.locations import HUB, exists, is_remote, local_path, shown
from sd_training.data.storage.shard_cache import shard_cache
from sd_training.errors import ConfigError, DataError

IMAGE_COLUMNS = ("image", "jpg", "jpeg", "png", "webp", "img", "image_bytes", "bytes")
PATH_COLUMNS = ("image_path", "img_path", "path", "file_name", "filename", "filepath", "image_file", "file")
_CAPTION_COLUMNS = ("caption", "text", "txt", "prompt", "description", "title")
ROWS_AT_ONCE = 64
"""Rows of Parquet that are Python objects at the same time."""
MAX_GROUP_BYTES = 4 << 30
"""Larger row groups are refused [bytes, unpacked, as the file says]."""
_MAX_JSON_BYTES = 16 << 20
"""Largest `state.json`; an Arrow file takes about 50 bytes of it."""
_END = b"\xff\xff\xff\xff\0\0\0\0"
"""Of every Arrow stream."""


class Columns(NamedTuple):
    """Column names that the user gave; None looks for the usual ones."""

    image: str | None = None
    caption: str | None = None

    def pick(self, table: str, names: Sequence[str], image_names: Sequence[str]) -> tuple[str, str]:
        """The image column and the caption column.

        Args:
            table: what a message calls the table.
            names: its columns.
            image_names: usual names of the image column, the most likely one first; case does not matter.

        Raises:
            ConfigError: a column is missing, the table's columns are named; or both are the same.
        """
        wanted = {"image": (self.image, image_names), "caption": (self.caption, _CAPTION_COLUMNS)}
        known, picked = {name.strip().lower(): name for name in reversed(names)}, list[str]()
        for part, (given, usual) in wanted.items():
            found = next((known[name] for name in usual if name in known), None) if given is None else given
            if found is None or found not in names:
                missing = f"no column {given!r}" if given else f"none of the columns {', '.join(usual)}"
                columns = ", ".join(names) or "none"
                raise ConfigError(f"dataset.params.{part}_column: {table} has {missing}; it has {columns}")
            picked.append(found)
        if picked[0] == picked[1]:
            raise ConfigError(f"dataset.params.caption_column: {picked[0]!r} is the image column of {table} already")
        return picked[0], picked[1]


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
        return IndexedReader(index, self.access, bases, None if self.saved else partial(_unpacked, self))


@dataclass
class _Table:
    """An open file."""

    location: str
    schema: pa.Schema
    batches: Callable[[Sequence[str]], Iterator[tuple[int | None, pa.RecordBatch]]]
    """Columns to read → (row group or None, batch)."""
    content: pa.Buffer | None = None
    """Of a stream: the whole file, which its images are views of."""

    def columns(self, wanted: Columns) -> tuple[str, str]:
        """Image and caption column. Raises ConfigError."""
        return wanted.pick(shown(self.location), self.schema.names, IMAGE_COLUMNS + PATH_COLUMNS)

    def offset(self, part: pa.Buffer) -> int:
        """Where an image of a stream lies in the file [bytes]."""
        assert self.content is not None
        offset = int(part.address - self.content.address)
        if not 0 <= offset <= self.content.size - part.size:  # pyarrow unpacked it into memory of its own
            raise DataError(
                f"'{shown(self.location)}' is a compressed Arrow file; save_to_disk writes plain ones: save it again"
            )
        return offset


def _rows(table: _Table, wanted: Columns, access: Access, report: Report) -> Iterator[Row]:
    """All rows that have an image."""
    location, base = shown(table.location), folder_of(table.location)
    image, caption = table.columns(wanted)
    kind = table.schema.field(caption).type
    if not (pa.types.is_null(kind) or _is_text(plain_type(kind))):
        raise ConfigError(
            f"dataset.params.caption_column: column '{caption}' of {location} is {kind}; it must hold texts or lists "
            "of texts"
        )
    metadata = [field.name for field in table.schema if field.name != image and is_metadata(plain_type(field.type))]
    number, offset, last_group = 0, 0, None
    for group, batch in table.batches(list(dict.fromkeys([*metadata, caption, image]))):
        if group != last_group:
            offset, last_group = 0, group
        keys = [f"row {number + i}" for i in range(batch.num_rows)]
        cells = _image_cells(location, image, batch.column(image))
        texts = _plain_texts(batch.drop_columns([image]), partial(report, f"row {number}"))
        paths = [_path(base, cell, partial(report, key)) for key, cell in zip(keys, cells, strict=True)]
        infos = iter(measure([join(base, path) for path in paths if path is not None], access))
        for key, (content, _), path, values in zip(keys, cells, paths, texts, strict=True):
            where: int | None = -1
            if content is not None:
                info: ImageInfo | None = ImageInfo(content.size, *image_size(pa.BufferReader(content)))
                where = offset if table.content is None else table.offset(content)
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


def _path(base: str, cell: tuple[pa.Buffer | None, str | None], report: Callable[[str], None]) -> str | None:
    """The image file of a row, as `join` takes it; None where the image is in the table or cannot be used."""
    content, path = cell
    try:
        if content is None and path is None:
            raise BadSample("image is empty")
        return checked_path(base, path or "") if content is None else None
    except BadSample as error:
        report(str(error))
        return None


# --- Cells ---


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        kind = kind.value_type
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def is_metadata(kind: pa.DataType) -> bool:
    """Whether values of this type can be metadata or captions."""
    return _is_text(kind) or any(t(kind) for t in (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean))


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
    plain_types = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}
    return pa.float64() if pa.types.is_decimal(kind) else plain_types.get(kind, kind)


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


def _plain_texts(batch: pa.RecordBatch, report: Callable[[str], None]) -> list[dict[str, Any]]:
    """The rows. Columns of more than `MAX_TEXT_BYTES` per row are left empty: as Python objects a few bytes of a packed
    file would fill the memory."""
    columns = {}
    for name, column in zip(batch.schema.names, map(plain, batch.columns), strict=True):
        if column.nbytes > MAX_TEXT_BYTES * max(1, batch.num_rows):
            report(f"texts have too many bytes: column {name}")
            column = pa.nulls(batch.num_rows, column.type)
        columns[name] = column
    rows: list[dict[str, Any]] = pa.table(columns).to_pylist()
    return rows


def _image_cells(table: str, name: str, column: pa.Array) -> list[tuple[pa.Buffer | None, str | None]]:
    """Content, as a view of the file, and path of each cell."""
    column = plain(column)
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    kind, contents, paths = column.type, [None] * len(column), [None] * len(column)
    if pa.types.is_struct(kind):
        parts = dict(zip((field.name for field in kind), column.flatten(), strict=True))
        if parts.keys() & {"bytes", "path"}:
            contents = _views(parts["bytes"]) if "bytes" in parts else contents
            return list(zip(contents, parts["path"].to_pylist() if "path" in parts else paths, strict=True))
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return list(zip(_views(column), paths, strict=True))
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return list(zip(contents, column.to_pylist(), strict=True))
    raise DataError(
        f"dataset.params.image_column: column '{name}' of {table} is {kind}; it must hold image files (Image or "
        "binary) or paths"
    )


def _views(column: pa.Array) -> list[Any]:
    """The values of a binary column without copying them, as taking a scalar does."""
    _, places, data = column.buffers()
    if data is None:
        return [None] * len(column)
    kind = np.int64 if pa.types.is_large_binary(column.type) else np.int32
    ends = np.frombuffer(places, kind)[column.offset : column.offset + len(column) + 1].tolist()
    is_there = column.is_valid().to_pylist()
    return [data.slice(ends[i], ends[i + 1] - ends[i]) if is_there[i] else None for i in range(len(column))]


# --- Parquet ---


@contextmanager
def _opened_parquet(shard: Shard, access: Access, only_group: int | None = None) -> Iterator[_Table]:
    try:
        with closing(open_bytes(FileState(*shard), access)) as file, pq.ParquetFile(seekable(file)) as table:

            def batches(columns: Sequence[str]) -> Iterator[tuple[int | None, pa.RecordBatch]]:
                for group in range(table.num_row_groups) if only_group is None else [only_group]:
                    size = table.metadata.row_group(group).total_byte_size
                    if size > MAX_GROUP_BYTES:
                        raise DataError(
                            f"row group {group} of '{shown(shard.location)}' unpacks to {size:,} bytes, at most "
                            f"{MAX_GROUP_BYTES:,} are read at once; write the table with smaller row groups (pyarrow: "
                            "row_group_size=1000)"
                        )
                    for batch in table.iter_batches(ROWS_AT_ONCE, row_groups=[group], columns=list(columns)):
                        yield group, batch

            yield _Table(shard.location, table.schema_arrow, batches)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"'{shown(shard.location)}' is not a readable Parquet file: {error}") from error


def _unpacked(source: ArrowSource, index: IndexedShards, sample: int) -> LocalFile:
    """The images of the row group of a sample, one after the other, as a file of the shard cache."""
    shard = index.shards[index.numbers("unit")[sample]]
    group = int(index.numbers("at:group")[sample])
    name = f"{shown(shard.location)} row group {group}"

    def contents() -> Iterator[pa.Buffer]:
        """In the order in which the index counted their bytes. A generator, so that a full disk where they are written
        is not reported as damage of the table."""
        with _opened_parquet(shard, source.access, group) as table:
            image, _ = table.columns(source.wanted)
            for _, batch in table.batches([image]):
                for content, _ in _image_cells(shown(shard.location), image, batch.column(0)):
                    if content is not None:
                        yield content

    def produce(path: Path) -> None:
        with path.open("wb") as output:
            for content in contents():
                output.write(content)

    key = json.dumps(["parquet", *shard, group, *source.wanted])
    cache = shard_cache(source.access.cache_dir, source.access.cache_gib)
    return cache.open(key, produce, lambda path: LocalFile(str(path), name))


# --- Saved data sets ---


@contextmanager
def _opened_stream(shard: Shard, access: Access) -> Iterator[_Table]:
    try:
        if is_remote(shard.location):
            with closing(open_bytes(shard.location, access)) as file:
                content = pa.py_buffer(file.pread(file.size, 0))
        else:
            content = pa.memory_map(shard.location).read_buffer()
        if content.size < len(_END) or content.slice(content.size - len(_END)).to_pybytes() != _END:
            raise pa.ArrowInvalid("truncated, or not an Arrow stream")  # pyarrow takes a cut between parts for the end
        with pa.ipc.open_stream(content) as stream:

            def batches(columns: Sequence[str]) -> Iterator[tuple[int | None, pa.RecordBatch]]:
                return ((None, batch.select(list(columns))) for batch in stream)

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
    name = f"dataset.params.path: '{shown(folder)}'"
    state = _read_json(f"{folder}/state.json", access)
    if state is None:
        splits = (_read_json(f"{folder}/dataset_dict.json", access) or {}).get("splits")
        if splits:
            raise DataError(f"{name} holds several splits; add one to the path: {printable(json.dumps(splits))}")
        raise DataError(f"{name} is not a folder written by save_to_disk: it has no state.json")
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise DataError(f"{name} was saved with a table of row numbers, by an old version of datasets; save it again")
    try:
        names = [str(entry["filename"]) for entry in state.get("_data_files") or []]
    except (TypeError, KeyError):
        names = ["/"]
    if any(posixpath.basename(name) != name or not name.isprintable() for name in names):
        raise DataError(f"'{shown(folder)}/state.json': '_data_files' must name Arrow files beside it")
    return [f"{folder}/{name}" for name in names]


def _read_json(location: str, access: Access) -> dict[str, Any] | None:
    """A JSON object; None where there is no such file."""
    state = find_state(location, access) if is_remote(location) or exists(location) else None
    if state is None:
        return None
    try:
        if state.size > _MAX_JSON_BYTES:
            raise ValueError(f"{state.size:,} bytes, at most {_MAX_JSON_BYTES:,} are read")
        with closing(open_bytes(state, access)) as file:
            value = json.loads(file.pread(file.size, 0))
        if not isinstance(value, dict):
            raise ValueError("it holds no JSON object")
        return value
    except (ValueError, RecursionError) as error:
        raise DataError(f"'{shown(location)}' is not JSON as save_to_disk writes it: {error}") from error


def _hub_files(path: str) -> list[str]:
    parts = urlsplit(path)
    options = dict(parse_qsl(parts.query))
    if unknown := options.keys() - {"split", "name", "revision"}:
        raise ConfigError(f"dataset.params.path: '{path}': unknown {min(unknown)}; write split, name or revision")
    try:
        import datasets
    except ImportError:
        datasets = None
    if datasets is None or int(datasets.__version__.partition(".")[0]) < 4:  # older ones run scripts of a data set
        raise ConfigError(
            f"dataset.params.path: '{path}' is a data set of the Hugging Face hub, which needs a package: "
            "pip install 'datasets>=4.0'"
        )
    repository = f"{parts.netloc}{parts.path}".removeprefix("datasets/").strip("/")
    try:
        found = datasets.load_dataset(repository, split=options.pop("split", "train"), **options)
    except Exception as error:  # of many libraries below it
        raise DataError(f"dataset.params.path: '{path}' cannot be loaded by datasets: {error}") from error
    return [str(file["filename"]) for file in found.cache_files]
