"""Images in files of their own: image folders with captions, and CSV, TSV and JSON-lines tables that name image files.

A file, folder entry or row that cannot be used is reported, not an error. Tag files are read by a further source of
this kind (`tags`).
"""

import csv
import hashlib
import io
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import chain, islice
from pathlib import PurePosixPath
from typing import Any, BinaryIO, NamedTuple, TypeVar

from sd_training.data.index.columns import Scalar, read_metadata, read_scalars
from sd_training.data.problems import BadSample
from sd_training.data.sources import base
from sd_training.data.sources.arrow import IMAGE_COLUMNS, PATH_COLUMNS, Columns
from sd_training.data.sources.base import Report, Row, Shard
from sd_training.data.storage.byte_file import Access, seekable
from sd_training.data.storage.files import file_states, open_bytes
from sd_training.data.storage.locations import entries_of, folders_below, shown
from sd_training.errors import DataError

IMAGE_SUFFIXES = tuple(f".{extension}" for extension in base.IMAGE_EXTENSIONS)
_OTHER_IMAGE_SUFFIXES = (".bmp", ".gif", ".tif", ".tiff", ".avif", ".heic", ".jxl")
"""Images that training cannot read; they are reported."""
_PARTNERS = {"images": "captions", "img": "txt"}
"""A folder of images → the folder beside it that holds their captions."""
_SUFFIXES = (*IMAGE_SUFFIXES, *_OTHER_IMAGE_SUFFIXES, ".txt", ".json")
_MEASURED_AT_ONCE = 4096
TABLE_EXTENSIONS = (".csv", ".tsv", ".jsonl", ".ndjson")
_MAX_CELL = 1 << 24
_ROWS_FOR_NAMES = 1_000
"""Objects of JSON lines that are searched for names of columns: not every row need have every column."""
_NOT_UTF8 = re.compile("[\ud800-\udfff]")
_READ_BYTES = 1 << 20
"""Of a table, at once."""
T = TypeVar("T")


class FileSource:
    """A source whose samples are image files. A kind of it gives the shards and `rows`."""

    def __init__(self, access: Access) -> None:
        self.access = access

    def image_root(self, shard: Shard) -> str:
        """The folder that paths of a shard's rows start from."""
        return shard.location

    def rows(self, shard: Shard, report: Report) -> Iterator[Row]:
        """The samples of a shard; reports what is left out."""
        raise NotImplementedError

    def scan(self, shard: Shard) -> base.ShardScan:
        """As `Source.scan`."""
        return base.collect(shown(shard.location), partial(self.rows, shard))

    def reader(self, index: base.IndexedShards) -> base.IndexedReader:
        """As `Source.reader`."""
        return base.IndexedReader(index, self.access, [self.image_root(shard) for shard in index.shards])

    def measured(
        self, shard: Shard, found: Iterable[tuple[str, T, str]], report: Report
    ) -> Iterator[tuple[str, T, str, base.ImageInfo]]:
        """Adds to (name for reports, anything, image path) what the header of the image shows; reports missing ones."""
        root, rows = self.image_root(shard), iter(found)
        while part := list(islice(rows, _MEASURED_AT_ONCE)):
            infos = base.measure([base.join(root, path) for _, _, path in part], self.access)
            for (name, item, path), info in zip(part, infos, strict=True):
                if info is None:
                    report(name, f"image file missing: {shown(path)}")
                else:
                    yield name, item, path, info


# --- Image folders ---


