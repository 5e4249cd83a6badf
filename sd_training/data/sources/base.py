"""The contract of every kind of data set: shards to index, rows of a shard, and the reader of single samples.

A source lists its shards (files or folders), gives the rows of one, and the samples of the finished index are read:
images and captions inside shards, or in files of their own. The order, filters, buckets and captions never know which
kind of source they work on. Which paths of a table are followed is decided when the data is indexed (`checked_path`);
an index from a folder names only files that were found in it.
"""

import json
import os
import posixpath
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import islice
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

import pyarrow as pa

from sd_training.data.index.columns import Scalar, captions_in, metadata_columns, read_metadata, storable
from sd_training.data.index.dataset_index import DatasetIndex
from sd_training.data.problems import BadSample, Problems, SkippedSample
from sd_training.data.samples.image import image_size
from sd_training.data.storage.files import file_states, open_bytes
from sd_training.data.storage.locations import Access, ByteFile, FileMissing, FileState, is_remote, shown
from sd_training.errors import DataError

IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp")
MAX_IMAGE_BYTES = 1 << 28
"""Larger images are not read, neither for their size nor in training."""
MAX_TEXT_BYTES = 1 << 20
"""Larger caption, class and metadata files and members are refused."""
ROWS_AT_ONCE = 512
"""Rows that become one part of the columns at once."""
MAX_OPEN_FILES = 64
"""Shards kept open per process."""
_THREADS = 8
_MEASURED_AT_ONCE = 4096
UNSTORABLE = re.compile("[\0\ud800-\udfff]")
"""What no path in the index may hold: Arrow's texts are UTF-8, and no file has such a name."""
_CHANGED = "touch the table or metadata file that names it, if one does, and start again to index it anew"
T = TypeVar("T")

Shard = FileState
"""A file or folder that is indexed as a whole, and again when its size or version changes. The version of a folder is a
hash of its listing."""
Row = dict[str, Any]
"""One sample of a shard: column of `COLUMNS` → value, where it has one, and `metadata`, name → value."""
Report = Callable[[str, str], None]
"""Names a problem of a shard: (key of the sample or empty, reason)."""
COLUMNS = pa.schema(
    {
        "key": pa.large_string(),
        "at:image": pa.large_string(),
        "at:image_offset": pa.int64(),
        "at:image_length": pa.int64(),
        "width": pa.int32(),
        "height": pa.int32(),
        "at:group": pa.int32(),
        "block": pa.int32(),
        "caption": pa.large_string(),
        "at:caption": pa.large_string(),
        "at:caption_offset": pa.int64(),
        "caption_length": pa.int64(),
        "check:caption": pa.int64(),
        "cls": pa.large_string(),
    }
)
"""`width` and `height` are those of the upright image [pixels], 0 when unknown. `at:…` hold where the reader finds a
sample: `at:image` and `at:caption` are files, as `join` takes them, `at:image_offset` and `at:caption_offset` count in
the shard or row group `at:group` [bytes], -1 where it is not there. `caption` is a text that is kept in the index.
`caption_length` is -1 without a caption [bytes]. `block` numbers the parts of the shard that are read together (row
groups), ascending. `cls` is the class. Columns `check:…`, such as checksums, only count for the fingerprint and are not
kept; the length of a caption in the shard alone does not distinguish it from another one."""
_REQUIRED = {"key", "at:image_length", "width", "height", "caption_length"}


class ShardScan(NamedTuple):
    """The samples of one shard as columns of equal length, in a fixed order."""

    columns: dict[str, pa.Array]
    problems: Problems


