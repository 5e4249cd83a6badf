"""The contract of every kind of data set: shards to index, the rows of a shard as columns, and the reader of samples.

A source lists its shards (files or folders), gives the rows of one, and the samples of the finished index are read:
images and captions inside shards, or in files of their own. The order, filters, buckets and captions never know which
kind of source they work on. Which paths of a table are followed is decided when the data is indexed (`checked_path`);
an index from a folder names only files that were found in it.

A metadata field `f` becomes a column `number:f` (float64, null where it is no number) and, where some value was written
as text, `text:f`. Numbers stored as text compare as numbers; true and false are the words, and 1 and 0.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import posixpath
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from decimal import Decimal
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from sd_training.config.data_schema import RemoteConfig
from sd_training.config.filters import EXACT_INTEGERS
from sd_training.data.samples.image import CroppedImage, CropRequest, image_size, read_image
from sd_training.data.storage.files import ByteFile, FileMissing, FileState, file_states, is_remote, open_bytes, shown
from sd_training.errors import BadSample, DataError
from sd_training.log import redacted_values

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
    dict.fromkeys(("key", "at:image", "caption", "at:caption", "cls"), pa.large_string())
    | dict.fromkeys(("width", "height", "at:group", "block"), pa.int32())
    | dict.fromkeys(("at:image_offset", "at:image_length", "at:caption_offset", "caption_length"), pa.int64())
    | {"check:caption": pa.int64()}
)
"""`width` and `height` are those of the upright image [pixels], 0 when unknown. `at:…` hold where the reader finds a
sample: `at:image` and `at:caption` are files, as `join` takes them, `at:image_offset` and `at:caption_offset` count in
the shard or row group `at:group` [bytes], -1 where it is not there. `caption` is a text that is kept in the index.
`caption_length` is -1 without a caption [bytes]. `block` numbers the parts of the shard that are read together (row
groups), ascending. `cls` is the class. Columns `check:…`, such as checksums, only count for the fingerprint and are not
kept; the length of a caption in the shard alone does not distinguish it from another one. Every row sets `key`,
`width`, `height` and `at:image_length`; a column of integers that one row sets is set by all rows of all shards."""
_REQUIRED = {"key", "at:image_length", "width", "height", "caption_length"}


# --- Problems ---


EXAMPLES_KEPT = 100
"""Named examples per reason; further ones are only counted."""


class SkippedSample(NamedTuple):
    """One sample, member or shard that could not be used. `key` is empty when the whole shard is meant."""

    shard: str
    key: str
    reason: str
    """`what is wrong` or `what is wrong: details`; problems are counted by the part before the colon."""
    position: int | None = None
    """In the global order of the run, when it was found while training."""


@dataclass
class Problems:
    """Counts by reason, and the first `EXAMPLES_KEPT` of each."""

    counts: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[SkippedSample]] = field(default_factory=dict)

    def add(self, problem: SkippedSample, count: int = 1) -> None:
        """Counts `problem` as `count` cases and keeps it as an example while there is room."""
        kind = problem.reason.partition(":")[0]
        self.merge(Problems({kind: count}, {kind: [problem]}))

    def merge(self, other: Problems) -> None:
        """Adds the counts and examples of `other`."""
        for kind, count in other.counts.items():
            self.counts[kind] = self.counts.get(kind, 0) + count
            named = self.examples.setdefault(kind, [])
            named.extend(other.examples.get(kind, [])[: EXAMPLES_KEPT - len(named)])

    def total(self) -> int:
        """Cases of all reasons."""
        return sum(self.counts.values())

    def named(self) -> Iterator[SkippedSample]:
        """All kept examples."""
        return chain.from_iterable(self.examples.values())

    def text(self) -> str:
        """One line: `caption missing 32 (first: a.tar 000001), …`, most frequent first; empty without problems."""
        lines = []
        for kind, count in sorted(self.counts.items(), key=lambda item: -item[1]):
            shard, key, reason, _ = self.examples[kind][0]
            details = reason.partition(":")[2]
            first = printable(" ".join(filter(None, (shard, key))) + (f",{details}" if details else ""))
            lines.append(f"{kind} {count:,} (first: {first})")
        return "; ".join(lines)

    def remedy(self) -> str:
        """The end of the sentence, where there is something to be done about the usual reason."""
        said = "; samples without a caption are left out, unless dataset.params.captions.text gives one to all"
        return said if "caption missing" in self.counts else ""

    def to_json(self) -> dict[str, Any]:
        """Plain values without secrets, to be written; `from_json` is the way back."""
        return {"counts": self.counts, "examples": redacted_values(self.examples)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Problems:
        """The inverse of `to_json`."""
        examples = {kind: [SkippedSample(*p) for p in named] for kind, named in value["examples"].items()}
        return cls(dict(value["counts"]), examples)


def printable(text: str, limit: int = 300) -> str:
    """`text` from outside made safe for a terminal: control characters escaped, length capped."""
    escaped = json.dumps(text, ensure_ascii=False)[1:-1].replace('\\"', '"')
    escaped = "".join(c if c.isprintable() else f"\\u{ord(c):04x}" for c in escaped)
    return escaped if len(escaped) <= limit else f"{escaped[: limit - 1]}…"


# --- Metadata and captions as columns ---


NUMBER, TEXT = "number:", "text:"
_NUMBER = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*", re.ASCII)

Scalar = str | float


def field_names(column_names: Sequence[str]) -> frozenset[str]:
    """The metadata fields among index columns."""
    return frozenset(name.partition(":")[2] for name in column_names if name.startswith((NUMBER, TEXT)))


def metadata_columns(rows: Sequence[Mapping[str, Scalar]]) -> dict[str, pa.Array]:
    """The columns of per-sample metadata."""
    columns: dict[str, pa.Array] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row.get(name) for row in rows]
        texts = [value if isinstance(value, str) else None for value in values]
        columns[NUMBER + name] = pa.array([_number(value) for value in values], pa.float64())
        if any(text is not None for text in texts):
            columns[TEXT + name] = pa.array(texts, pa.large_string())
    return columns


def _number(value: Scalar | None) -> float | None:
    if not isinstance(value, str):
        return value
    if len(value) <= 5 and value.lower() in ("true", "false"):  # pandas writes True
        return float(value.lower() == "true")
    if not _NUMBER.fullmatch(value):
        return None
    number = float(value)
    return number if math.isfinite(number) else None


def read_scalars(value: Mapping[str, object]) -> dict[str, Scalar]:
    """Numbers, texts, true and false of a mapping; a list of texts stays a JSON text, for captions. Null, NaN, other
    lists and objects are left out, as a missing value is."""
    scalars = ((storable(str(name)), _scalar(entry)) for name, entry in value.items())
    return {name: scalar for name, scalar in scalars if scalar is not None}


def _scalar(value: object) -> Scalar | None:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return storable(value)
    if isinstance(value, list) and value and all(isinstance(entry, str) for entry in value):
        return storable(json.dumps(value, ensure_ascii=False))
    if not isinstance(value, (int, float, Decimal)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    if isinstance(value, int) and abs(value) >= EXACT_INTEGERS:  # identifiers stay apart
        return str(value)
    return number if math.isfinite(number) else None


def storable(name: str) -> str:
    """Text that is not UTF-8 comes with surrogates, which parquet and JSON cannot store."""
    return name.encode("utf-8", "backslashreplace").decode("utf-8")


def captions_in(text: str | None) -> list[str]:
    """The captions of a stored text: the entries of a JSON list of texts, else the text; without the empty ones."""
    text = (text or "").strip()
    entries = [text]
    if text.startswith("[") and text.endswith("]"):
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, list) and all(isinstance(entry, str) for entry in value):
            entries = [entry.strip() for entry in value]
    return [entry for entry in entries if entry]


def image_columns(file: Any, length: int) -> Row:
    """The columns about the size of an image file of `length` bytes."""
    width, height = image_size(file) if length <= MAX_IMAGE_BYTES else (0, 0)
    return {"at:image_length": length, "width": width, "height": height}


def metadata_of(key: str, content: bytes, report: Report) -> dict[str, Scalar]:
    """The metadata that a JSON file holds; none, and a report, where it is no object."""
    try:
        value = json.loads(content.decode("utf-8-sig", "replace"))
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        report(key, "metadata is not a JSON object")
        return {}
    return read_scalars(value)


def caption_of(value: object) -> str | None:
    """A cell as a caption; a list of texts, of which each read draws one, is kept as JSON. None without any text."""
    entries = value if isinstance(value, list) else [value]
    texts = [storable(entry.strip()) for entry in entries if isinstance(entry, str) and entry.strip()]
    return json.dumps(texts, ensure_ascii=False) if len(texts) > 1 else next(iter(texts), None)


def length_of(caption: str | None) -> int:
    """As `caption_length` [bytes]: of the longest, where there are several."""
    return max((len(entry.encode()) for entry in captions_in(caption)), default=-1)


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


# --- Sources ---


class Source:
    """One kind of data set at one place. Small and picklable: it is sent to index processes.

    A subclass defines `rows`, which yields the columns of a sample (`COLUMNS`), and `identity`: a constant, plus every
    option that `rows` reads. It overrides `shards` unless the paths are the shards, `open_group` if offsets are not
    relative to the shard file, `image_root` if paths in rows do not start at the shard's folder, `reader` if images are
    no files, and `shard_noun`. For images stored as separate files `measured` fills in their columns. Readers return
    JPEG, PNG or WebP files unchanged; other formats must be converted before training.

    Args:
        paths: of files or folders, local or remote.
        access: how remote ones are read.
    """

    shard_noun = "shard"
    """What reports call a shard."""
    columns: Sequence[str] = ()
    """Optional columns that also exist where no row has a value."""
    identity: str
    """Everything besides the shard that decides what `scan` returns; a change of it causes a new index."""

    def __init__(self, paths: Sequence[str], access: RemoteConfig) -> None:
        self.paths, self.access = list(paths), access

    def shards(self) -> list[Shard]:
        """All shards in a fixed order. Raises DataError if there are none, or if one cannot be found."""
        return file_states(self.paths, self.access)

    def image_root(self, shard: Shard) -> str:
        """The folder, or its URL, that paths of a shard's rows start from; without links, so that `..` has the meaning
        of the file system."""
        location = shard.location
        if location.startswith(("http://", "https://")):
            location = location.partition("?")[0]
        folder = location.rpartition("/")[0]
        return folder if is_remote(location) else os.path.realpath(folder)

    def rows(self, shard: Shard, report: Report) -> Iterator[Row]:
        """The samples of a shard. Damage and omitted samples are reported; OSError and DataError are passed on."""
        raise NotImplementedError

    def open_group(self, shard: Shard, group: int) -> ByteFile:
        """The file to which `at:image_offset` of the samples of a row group refers: the shard."""
        return open_bytes(shard, self.access)

    def reader(self, index: DatasetIndex) -> IndexedReader:
        """The reader of the samples of an index that was made from this source."""
        return IndexedReader(index, self)

    def scan(self, shard: Shard) -> tuple[dict[str, pa.Array], Problems]:
        """The samples of one shard as columns of equal length, in a fixed order, and its problems. It is read in
        parts, so that few rows are Python objects at the same time."""
        problems, parts = Problems(), [COLUMNS.empty_table()]

        def report(key: str, reason: str) -> None:
            problems.add(SkippedSample(shown(shard.location), storable(key), storable(reason)))

        rows = self.rows(shard, report)
        while part := list(islice(rows, ROWS_AT_ONCE)):
            for row in part:
                row.setdefault("caption_length", length_of(row.get("caption")))
                if not row["width"]:
                    report(row["key"], "image size cannot be determined")
            table = pa.Table.from_pylist(part, COLUMNS)
            for name, values in metadata_columns([row.get("metadata", {}) for row in part]).items():
                table = table.append_column(name, values)
            parts.append(table)
        table = pa.concat_tables(parts, promote_options="default")
        empty = {name for name in COLUMNS.names if table[name].null_count == table.num_rows}
        unused = empty.difference(_REQUIRED, self.columns)
        return {n: table[n].combine_chunks() for n in table.column_names if n not in unused}, problems

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


# --- The index, and the reader of its samples ---

INFO = b"sd_training"
"""Key of what an index file says about itself, besides its columns."""


class DatasetIndex:
    """Columns over all samples of all shards, in the order of the shards; mapped from a file, not held in memory.

    Attributes:
        path: the joined index.
        shards: the shards it was made from.
        columns: arrow table: `key`, `unit` (number of the shard), `block`, `width`, `height`, `caption_length`, `cls`,
            `at:…`, perhaps `caption`, and the metadata columns of the requested fields.
        fields: every metadata field that some shard has.
        problems: what was wrong with the shards.
        fingerprint: sha256 over names, sizes and contents of the shards, without their folders.
    """

    def __init__(self, path: Path, shards: Sequence[FileState]) -> None:
        """Raises OSError, ValueError or KeyError where the file is missing, damaged or of another program."""
        self.path, self.shards = path, list(shards)
        self._numbers: dict[str, NDArray[Any]] = {}
        self._texts: dict[str, pa.Array | pa.ChunkedArray | None] = {}
        os.utime(path)  # joined indexes that were not opened for long are removed
        self.columns = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
        self._names = frozenset(self.columns.column_names)
        info = json.loads(self.columns.schema.metadata[INFO])
        self.fields, self.problems = frozenset[str](info["fields"]), Problems.from_json(info["problems"])
        digest = hashlib.sha256()
        for shard, content in zip(shards, info["contents"], strict=True):
            line = f"{shard.location.rstrip('/').rpartition('/')[2]}/{shard.size}/{content}\n"  # names hold no slash
            digest.update(line.encode("utf-8", "backslashreplace"))
        self.fingerprint = digest.hexdigest()

    def __len__(self) -> int:
        return int(self.columns.num_rows)

    def __contains__(self, column: str) -> bool:
        return column in self._names

    def numbers(self, column: str) -> NDArray[Any]:
        """[N] an integer column without nulls, such as `width` [pixels], as a view of the mapped file."""
        if column not in self._numbers:
            # Not by `to_numpy`, which imports pandas where it is installed: a second and 60 MB in every loader process.
            values = self.columns[column]
            chunk = values.chunk(0) if values.num_chunks == 1 else values.combine_chunks()
            dtype = np.dtype(str(chunk.type))
            offset = chunk.offset * dtype.itemsize
            self._numbers[column] = np.frombuffer(chunk.buffers()[1], dtype, len(chunk), offset)
        return self._numbers[column]

    def text(self, column: str, sample: int) -> str | None:
        """A value of a text column; None where it is null or there is no such column."""
        if column not in self._texts:  # to look a column up takes longer than to read a value
            values = self.columns[column] if column in self else None
            self._texts[column] = values.chunk(0) if values is not None and values.num_chunks == 1 else values
        values = self._texts[column]
        return None if values is None else values[sample].as_py()

    def metadata_text(self, field: str, sample: int) -> str | None:
        """A metadata field as text; a number is written as short as it can be."""
        text = self.text(TEXT + field, sample)
        if text is None and NUMBER + field in self:
            number = self.columns[NUMBER + field][sample].as_py()
            return None if number is None else f"{number:.15g}"
        return text

    def name(self, sample: int) -> tuple[str, str]:
        """Location of the shard as it may be shown, without secrets, and key, of a sample."""
        return shown(self.shards[self.numbers("unit")[sample]].location), str(self.columns["key"][sample].as_py())

    def __reduce__(self) -> tuple[type[DatasetIndex], tuple[Path, list[FileState]]]:
        return DatasetIndex, (self.path, self.shards)


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

    def picture(self, sample: int, wanted: CropRequest, max_pixels: int, *, keeps_alpha: bool = False) -> CroppedImage:
        """The picture that a request asks for, as `read_image` gives it. Raises as `image` does."""
        return read_image(self.image(sample), wanted, max_pixels, keeps_alpha=keeps_alpha)

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
        return int(self.index.numbers(column)[sample]) if column in self.index else -1

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
        """The shard or row group that holds a sample; the last few stay open. `block` counts over all shards (see
        `index/store.py`), `at:group` within the shard."""
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
