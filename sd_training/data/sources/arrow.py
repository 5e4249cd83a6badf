"""Arrow tables with images as bytes or as paths: Parquet files, and data sets saved by the `datasets` library.

Captions and metadata are in the index; training reads single images, in the order of the run.

- Parquet is read by row groups. The images of a row group are unpacked once per machine into one file of the shard
  cache, and read from there by offset. The cache (`dataset.params.remote.cache_dir`, `.cache_gib`) needs room for the
  row groups of a window; row groups are the blocks of the order, so a window is worked through before its files go.
  Indexing and unpacking hold one row group at a time, as stored and unpacked: a process needs some 70 MB and 3 to 4
  times the largest row group, for any size of the table (pyarrow 26).
- A saved data set is a list of Arrow stream files. The index keeps where in its file each image lies. No file is mapped
  while training, where a disk's failure would end the process, and `datasets` with pandas and dill (87 MB per process,
  datasets 5.2) is only imported to find the files of a data set of the Hugging Face hub.
"""

import json
import mmap
import posixpath
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sd_training.config.data_schema import RemoteConfig
from sd_training.data.sources import base
from sd_training.data.sources.base import Report, Row, Shard, read_scalars
from sd_training.data.storage.files import HUB, ByteFile, FileMissing, ShardCache, file_states, open_bytes, shown
from sd_training.errors import BadSample, ConfigError, DataError

IMAGE_COLUMNS = ("image", "jpg", "jpeg", "png", "webp", "img", "image_bytes", "bytes")
PATH_COLUMNS = ("image_path", "img_path", "path", "file_name", "filename", "filepath", "image_file", "file")
_CAPTION_COLUMNS = ("caption", "text", "txt", "prompt", "description", "title")
ROWS_AT_ONCE = 64
"""Rows of Parquet that are Python objects at the same time."""
MAX_GROUP_BYTES = 4 << 30
"""Larger row groups are refused [bytes, unpacked, as the file says]."""
_TEXTS = (pa.string(), pa.large_string())
_END = b"\xff\xff\xff\xff\0\0\0\0"
"""Of every Arrow stream."""


Columns = tuple[str | None, str | None]
"""Image and caption column that the user named; None looks for usual names."""


def pick_columns(table: str, names: Sequence[str], image_names: Sequence[str], wanted: Columns) -> tuple[str, str]:
    """The image column and the caption column.

    Args:
        table: what a message calls the table.
        names: its columns.
        image_names: usual names of the image column, the most likely one first; case does not matter.
        wanted: what the user named.

    Raises:
        ConfigError: a column is missing, the table's columns are named; or both are the same.
    """
    known = {name.strip().lower(): name for name in reversed(names)}

    def one(option: str, given: str | None, usual: Sequence[str]) -> str:
        found = next((known[name] for name in usual if name in known), None) if given is None else given
        if found is None or found not in names:
            missing = f"no column {given!r}" if given else f"none of the columns {', '.join(usual)}"
            raise ConfigError(f"dataset.params.{option}: {table} has {missing}; it has {', '.join(names) or 'none'}")
        return found

    picked = one("image_column", wanted[0], image_names), one("caption_column", wanted[1], _CAPTION_COLUMNS)
    if picked[0] == picked[1]:
        raise ConfigError(f"dataset.params.caption_column: {picked[0]!r} is the image column of {table} already")
    return picked