class FolderSource(FileSource):
    """The source of image folders at any depth; one shard per folder that holds images.

    The caption of `x.jpg` is `x.txt` and its metadata `x.json`: beside it, or in the partner folder, where a folder
    `images` of the path is replaced by `captions`, or `img` by `txt`. Hidden files and folders are left out. Only files
    found below `paths` are read; links are followed, each folder once.

    Args:
        paths: absolute paths of folders.
    """

    identity = "folder"

    def __init__(self, paths: Sequence[str]) -> None:
        super().__init__(Access())
        self.paths = list(map(os.path.normpath, paths))

    def shards(self) -> list[Shard]:
        """As `Source.shards`."""
        shards: dict[str, Shard] = {}
        for root in self.paths:
            listings = {folder: _list_files(folder) for folder in folders_below(root)}
            for folder, files in listings.items():
                if folder not in shards and any(file.suffix in IMAGE_SUFFIXES for file in files):
                    partner = next((listings[p] for p in partner_folders(root, folder) if p in listings), None)
                    version = " ".join(_digest(listing) for listing in (files, partner) if listing is not None)
                    shards[folder] = Shard(folder, sum(file.size for file in [*files, *(partner or ())]), version)
        if not shards:
            names = ", ".join(sorted(IMAGE_SUFFIXES))
            raise DataError(f"dataset.params.path: no image file ({names}) in or below {', '.join(self.paths)}")
        return list(shards.values())

    def rows(self, shard: Shard, report: Report) -> Iterator[Row]:
        """As `FileSource.rows`."""
        folder = shard.location
        root = next(root for root in self.paths if f"{folder}/".startswith(root.rstrip("/") + "/"))
        files = [file for file in _list_files(folder) if _is_storable(file.name, report)]
        described = {file.stem + file.suffix: file for file in files}
        if partner := next(filter(os.path.isdir, partner_folders(root, folder)), None):
            place = os.path.relpath(partner, folder)
            for file in _list_files(partner):
                if file.suffix in (".txt", ".json") and _is_storable(file.name, report):  # beside the image wins
                    described.setdefault(file.stem + file.suffix, file._replace(name=f"{place}/{file.name}"))
        for file in files:
            if file.suffix in _OTHER_IMAGE_SUFFIXES:
                report(file.name, f"image format is not read: {file.suffix}")
        stems = {file.stem for file in files if file.suffix not in (".txt", ".json")}
        for file in described.values():
            if file.suffix == ".txt" and file.stem not in stems:
                report(file.name, "image missing")
        images = ((file.name, file, file.name) for file in files if file.suffix in IMAGE_SUFFIXES)
        for name, file, _, info in self.measured(shard, images, report):
            caption, length = None, -1
            if text := described.get(file.stem + ".txt"):
                if text.size > base.MAX_TEXT_BYTES:
                    report(name, f"caption file has too many bytes: {text.size}")
                else:
                    caption, length = text.name, text.size
            metadata: dict[str, Scalar] = {}
            if described_by := described.get(file.stem + ".json"):
                try:
                    with open(base.join(folder, described_by.name), "rb") as opened:
                        metadata = read_metadata(opened.read().decode("utf-8-sig", "replace"))
                except (ValueError, RecursionError):
                    report(name, "metadata is not a JSON object")
            yield Row(name, info, metadata, name, caption_file=caption, caption_length=length)


class _File(NamedTuple):
    """A file of a folder."""

    name: str
    """Perhaps with a path from the image's folder."""
    size: int
    """[bytes]."""
    time: int
    """Of its last change [ns]."""
    stem: str
    """The file name without its suffix."""
    suffix: str
    """In lower case."""


def _list_files(folder: str) -> list[_File]:
    """Images, captions and metadata in a folder, by name. Raises DataError when it cannot be read."""
    files = []
    for entry in entries_of(folder):
        if entry.name.lower().endswith(_SUFFIXES) and entry.is_file():
            (stem, suffix), state = os.path.splitext(entry.name), entry.stat()
            files.append(_File(entry.name, state.st_size, state.st_mtime_ns, stem, suffix.lower()))
    return files


def partner_folders(root: str, folder: str) -> Iterator[str]:
    """Where captions may be: `root/images/a` → `root/captions/a`; the innermost `images` first, none above the root."""
    parts = os.path.relpath(folder, root).split("/")
    for i in reversed(range(len(parts))):
        if parts[i] in _PARTNERS:
            yield os.path.join(root, *parts[:i], _PARTNERS[parts[i]], *parts[i + 1 :])


def _digest(files: Sequence[_File]) -> str:
    lines = "".join(f"{file.name}\0{file.size}\0{file.time}\n" for file in files)
    return hashlib.sha256(lines.encode("utf-8", "surrogateescape")).hexdigest()[:32]


def _is_storable(name: str, report: Report) -> bool:
    """The index holds paths as UTF-8 text."""
    if is_text := not _NOT_UTF8.search(name):
        return is_text
    report(name, "file name is not UTF-8")
    return False


# --- Tables ---


