"""Index columns of samples that are files of their own, or parts of one."""

import json
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pyarrow as pa

from sd_training.data.byte_files import Access, FileMissing, open_bytes, seekable
from sd_training.data.caption_choice import captions_in
from sd_training.data.image_decode import image_size
from sd_training.data.index_columns import MAX_FIELDS, Scalar, metadata_columns, storable
from sd_training.data.problems import Problems, SkippedSample
from sd_training.errors import DataError

ROWS_AT_ONCE = 4096
"""Rows that are Python objects at the same time while a large unit is indexed."""
MAX_UNIT_BYTES = 2 << 30
"""Captions and metadata of one unit [bytes]. While it is indexed, they are in memory up to four times."""
_THREADS = 8
_HEADER_BUFFER = 4096
"""Bytes read at once where an image's size is looked up; the sizes of most files are in the first block."""
_OPTIONAL = ("at:image", "at:caption", "caption")


class ImageInfo(NamedTuple):
    """An image as far as its header tells."""

    length: int
    """[bytes]."""
    width: int
    height: int
    """Of the upright image [pixels]; 0 when it cannot be told."""


@dataclass
class FileSample:
    """One row of an index to be."""

    key: str
    image: str | None
    """File, as `at:image`; None where the image is a part of the unit."""
    info: ImageInfo
    caption: str | None = None
    """A text that is kept in the index."""
    caption_file: str | None = None
    """As `at:caption`."""
    caption_length: int = -1
    """[bytes]; -1 without a caption."""
    metadata: Mapping[str, Scalar] = field(default_factory=dict)


def measure(locations: Sequence[str], access: Access) -> list[ImageInfo | None]:
    """Looks at image files, several at once; None where there is no such file. DataError is passed on."""
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(lambda location: _measure(location, access), locations))


def _measure(location: str, access: Access) -> ImageInfo | None:
    try:
        file = open_bytes(location, access)
    except FileMissing:
        return None
    try:
        return ImageInfo(file.size, *image_size(seekable(file, buffer_size=_HEADER_BUFFER)))
    finally:
        file.close()


def caption_of(value: object) -> str | None:
    """A cell as a caption: of a list of texts a visit draws one, so it is kept as JSON. None without any text."""
    entries = value if isinstance(value, list) else [value]
    texts = [storable(entry.strip()) for entry in entries if isinstance(entry, str) and entry.strip()]
    return json.dumps(texts, ensure_ascii=False) if len(texts) > 1 else next(iter(texts), None)


def length_of(caption: str | None) -> int:
    """As `caption_length` [bytes]: of the longest, where there are several."""
    return max((len(entry.encode()) for entry in captions_in(caption)), default=-1)


class SampleColumns:
    """Collects samples part by part and turns each part into columns at once.

    Args:
        location: of the unit, for messages.
        problems: where to name what is left out.
    """

    def __init__(self, location: str, problems: Problems) -> None:
        self.location, self.problems = location, problems
        self._parts: list[pa.Table] = [pa.table(_standard([]))]
        self._num_bytes = 0
        self._fields: dict[str, None] = {}
        self._left_out: set[str] = set()

    def add(self, samples: Sequence[FileSample]) -> None:
        """Appends samples."""
        for sample in samples:
            if not sample.info.width:
                self.name(sample.key, "image size cannot be told")
        rows = self._limited([sample.metadata for sample in samples])
        self._parts.append(pa.table(_standard(samples) | metadata_columns(rows)[0]))
        self._num_bytes += self._parts[-1].nbytes
        if self._num_bytes > MAX_UNIT_BYTES:
            raise DataError(
                f"'{self.location}' has more than {MAX_UNIT_BYTES:,} bytes of captions and metadata; split it into "
                "several files"
            )

    def name(self, key: str, reason: str) -> None:
        """Names a problem of the unit."""
        self.problems.add(SkippedSample(self.location, storable(key), storable(reason)))

    def columns(self) -> dict[str, pa.Array]:
        """All samples in the order added."""
        if self._left_out:
            self.name("", f"more than {MAX_FIELDS} metadata fields")
        table = pa.concat_tables(self._parts, promote_options="default")
        unused = {name for name in _OPTIONAL if table[name].null_count == table.num_rows}
        return {name: table[name].combine_chunks() for name in table.column_names if name not in unused}

    def _limited(self, rows: list[Mapping[str, Scalar]]) -> list[Mapping[str, Scalar]]:
        """Without the fields beyond the first `MAX_FIELDS` of the unit."""
        for name in dict.fromkeys(name for row in rows for name in row):
            if name in self._fields or len(self._fields) < MAX_FIELDS:
                self._fields[name] = None
            else:
                self._left_out.add(name)
        if not self._left_out:
            return rows
        return [{name: value for name, value in row.items() if name in self._fields} for row in rows]


def _standard(samples: Iterable[FileSample]) -> dict[str, pa.Array]:
    samples = list(samples)
    kinds: dict[str, tuple[pa.DataType, Any]] = {
        "key": (pa.large_string(), [sample.key for sample in samples]),
        "at:image": (pa.large_string(), [sample.image for sample in samples]),
        "at:image_length": (pa.int64(), [sample.info.length for sample in samples]),
        "width": (pa.int32(), [sample.info.width for sample in samples]),
        "height": (pa.int32(), [sample.info.height for sample in samples]),
        "caption": (pa.large_string(), [sample.caption for sample in samples]),
        "at:caption": (pa.large_string(), [sample.caption_file for sample in samples]),
        "caption_length": (pa.int64(), [sample.caption_length for sample in samples]),
    }
    return {name: pa.array(values, kind) for name, (kind, values) in kinds.items()}
