"""The contract of every kind of data set: shards to index, rows of a shard, and a reader of single samples.

A source lists its shards (files or folders), scans one into rows, and reads the samples of the finished index. The
order, filters, buckets and captions never know which kind of source they work on.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple, Protocol

import pyarrow as pa
from numpy.typing import NDArray

from sd_training.data.index.columns import MAX_FIELDS, Scalar, metadata_columns, storable
from sd_training.data.problems import Problems, SkippedSample
from sd_training.data.samples.captions import captions_in
from sd_training.errors import DataError

IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp")
MAX_IMAGE_BYTES = 1 << 28
"""Larger images are not read, neither for their size nor in training."""
MAX_TEXT_BYTES = 1 << 20
"""Larger caption, class and metadata files and members are refused."""
MAX_SHARD_BYTES = 2 << 30
"""Captions and metadata of one shard [bytes]. While it is indexed, they are in memory up to four times."""
ROWS_AT_ONCE = 512
"""Rows that become one part of the columns at once."""


class Shard(NamedTuple):
    """A file or folder that is indexed as a whole, and again when its size or version changes."""

    location: str
    """Absolute path or URL."""
    size: int
    """[bytes]."""
    version: str
    """Differs when the content does: modification time, ETag, or a hash of a listing."""


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


class SampleReader(Protocol):
    """Reads single samples. Copied into loader processes, so it holds no open files when it is pickled."""

    def image(self, sample: int) -> bytes:
        """The image file. Raises BadSample (skip it) or DataError (stop)."""

    def caption(self, sample: int) -> str:
        """The caption. Raises as `image` does; BadSample when there is none."""


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

    def reader(self, index: IndexedShards) -> SampleReader:
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
    """`at:image`: the image file, as `reader.join` takes it; None where the image is a part of the shard."""
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


Report = Callable[[str, str], None]
"""Names a problem of a shard: (key of the sample or empty, reason)."""


def collect(location: str, scan: Callable[[Report], Iterable[Row]], columns: Sequence[str] = ()) -> ShardScan:
    """Turns the rows of a shard into columns, part by part: few rows are Python objects at the same time.

    Args:
        location: of the shard, for messages.
        scan: yields the rows and reports what is left out.
        columns: optional ones that also exist where no row has a value.

    Raises:
        DataError: captions and metadata are too large.
    """
    problems, fields, has_more_fields = Problems(), set[str](), False

    def report(key: str, reason: str) -> None:
        problems.add(SkippedSample(location, storable(key), storable(reason)))

    def checked() -> Iterator[Row]:
        nonlocal has_more_fields
        for row in scan(report):
            if not row.info.width:
                too_long = row.info.length > MAX_IMAGE_BYTES
                size = f"image has too many bytes: {row.info.length:,}"
                report(row.key, size if too_long else "image size cannot be told")
            if new := [name for name in row.metadata if name not in fields]:
                fields.update(new[: MAX_FIELDS - len(fields)])
                row.metadata = {name: value for name, value in row.metadata.items() if name in fields}
                has_more_fields |= new[-1] not in fields
            yield row

    rows, parts, num_bytes = checked(), [_table([])], 0
    while part := list(islice(rows, ROWS_AT_ONCE)):
        parts.append(_table(part))
        num_bytes += parts[-1].nbytes
        if num_bytes > MAX_SHARD_BYTES:
            raise DataError(
                f"'{location}' has more than {MAX_SHARD_BYTES:,} bytes of captions and metadata; split it into "
                "several files"
            )
    if has_more_fields:
        report("", f"more than {MAX_FIELDS} metadata fields")
    table = pa.concat_tables(parts, promote_options="default")
    unused = {name for name in _OPTIONAL if table[name].null_count == table.num_rows}.difference(columns)
    return ShardScan({n: table[n].combine_chunks() for n in table.column_names if n not in unused}, problems)


_OPTIONAL = (
    *("at:image", "at:image_offset", "at:group", "block", "at:caption", "at:caption_offset"),
    *("caption", "check:caption", "cls"),
)


def _table(rows: Sequence[Row]) -> pa.Table:
    lengths = [length_of(row.caption) if row.caption_length is None else row.caption_length for row in rows]
    kinds: dict[str, tuple[pa.DataType, Sequence[object]]] = {
        "key": (pa.large_string(), [row.key for row in rows]),
        "at:image": (pa.large_string(), [row.image for row in rows]),
        "at:image_offset": (pa.int64(), [row.offset for row in rows]),
        "at:image_length": (pa.int64(), [row.info.length for row in rows]),
        "width": (pa.int32(), [row.info.width for row in rows]),
        "height": (pa.int32(), [row.info.height for row in rows]),
        "at:group": (pa.int32(), [row.group for row in rows]),
        "block": (pa.int32(), [row.group for row in rows]),
        "caption": (pa.large_string(), [row.caption for row in rows]),
        "at:caption": (pa.large_string(), [row.caption_file for row in rows]),
        "at:caption_offset": (pa.int64(), [row.caption_offset for row in rows]),
        "caption_length": (pa.int64(), lengths),
        "check:caption": (pa.int64(), [row.caption_crc for row in rows]),
        "cls": (pa.large_string(), [row.cls for row in rows]),
    }
    columns = {name: pa.array(values, kind) for name, (kind, values) in kinds.items()}
    return pa.table(columns | metadata_columns([row.metadata for row in rows])[0])


def caption_of(value: object) -> str | None:
    """A cell as a caption: of a list of texts a visit draws one, so it is kept as JSON. None without any text."""
    entries = value if isinstance(value, list) else [value]
    texts = [storable(entry.strip()) for entry in entries if isinstance(entry, str) and entry.strip()]
    return json.dumps(texts, ensure_ascii=False) if len(texts) > 1 else next(iter(texts), None)


def length_of(caption: str | None) -> int:
    """As `caption_length` [bytes]: of the longest, where there are several."""
    return max((len(entry.encode()) for entry in captions_in(caption)), default=-1)