class ArrowSource(base.Source):
    """The source of Arrow tables; one shard per file.

    The image column holds image files (binary, `Image()`, `struct{bytes, path}`) or paths (see `checked_path`), the
    caption column texts or lists of texts. All other columns of numbers, texts and lists of texts, and the caption
    column, are metadata.

    Args:
        paths: Parquet files; or, with `saved`, what `saved_files` takes.
        access: how remote files are read, and where row groups are unpacked.
        wanted: columns.
        saved: whether the paths are data sets of the `datasets` library.
    """

    shard_noun = "file"

    def __init__(
        self, paths: Sequence[str], access: RemoteConfig, wanted: Columns = (None, None), saved: bool = False
    ) -> None:
        super().__init__(paths, access)
        self.saved, self.wanted = saved, wanted
        self.identity = json.dumps(["huggingface" if saved else "parquet", *wanted])
        self.columns = ("at:image_offset",) if saved else ("at:image_offset", "at:group", "block")

    def shards(self) -> list[Shard]:
        """As `Source.shards`."""
        if not self.saved:
            return super().shards()
        files = list(dict.fromkeys(file for path in self.paths for file in saved_files(path, self.access)))
        if not files:
            raise DataError(f"dataset.params.path: no Arrow file in {', '.join(map(shown, self.paths)) or 'no folder'}")
        return file_states(files, self.access)

    def rows(self, shard: Shard, report: Report) -> Iterator[Row]:
        """As `Source.rows`: all that have an image."""
        location, folder = shown(shard.location), self.image_root(shard)
        number, unpacked, last_group = 0, 0, None
        with _opened(shard, self.access, self.saved) as table:
            image, caption = pick_columns(location, table.schema.names, IMAGE_COLUMNS + PATH_COLUMNS, self.wanted)
            kinds = {field.name: _plain_type(field.type) for field in table.schema if field.name != image}
            if not _holds_texts(table.schema.field(caption).type):
                raise ConfigError(
                    f"dataset.params.caption_column: column '{caption}' of {location} is {kinds[caption]}; it must "
                    "hold texts or lists of texts"
                )
            names = [name for name, kind in kinds.items() if _is_metadata(kind) or name == caption]
            for group, batch in table.batches([*names, image]):
                if group != last_group:
                    unpacked, last_group = 0, group
                cells, paths = _image_cells(location, image, batch[image]), list[tuple[str, int, str]]()
                for row, (content, path) in enumerate(cells):
                    if content is None:
                        try:
                            paths.append((f"row {number + row}", row, base.checked_path(folder, path or "")))
                        except BadSample as error:
                            report(f"row {number + row}", str(error))
                files = {row: columns for _, row, columns in self.measured(shard, paths, report)}
                texts = pa.table({name: batch[name].cast(kinds[name]) for name in names}).to_pylist()
                for row, ((content, _), values) in enumerate(zip(cells, texts, strict=True)):
                    if content is not None:
                        columns = base.image_columns(pa.BufferReader(content), content.size)
                        offset = unpacked if table.content is None else _offset(content, table.content, location)
                        columns["at:image_offset"] = offset
                        unpacked += content.size
                    elif row in files:
                        columns = files[row] | {"at:image_offset": -1}
                    else:
                        continue
                    columns |= {"key": f"row {number + row}", "at:group": group, "block": group}
                    yield {**columns, "metadata": read_scalars(values), "caption": base.caption_of(values[caption])}
                number += batch.num_rows

    def open_group(self, shard: Shard, group: int) -> ByteFile:
        """As `Source.open_group`: of Parquet the images of a row group, one after the other, in the shard cache."""
        if self.saved:
            return super().open_group(shard, group)
        name = shown(shard.location)

        def contents() -> Iterator[pa.Buffer]:
            """In the order in which the index counted their bytes. A generator, so that a full disk where they are
            written is not reported as damage of the table."""
            with _opened(shard, self.access, self.saved, group) as table:
                image, _ = pick_columns(name, table.schema.names, IMAGE_COLUMNS + PATH_COLUMNS, self.wanted)
                for _, batch in table.batches([image]):
                    cells = _image_cells(name, image, batch[image])
                    yield from (content for content, _ in cells if content is not None)

        def produce(path: Path) -> None:
            with path.open("wb") as output:
                output.writelines(contents())

        key = json.dumps(["parquet", *shard, group, *self.wanted])
        return ShardCache(self.access).open(key, produce, f"{name} row group {group}")


class _Table(NamedTuple):
    """An open file."""

    schema: pa.Schema
    batches: Callable[[Sequence[str]], Iterator[tuple[int | None, pa.RecordBatch]]]
    """Columns to read → (row group or None, batch)."""
    content: pa.Buffer | None = None
    """Of a stream: the whole file, which its images are views of."""


@contextmanager
def _opened(shard: Shard, access: RemoteConfig, saved: bool, only_group: int | None = None) -> Iterator[_Table]:
    name = shown(shard.location)
    try:
        with closing(open_bytes(shard, access)) as file:
            if saved:
                if file.size < len(_END) or file.pread(len(_END), file.size - len(_END)) != _END:
                    # pyarrow takes a cut between parts for the end
                    raise pa.ArrowInvalid("truncated, or not an Arrow stream")
                content = pa.py_buffer(mmap.mmap(file.stream.fileno(), 0, access=mmap.ACCESS_READ))
                with pa.ipc.open_stream(content) as stream:
                    yield _Table(stream.schema, lambda names: ((None, part.select(names)) for part in stream), content)
            else:
                with pq.ParquetFile(file.stream) as table:
                    yield _Table(table.schema_arrow, partial(_row_groups, name, table, only_group))
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        kind = "Arrow" if saved else "Parquet"
        raise DataError(f"'{name}' is not a readable {kind} file: {error}") from error


def _row_groups(
    name: str, table: pq.ParquetFile, only: int | None, columns: Sequence[str]
) -> Iterator[tuple[int, pa.RecordBatch]]:
    for group in range(table.num_row_groups) if only is None else [only]:
        if (size := table.metadata.row_group(group).total_byte_size) > MAX_GROUP_BYTES:
            raise DataError(
                f"row group {group} of '{name}' unpacks to {size:,} bytes, at most {MAX_GROUP_BYTES:,} are read at "
                "once; write the table with smaller row groups (pyarrow: row_group_size=1000)"
            )
        for batch in table.iter_batches(ROWS_AT_ONCE, row_groups=[group], columns=list(columns)):
            yield group, batch


