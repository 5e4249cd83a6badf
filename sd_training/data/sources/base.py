"""The contract of every kind of data set: shards to index, rows of a shard, and the reader of single samples.

A source lists its shards (files or folders), scans one into rows, and reads the samples of the finished index: images
and captions inside shards, or in files of their own. The order, filters, buckets and captions never know which kind of
source they work on. Which paths of a table are followed is decided when the data is indexed (`checked_path`); an index
from a folder names only files that were found in it.
"""

import json
import os
import posixpath
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter
from typing import Any, NamedTuple, Protocol
from urllib.parse import quote

import pyarrow as pa
from numpy.typing import NDArray

from sd_training.data.index.columns import Scalar, captions_in, metadata_columns, storable
from sd_training.data.problems import BadSample, Problems, SkippedSample
from sd_training.data.samples.image import image_size
from sd_training.data.storage.byte_file import Access, ByteFile, FileMissing, FileState, seekable
from sd_training.data.storage.files import open_bytes
from sd_training.data.storage.locations import is_remote, shown
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
_HEADER_BUFFER = 4096
"""Bytes read at once where an image's size is looked up; the sizes of most files are in the first block."""
_UNSTORABLE = re.compile("[\0\ud800-\udfff]")
_CHANGED = "touch the table or metadata file that names it, if one does, and start again to index it anew"


Shard = FileState
"""A file or folder that is indexed as a whole, and again when its size or version changes. The version of a folder is a
hash of its listing."""


@dataclass
class ShardScan:
    """The samples of one shard as columns of equal length, in a fixed order.

    `key` (text) is required. `width` and `height` are those of the upright image [pixels], 0 when unknown;
    `caption_length` is -1 without a caption [bytes]; `cls` is the class as text or null; `block` numbers the parts of
    the shard that are read together (row groups), ascending; `caption` (text) is for captions kept in the index.
    Columns `at:…` hold where the reader finds a sample; columns `check:…`, such as checksums, only count for the
    fingerprint and are not kept. Metadata columns are made by `metadata_columns`. `collect` makes all of them.
    """

    columns: dict[str, pa.Array]
    problems: Problems


class IndexedShards(Protocol):
    """What a reader needs of the index of its source."""

    shards: list[Shard]
    columns: pa.Table

    def numbers(self, column: str) -> NDArray[Any]:
        """[N] an integer column."""

    def text(self, column: str, sample: int) -> str | None:
        """A value of a text column; None where it is null or no shard has the column."""


class Source(Protocol):
    """One kind of data set at one place. Small and picklable: it is sent to index processes."""

    @property
    def identity(self) -> str:
        """Everything besides the shard that decides what `scan` returns; a change of it indexes anew."""

    def shards(self) -> Sequence[Shard]:
        """All shards in a fixed order. Raises DataError when there are none, or one cannot be found."""

    def scan(self, shard: Shard) -> ShardScan:
        """Indexes one shard. Damage is named in the problems; OSError and DataError are passed on."""

    def reader(self, index: IndexedShards) -> "IndexedReader":
        """The reader of the samples of `index`, which was made from this source."""


class ImageInfo(NamedTuple):
    """An image as far as its header shows."""

    length: int
    """[bytes]."""
    width: int
    height: int
    """Of the upright image [pixels]; 0 when unknown."""


@dataclass
class Row:
    """One sample of a shard."""

    key: str
    info: ImageInfo
    metadata: Mapping[str, Scalar] = field(default_factory=dict)
    image: str | None = None
    """`at:image`: the image file, as `join` takes it; None where the image is a part of the shard."""
    offset: int | None = None
    """`at:image_offset` in the shard or row group [bytes]; -1 where the image is a file of its own."""
    group: int | None = None
    """`at:group` and `block`: the row group."""
    caption: str | None = None
    """A text that is kept in the index."""
    caption_file: str | None = None
    """`at:caption`: a text file, as `image`."""
    caption_offset: int | None = None
    """`at:caption_offset` in the shard [bytes]; -1 without a caption there."""
    caption_length: int | None = None
    """[bytes]; None: that of `caption`."""
    caption_crc: int | None = None
    """`check:caption`: the length of a caption in the shard alone does not distinguish it from another one."""
    cls: str | None = None

    def __post_init__(self) -> None:
        if self.caption_length is None:
            self.caption_length = length_of(self.caption)


Report = Callable[[str, str], None]
"""Names a problem of a shard: (key of the sample or empty, reason)."""


def collect(location: str, scan: Callable[[Report], Iterable[Row]], columns: Sequence[str] = ()) -> ShardScan:
    """Turns the rows of a shard into columns, part by part: few rows are Python objects at the same time.

    Args:
        location: of the shard, for messages.
        scan: yields the rows and reports what is left out.
        columns: optional ones that also exist where no row has a value.
    """
    problems = Problems()

    def report(key: str, reason: str) -> None:
        problems.add(SkippedSample(location, storable(key), storable(reason)))

    rows, parts = iter(scan(report)), [_table([])]
    while part := list(islice(rows, ROWS_AT_ONCE)):
        for row in part:
            if not row.info.width:
                report(row.key, "image size cannot be told")
        parts.append(_table(part))
    table = pa.concat_tables(parts, promote_options="default")
    empty = {name for name in _COLUMNS if table[name].null_count == table.num_rows}
    unused = empty.difference(_REQUIRED, columns)
    return ShardScan({n: table[n].combine_chunks() for n in table.column_names if n not in unused}, problems)