class Source:
    """One kind of data set at one place. Small and picklable: it is sent to index processes.

    Args:
        paths: of files or folders, local or remote.
        access: how remote ones are read.
    """

    columns: Sequence[str] = ()
    """Optional columns that also exist where no row has a value."""

    def __init__(self, paths: Sequence[str], access: Access) -> None:
        self.paths, self.access = list(paths), access

    @property
    def identity(self) -> str:
        """Everything besides the shard that decides what `scan` returns; a change of it indexes anew."""
        raise NotImplementedError

    def shards(self) -> list[Shard]:
        """All shards in a fixed order. Raises DataError when there are none, or one cannot be found."""
        return file_states(self.paths, self.access)

    def image_root(self, shard: Shard) -> str:
        """The folder that paths of a shard's rows start from."""
        return folder_of(shard.location)

    def rows(self, shard: Shard, report: Report) -> Iterator[Row]:
        """The samples of a shard. Damage and what is left out is reported; OSError and DataError are passed on."""
        raise NotImplementedError

    def open_group(self, shard: Shard, group: int) -> ByteFile:
        """What `at:image_offset` of the samples of a row group counts in: the shard."""
        return open_bytes(shard, self.access)

    def scan(self, shard: Shard) -> ShardScan:
        """Indexes one shard, part by part: few rows are Python objects at the same time."""
        problems, parts = Problems(), [COLUMNS.empty_table()]

        def report(key: str, reason: str) -> None:
            problems.add(SkippedSample(shown(shard.location), storable(key), storable(reason)))

        rows = self.rows(shard, report)
        while part := list(islice(rows, ROWS_AT_ONCE)):
            for row in part:
                row.setdefault("caption_length", length_of(row.get("caption")))
                if not row["width"]:
                    report(row["key"], "image size cannot be told")
            table = pa.Table.from_pylist(part, COLUMNS)
            for name, values in metadata_columns([row.get("metadata", {}) for row in part]).items():
                table = table.append_column(name, values)
            parts.append(table)
        table = pa.concat_tables(parts, promote_options="default")
        empty = {name for name in COLUMNS.names if table[name].null_count == table.num_rows}
        unused = empty.difference(_REQUIRED, self.columns)
        return ShardScan({n: table[n].combine_chunks() for n in table.column_names if n not in unused}, problems)

    def reader(self, index: DatasetIndex) -> "IndexedReader":
        """The reader of the samples of `index`, which was made from this source."""
        return IndexedReader(index, self)

    def measured(
        self, shard: Shard, found: Iterable[tuple[str, T, str]], report: Report
    ) -> Iterator[tuple[str, T, Row]]:
        """Yields (name for reports, anything, image columns) for (name, anything, image path); reports missing files.

        Several headers are read at once.
        """
        root, rows = self.image_root(shard), iter(found)

        def one(path: str) -> Row | None:
            try:
                with closing(open_bytes(join(root, path), self.access)) as file:
                    return {"at:image": path, **image_columns(file.stream, file.size)}
            except FileMissing:
                return None

        with ThreadPoolExecutor(_THREADS) as pool:
            while part := list(islice(rows, _MEASURED_AT_ONCE)):
                for (name, item, path), columns in zip(part, pool.map(one, [p for _, _, p in part]), strict=True):
                    if columns is None:
                        report(name, f"image file missing: {shown(path)}")
                    else:
                        yield name, item, columns


def image_columns(file: Any, length: int) -> Row:
    """The columns about the size of an image file of `length` bytes."""
    width, height = image_size(file) if length <= MAX_IMAGE_BYTES else (0, 0)
    return {"at:image_length": length, "width": width, "height": height}


def metadata_of(key: str, content: bytes, report: Report) -> dict[str, Scalar]:
    """The metadata that a JSON file holds; none, and a report, where it is no object."""
    try:
        return read_metadata(content.decode("utf-8-sig", "replace"))
    except (ValueError, RecursionError):
        report(key, "metadata is not a JSON object")
        return {}


def caption_of(value: object) -> str | None:
    """A cell as a caption; a list of texts, of which each read draws one, is kept as JSON. None without any text."""
    entries = value if isinstance(value, list) else [value]
    texts = [storable(entry.strip()) for entry in entries if isinstance(entry, str) and entry.strip()]
    return json.dumps(texts, ensure_ascii=False) if len(texts) > 1 else next(iter(texts), None)


def length_of(caption: str | None) -> int:
    """As `caption_length` [bytes]: of the longest, where there are several."""
    return max((len(entry.encode()) for entry in captions_in(caption)), default=-1)


def folder_of(location: str) -> str:
    """The folder, or its URL, of a table; without links, so that `..` has the meaning of the file system."""
    if location.startswith(("http://", "https://")):
        location = location.partition("?")[0]
    folder = location.rpartition("/")[0]
    return folder if is_remote(location) else os.path.realpath(folder)