class TableSource(FileSource):
    """The source of tables; one shard per table.

    A row is a sample: an image file (which paths are read: see `checked_path`), a caption, and metadata in all columns
    but the image's. Rows that cannot be used are reported by their line. A table is indexed again when it changes, not
    when only the files that it names do: after adding missing images, save or `touch` it.

    Args:
        paths: tables: absolute paths and URLs.
        access: how remote files are read.
        image_column: the one with paths; None looks for usual names.
        caption_column: likewise.
    """

    def __init__(
        self, paths: Sequence[str], access: Access, image_column: str | None = None, caption_column: str | None = None
    ) -> None:
        super().__init__(access)
        self.paths, self.wanted = list(paths), Columns(image_column, caption_column)

    @property
    def identity(self) -> str:
        return json.dumps(["table with paths by ..", *self.wanted])

    def image_root(self, shard: Shard) -> str:
        """As `FileSource.image_root`."""
        return base.folder_of(shard.location)

    def shards(self) -> list[Shard]:
        """As `Source.shards`."""
        return file_states(self.paths, self.access)

    def rows(self, shard: Shard, report: Report) -> Iterator[Row]:
        """As `FileSource.rows`."""
        name, root, seen = shown(shard.location), self.image_root(shard), set[str]()
        with closing(open_bytes(shard.location, self.access)) as file:
            names, rows = _read_table(name, seekable(file, buffer_size=_READ_BYTES))
            image, caption = self.wanted.pick(name, names, PATH_COLUMNS + IMAGE_COLUMNS)

            def with_image() -> Iterator[tuple[str, Mapping[str, Any], str]]:
                number = 0
                for number, values in rows:
                    try:
                        if isinstance(values, str):
                            raise BadSample(values)
                        path = values.get(image)
                        if not isinstance(path, str):
                            raise BadSample(f"image is no path: {type(path).__name__}")
                        yield f"line {number}", values, base.checked_path(root, path.strip())
                    except BadSample as error:
                        report(f"line {number}", str(error))
                    except DataError as error:
                        raise DataError(f"line {number}: {error}") from error
                if not number:
                    report("", "table has no rows")

            for line, values, path, info in self.measured(shard, with_image(), report):
                text = base.caption_of(values.get(caption))
                if text is None:
                    report(line, "caption is empty")
                cells = {key: value for key, value in values.items() if key != image and key and value != ""}
                key = f"{path} {line}" if path in seen else path  # named again, for example with another caption
                seen.add(path)
                yield Row(key, info, read_scalars(cells), path, caption=text)


_TableRows = Iterator[tuple[int, Mapping[str, Any] | str]]
"""First line of a row, counted from 1, and column → value (texts in CSV and TSV), or why there are no values."""


def _read_table(name: str, file: BinaryIO) -> tuple[list[str], _TableRows]:
    """The columns of a table and its rows, which are read when they are asked for.

    Args:
        name: path or URL, which gives the format and is used in messages.
        file: its content.

    Raises:
        DataError: the format is not known, or the header cannot be read.
    """
    extension = PurePosixPath(name.partition("?")[0] if "://" in name else name).suffix.lower()
    if extension not in TABLE_EXTENSIONS:
        raise DataError(f"{name}: is not a table; {', '.join(TABLE_EXTENSIONS)} files are read")
    is_json = extension not in (".csv", ".tsv")
    # Bytes that are not UTF-8 become surrogates, by which their rows are found.
    text = io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline="\n" if is_json else "")
    if not is_json:
        return _delimited(name, text, "\t" if extension == ".tsv" else ",")
    rows = ((number, _json_row(line)) for number, line in enumerate(text, 1) if line.strip())
    first = list(islice(rows, _ROWS_FOR_NAMES))
    names = dict.fromkeys(column for _, row in first if not isinstance(row, str) for column in row)
    return list(names), chain(first, rows)


def _json_row(text: str) -> Mapping[str, Any] | str:
    if _NOT_UTF8.search(text):
        return "row is not UTF-8 text"
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        return f"row is malformed: {error}"
    return values if isinstance(values, dict) else "row is no JSON object"


def _delimited(name: str, text: Iterable[str], delimiter: str) -> tuple[list[str], _TableRows]:
    csv.field_size_limit(_MAX_CELL)
    reader = csv.reader(text, delimiter=delimiter, strict=True)
    try:
        names = next(reader, [])
    except csv.Error as error:
        raise DataError(f"{name}: is not a table ({error})") from error
    if any(_NOT_UTF8.search(column) for column in names):
        raise DataError(f"{name}: is not UTF-8 text; save it as UTF-8")
    if twice := [column for column, count in Counter(names).items() if column and count > 1]:
        raise DataError(f"{name}: has two columns named '{twice[0]}'; rename one")

    def rows() -> _TableRows:
        while True:
            line = reader.line_num + 1
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                # A quote that is not closed takes all lines up to the next quote with it.
                yield from ((lost, f"row is malformed: {error}") for lost in range(line, reader.line_num + 1))
                continue
            if cells and len(cells) != len(names):
                yield line, f"row has {len(cells)} cells where the header has {len(names)}"
            elif any(map(_NOT_UTF8.search, cells)):
                yield line, "row is not UTF-8 text"
            elif cells:
                yield line, dict(zip(names, cells, strict=True))

    return names, rows()