_COLUMNS: Mapping[str, tuple[str, pa.DataType]] = {
    "key": ("key", pa.large_string()),
    "at:image": ("image", pa.large_string()),
    "at:image_offset": ("offset", pa.int64()),
    "at:image_length": ("info.length", pa.int64()),
    "width": ("info.width", pa.int32()),
    "height": ("info.height", pa.int32()),
    "at:group": ("group", pa.int32()),
    "block": ("group", pa.int32()),
    "caption": ("caption", pa.large_string()),
    "at:caption": ("caption_file", pa.large_string()),
    "at:caption_offset": ("caption_offset", pa.int64()),
    "caption_length": ("caption_length", pa.int64()),
    "check:caption": ("caption_crc", pa.int64()),
    "cls": ("cls", pa.large_string()),
}
"""Column → attribute of a `Row`, and type."""
_REQUIRED = {"key", "at:image_length", "width", "height", "caption_length"}


def _table(rows: Sequence[Row]) -> pa.Table:
    columns = {name: pa.array(map(attrgetter(of), rows), kind) for name, (of, kind) in _COLUMNS.items()}
    return pa.table(columns | metadata_columns([row.metadata for row in rows]))


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
    if not path or _UNSTORABLE.search(path):
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


def measure(locations: Sequence[str], access: Access) -> list[ImageInfo | None]:
    """Reads the headers of image files, several at once; None where there is no such file. DataError is passed on."""

    def one(location: str) -> ImageInfo | None:
        try:
            with closing(open_bytes(location, access)) as file:
                return image_info(file, 0, file.size)
        except FileMissing:
            return None

    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(one, locations))


def image_info(file: ByteFile, offset: int, length: int) -> ImageInfo:
    """Length and size of an image that lies in `file`."""
    if length > MAX_IMAGE_BYTES:
        return ImageInfo(length, 0, 0)
    return ImageInfo(length, *image_size(seekable(file, offset, length, _HEADER_BUFFER)))


class IndexedReader:
    """Reads single samples. Copied into loader processes, so it holds no open files when it is pickled.

    A caption file is read as one line. A file that was removed or changed after it was indexed makes its sample a bad
    one.

    Args:
        index: made from the source.
        access: how remote files are read.
        bases: per shard, the folder that relative paths start from; empty where no sample is in a file of its own.
        unpack: opens the row group of a sample in which `at:image_offset` counts; None: offsets are those of the shard.
    """

    def __init__(
        self,
        index: IndexedShards,
        access: Access,
        bases: Sequence[str] = (),
        unpack: Callable[[IndexedShards, int], ByteFile] | None = None,
    ) -> None:
        self.index, self.access, self.bases, self.unpack = index, access, bases, unpack
        self.has_caption_members = "at:caption_offset" in index.columns.column_names
        self._open: OrderedDict[int, ByteFile] = OrderedDict()

    def image(self, sample: int) -> bytes:
        """A JPEG, PNG or WebP file, byte for byte. Raises BadSample (skip it) or DataError (stop)."""
        length = int(self.index.numbers("at:image_length")[sample])
        if length > MAX_IMAGE_BYTES:
            raise BadSample(f"image has too many bytes: {length}")
        path = self.index.text("at:image", sample)
        if path is not None:
            return self._read_file(sample, path, length, "image")
        return self._container(sample).pread(length, int(self.index.numbers("at:image_offset")[sample]))

    def caption(self, sample: int) -> str:
        """The caption: the index's text, else the text file or member. Raises as `image` does; BadSample also where
        there is none, and of other encodings than UTF-8, which would train on wrong letters."""
        text = self.index.text("caption", sample)
        if text is not None:
            return text
        length = int(self.index.numbers("caption_length")[sample])
        if length > MAX_TEXT_BYTES:
            raise BadSample(f"caption has too many bytes: {length}")
        path = self.index.text("at:caption", sample)
        try:
            if self.has_caption_members and (offset := int(self.index.numbers("at:caption_offset")[sample])) >= 0:
                return self._container(sample).pread(length, offset).decode("utf-8-sig").strip()
            if path is not None:
                return " ".join(self._read_file(sample, path, length, "caption").decode("utf-8-sig").split())
        except UnicodeDecodeError as error:
            raise BadSample("caption is not UTF-8 text") from error
        raise BadSample("caption missing")

    def _read_file(self, sample: int, path: str, length: int, what: str) -> bytes:
        try:
            with closing(open_bytes(join(self.bases[self.index.numbers("unit")[sample]], path), self.access)) as file:
                if file.size != length:
                    raise BadSample(f"{what} file has changed since it was indexed: {shown(path)}; {_CHANGED}")
                return file.pread(length, 0)
        except FileMissing as error:
            raise BadSample(f"{what} file missing: {shown(path)}") from error

    def _container(self, sample: int) -> ByteFile:
        """The shard or row group that holds a sample; the last few stay open."""
        number = int(self.index.numbers("unit" if self.unpack is None else "block")[sample])
        if number not in self._open:
            if len(self._open) >= MAX_OPEN_FILES:
                self._open.popitem(last=False)[1].close()
            if self.unpack is None:
                self._open[number] = open_bytes(self.index.shards[number], self.access)
            else:
                self._open[number] = self.unpack(self.index, sample)
        self._open.move_to_end(number)
        return self._open[number]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": OrderedDict()}

    def __del__(self) -> None:
        for file in self.__dict__.get("_open", {}).values():
            file.close()