def join(base: str, path: str) -> str:
    """Location of a file of the index. `base` is a folder; `path` is relative to it, or absolute."""
    if path.startswith("/"):
        return path
    if not is_remote(base):
        return os.path.normpath(f"{base}/{path}")  # not by the file system: `..` goes back through a linked folder
    return f"{base}/{quote(path) if base.startswith('http') else path}"


def checked_path(base: str, path: str) -> str:
    """An image path of a table as `join` takes it.

    Args:
        base: folder of the table.
        path: as it is written.

    Raises:
        BadSample: the path of a remote table leads out of its folder, or it is not a path.
        DataError: a URL.
    """
    if not path or UNSTORABLE.search(path):
        raise BadSample("image path is not a file name" if path else "image is empty")
    if "://" in path:
        raise DataError(
            f"the table in '{shown(base)}' names the image '{shown(path)}'; only paths relative to the table, or local "
            "ones, are read. Download the images first and name the files"
        )
    plain = path if path.startswith("/") else posixpath.normpath(path)
    if is_remote(base) and (plain.startswith("/") or plain.split("/")[0] == ".."):
        raise BadSample(f"image path leads out of the folder of its remote table: {path}")
    return plain


class IndexedReader:
    """Reads single samples. Copied into loader processes, so it holds no open files when it is pickled.

    A caption file is read as one line. A file that was removed or changed after it was indexed makes its sample a bad
    one.

    Args:
        index: made from the source.
        source: knows where images and row groups lie.
    """

    def __init__(self, index: DatasetIndex, source: Source) -> None:
        self.index, self.source = index, source
        self._roots = [source.image_root(shard) for shard in index.shards]
        self._open: OrderedDict[int, ByteFile] = OrderedDict()

    def image(self, sample: int) -> bytes:
        """A JPEG, PNG or WebP file, byte for byte. Raises BadSample (skip it) or DataError (stop)."""
        length = self._number("at:image_length", sample)
        if length > MAX_IMAGE_BYTES:
            raise BadSample(f"image has too many bytes: {length}")
        path = self.index.text("at:image", sample)
        if path is not None:
            return self._read_file(sample, path, length, "image")
        return self._container(sample).pread(length, self._number("at:image_offset", sample))

    def caption(self, sample: int) -> str:
        """The caption: the index's text, else the text file or member. Raises as `image` does; BadSample also where
        there is none, and of other encodings than UTF-8, which would train on wrong letters."""
        text = self.index.text("caption", sample)
        if text is not None:
            return text
        length = self._number("caption_length", sample)
        if length > MAX_TEXT_BYTES:
            raise BadSample(f"caption has too many bytes: {length}")
        path = self.index.text("at:caption", sample)
        try:
            if (offset := self._number("at:caption_offset", sample)) >= 0:
                return self._container(sample).pread(length, offset).decode("utf-8-sig").strip()
            if path is not None:
                return " ".join(self._read_file(sample, path, length, "caption").decode("utf-8-sig").split())
        except UnicodeDecodeError as error:
            raise BadSample("caption is not UTF-8 text") from error
        raise BadSample("caption missing")

    def _number(self, column: str, sample: int) -> int:
        """A value of an integer column; -1 where there is no such column."""
        return int(self.index.numbers(column)[sample]) if column in self.index.columns.column_names else -1

    def _read_file(self, sample: int, path: str, length: int, what: str) -> bytes:
        try:
            root = self._roots[self._number("unit", sample)]
            with closing(open_bytes(join(root, path), self.source.access)) as file:
                if file.size != length:
                    raise BadSample(f"{what} file has changed since it was indexed: {shown(path)}; {_CHANGED}")
                return file.pread(length, 0)
        except FileMissing as error:
            raise BadSample(f"{what} file missing: {shown(path)}") from error

    def _container(self, sample: int) -> ByteFile:
        """The shard or row group that holds a sample; the last few stay open."""
        block = self._number("block", sample)
        if block not in self._open:
            if len(self._open) >= MAX_OPEN_FILES:
                self._open.popitem(last=False)[1].close()
            shard = self.index.shards[self._number("unit", sample)]
            self._open[block] = self.source.open_group(shard, self._number("at:group", sample))
        self._open.move_to_end(block)
        return self._open[block]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": OrderedDict()}