def _offset(image: pa.Buffer, file: pa.Buffer, location: str) -> int:
    """Where an image of a saved data set begins in its file."""
    offset = int(image.address - file.address)
    if not 0 <= offset <= file.size - image.size:
        raise DataError(f"'{location}' is a compressed Arrow file; save_to_disk writes plain ones: save it again")
    return offset


# --- Cells ---


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        kind = kind.value_type
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _holds_texts(kind: pa.DataType) -> bool:
    """Whether a column can be that of the captions."""
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        kind = kind.value_type
    return pa.types.is_null(kind) or _is_text(_plain_type(kind))


def _is_metadata(kind: pa.DataType) -> bool:
    return _is_text(kind) or any(t(kind) for t in (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean))


def _plain_type(kind: pa.DataType) -> pa.DataType:
    """The type that holds the same values without dictionaries (pandas' categories), views and decimals."""
    if pa.types.is_dictionary(kind):
        return _plain_type(kind.value_type)
    # pandas writes null where no row has bytes.
    plain_types = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary(), pa.null(): pa.binary()}
    return pa.float64() if pa.types.is_decimal(kind) else plain_types.get(kind, kind)


def _image_cells(table: str, name: str, column: pa.Array) -> list[tuple[pa.Buffer | None, str | None]]:
    """Content, as a view of the file, and path of each cell."""
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    parts = {"bytes": column, "path": column}
    if pa.types.is_struct(column.type):
        parts = dict(zip((field.name for field in column.type), column.flatten(), strict=True))
    parts = {part: parts[part].cast(_plain_type(parts[part].type)) for part in ("bytes", "path") if part in parts}
    nothing: list[Any] = [None] * len(column)
    has_bytes = "bytes" in parts and parts["bytes"].type in (pa.binary(), pa.large_binary())
    has_paths = "path" in parts and parts["path"].type in _TEXTS
    if not has_bytes and not has_paths:
        raise DataError(
            f"dataset.params.image_column: column '{name}' of {table} is {column.type}; it must hold image files "
            "(Image or binary) or paths"
        )
    contents = _views(parts["bytes"]) if has_bytes else nothing
    return list(zip(contents, parts["path"].to_pylist() if has_paths else nothing, strict=True))


def _views(column: pa.Array) -> list[Any]:
    """The values of a binary column without copying them, as taking a scalar does."""
    _, places, data = column.buffers()
    if data is None:
        return [None] * len(column)
    kind = np.int64 if pa.types.is_large_binary(column.type) else np.int32
    ends = np.frombuffer(places, kind)[column.offset : column.offset + len(column) + 1].tolist()
    is_there = column.is_valid().to_pylist()
    return [data.slice(ends[i], ends[i + 1] - ends[i]) if is_there[i] else None for i in range(len(column))]


# --- Saved data sets ---


def saved_files(path: str, access: RemoteConfig) -> list[str]:
    """The Arrow files of a data set, in order.

    Args:
        path: a folder of `Dataset.save_to_disk`, local or remote (of a `DatasetDict` the folder of one split); or
            `hf://datasets/OWNER/NAME`, perhaps with `?split=…&name=…&revision=…`, which the `datasets` library
            downloads.
        access: how remote files are read.

    Raises:
        DataError: it is not such a data set.
        ConfigError: the `datasets` library is missing.
    """
    if path.startswith(HUB):
        return _hub_files(path)
    folder = path.rstrip("/")
    try:
        with closing(open_bytes(f"{folder}/state.json", access)) as file:
            state = json.loads(file.pread(file.size, 0))
        names = [posixpath.basename(entry["filename"]) for entry in state["_data_files"]]  # files beside it only
        if not all(map(str.isprintable, names)):
            raise ValueError(f"names {names}")
        return [f"{folder}/{name}" for name in names]
    except FileMissing as error:
        raise DataError(
            f"dataset.params.path: '{shown(folder)}' is not a folder written by save_to_disk (of a DatasetDict, name "
            f"the folder of one split): {error}"
        ) from error
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise DataError(f"'{shown(folder)}/state.json' does not name files as save_to_disk does: {error!r}") from error


def _hub_files(path: str) -> list[str]:
    parts = urlsplit(path)
    options = dict(parse_qsl(parts.query))
    if unknown := options.keys() - {"split", "name", "revision"}:
        raise ConfigError(f"dataset.params.path: '{path}': unknown {min(unknown)}; write split, name or revision")
    try:
        import datasets

        if int(datasets.__version__.partition(".")[0]) < 4:
            raise ImportError("older ones run scripts of a data set")
    except ImportError:
        raise ConfigError(
            f"dataset.params.path: '{path}' is a data set of the Hugging Face hub, which needs a package: "
            "pip install 'datasets>=4.0'"
        ) from None
    repository = f"{parts.netloc}{parts.path}".removeprefix("datasets/").strip("/")
    try:
        found = datasets.load_dataset(repository, split=options.pop("split", "train"), **options)
    except Exception as error:  # of many libraries below it
        raise DataError(f"dataset.params.path: '{path}' cannot be loaded by datasets: {error}") from error
    return [str(file["filename"]) for file in found.cache_files]
