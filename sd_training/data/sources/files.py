"""Index columns of samples that are files of their own, or parts of one.

Reads samples whose image, and perhaps caption, is a file of its own.

Where a path may lead is decided when the data is indexed: the entries of a table are checked by `checked_path`, and a
folder's samples are files that were found in it.
"""

import json
import os
import posixpath
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import quote

import pyarrow as pa

from sd_training.data.index.columns import MAX_FIELDS, Scalar, metadata_columns, storable
from sd_training.data.index.store import DatasetIndex
from sd_training.data.problems import BadSample, Problems, SkippedSample
from sd_training.data.samples.captions import captions_in
from sd_training.data.samples.image import image_size
from sd_training.data.storage.files import Access, FileMissing, open_bytes, seekable
from sd_training.data.storage.locations import is_remote, local_path, shown
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


MAX_IMAGE_BYTES = 1 << 28
"""Larger image files are skipped without reading them."""
MAX_TEXT_BYTES = 1 << 20
"""Larger caption and metadata files are refused."""
_UNSTORABLE = re.compile("[\0\ud800-\udfff]")


def folder_of(location: str) -> str:
    """The folder, or its URL, that a table is in; without links, so that `..` means what the file system means."""
    if location.startswith(("http://", "https://")):
        location = location.partition("?")[0]
    folder = location.rpartition("/")[0]
    return folder if is_remote(location) else os.path.realpath(folder)


def join(base: str, path: str) -> str:
    """Where a file of the index is. `base` is a folder; `path` is relative to it, absolute, or a URL."""
    if "://" in path or path.startswith("/"):
        return path
    if not is_remote(base):
        return os.path.normpath(f"{base}/{path}")  # not by the file system: `..` goes back through a linked folder
    return f"{base}/{quote(path) if base.startswith('http') else path}"


def checked_path(base: str, path: str) -> str:
    """The path of a file that a table names, as `join` takes it.

    A local table may name any local file, by an absolute path or by `..`: its folder could as well hold links, and only
    images are read. A remote table must not name files of this machine: its relative paths stay below its folder, and
    URLs must lead to its own store.

    Args:
        base: folder of the table.
        path: as it is written.

    Raises:
        BadSample: the path of a remote table leads out of its folder, or the path is none.
        DataError: a URL of another place.
    """
    if not path or _UNSTORABLE.search(path):
        raise BadSample("image path is not a file name" if path else "image path is empty")
    if "://" in path:
        is_local = path.lower().startswith("file://") and not is_remote(base)
        return local_path(path) if is_local else _checked_url(base, path)
    if path.startswith("/"):
        if is_remote(base):
            raise BadSample(f"image path is absolute in a remote table: {path}")
        return path
    plain = posixpath.normpath(path)
    if posixpath.basename(plain) == "..":
        raise BadSample(f"image path is a folder: {path}")
    if plain.startswith("../") and is_remote(base):
        raise BadSample(f"image path leads out of the folder of its remote table: {path}")
    return plain


def _checked_url(base: str, url: str) -> str:
    store = "/".join(base.split("/")[:3]) + "/"
    if is_remote(base) and url.startswith(store) and ".." not in url.split("/"):
        return url
    place = f"paths relative to it, or URLs below {shown(store)}" if is_remote(base) else "local paths"
    raise DataError(
        f"the table in '{shown(base)}' names the image '{shown(url)}'; images are not downloaded from other places: "
        f"only {place} are read. Download the images first and name the files"
    )


def utf8(caption: bytes) -> str:
    """A caption file's text. Raises BadSample: other encodings would train on wrong letters."""
    try:
        return caption.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadSample("caption is not UTF-8 text") from error


def tidy(caption: str) -> str:
    """A caption file's text in one line: every run of white space becomes one space."""
    return " ".join(caption.split())


class FileReader:
    """The `SampleReader` of samples in files of their own.

    The index has `at:image` and `at:image_length`, and captions in `caption`, or in the text files `at:caption`. A file
    that was removed or changed after it was indexed makes its sample a bad one.

    Args:
        index: made from files.
        access: how remote files are read.
        bases: per unit, the folder that relative paths start from.
        named_by: what names the images and is itself watched for changes, such as `table`; None where they are.
    """

    def __init__(
        self, index: DatasetIndex, access: Access, bases: Sequence[str], named_by: str | None = "table"
    ) -> None:
        self.index, self.access, self.bases = index, access, list(bases)
        first = f"touch the {named_by} that names it and " if named_by else ""
        self.remedy = f"{first}start again to index it anew"

    def image(self, sample: int) -> bytes:
        path = self.index.text("at:image", sample)
        if path is None:
            raise BadSample("image missing")
        return self._read(sample, path, int(self.index.numbers("at:image_length")[sample]), "image", MAX_IMAGE_BYTES)

    def caption(self, sample: int) -> str:
        """As `SampleReader.caption`."""
        text = self.index.text("caption", sample)
        if text is not None:
            return text
        path = self.index.text("at:caption", sample)
        if path is None:
            raise BadSample("caption missing")
        length = int(self.index.numbers("caption_length")[sample])
        return tidy(utf8(self._read(sample, path, length, "caption", MAX_TEXT_BYTES)))

    def _read(self, sample: int, path: str, length: int, what: str, limit: int) -> bytes:
        if length > limit:
            raise BadSample(f"{what} file has too many bytes: {length}")
        try:
            file = open_bytes(join(self.bases[self.index.numbers("unit")[sample]], path), self.access)
        except FileMissing as error:
            raise BadSample(f"{what} file missing: {shown(path)}") from error
        try:
            if file.size != length:
                raise BadSample(f"{what} file has changed since it was indexed: {shown(path)}; {self.remedy}")
            return file.pread(length, 0)
        finally:
            file.close()
