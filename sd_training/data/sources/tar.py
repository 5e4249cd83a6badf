"""WebDataset shards: indexed tar files whose members are read by offset, without tar parsing while training.

Grouping follows webdataset: the key of a member is its path up to the first dot of the file name, the extension is
the rest in lower case. Damage is never an error here: complete samples are kept and the problem is reported.
"""

import tarfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from sd_training.data.index.columns import Scalar, read_metadata, read_scalars, storable
from sd_training.data.sources.arrow import is_metadata, plain, plain_type
from sd_training.data.sources.base import (
    IMAGE_EXTENSIONS,
    MAX_IMAGE_BYTES,
    MAX_TEXT_BYTES,
    VERSION_SEPARATOR,
    ImageInfo,
    IndexedReader,
    IndexedShards,
    Report,
    Row,
    Shard,
    ShardScan,
    caption_of,
    collect,
    image_info,
)
from sd_training.data.storage.byte_file import Access, ByteFile, FileState, ReadAhead, seekable
from sd_training.data.storage.files import file_state, find_state, open_bytes
from sd_training.data.storage.locations import PIPE, shown
from sd_training.errors import DataError

MAX_NAME_CHARACTERS = 4096
"""Members with longer names are ignored."""
MAX_MEMBERS = 10_000_000
"""Members of one shard [count]. While it is indexed, each takes about 0.5 KB of memory besides its metadata."""
_MAX_HEADER_BYTES = 1 << 20
"""Longest extension of a member's header: a long name, or pax records."""
_MAX_GLOBAL_RECORDS = 1_000
"""Pax records that hold for all members of a shard [count]; tarfile copies them for each."""
_BLOCK = 512
_PADDING_READ = 1 << 20
"""Bytes read at once where only zeros are expected."""
_STATES_AT_ONCE = 16
_TOO_WIDE = 2**31
_COLUMNS = ("at:image_offset", "at:caption_offset", "check:caption")
_ROLES = {**dict.fromkeys(IMAGE_EXTENSIONS, "image"), "txt": "caption", "cls": "cls", "json": "metadata"}

Known = Mapping[str, Mapping[str, Scalar]]
"""Key → metadata that is known already and need not be read."""
Span = tuple[int, int]
"""Offset and length of a member's content [bytes]."""


@dataclass
class TarSample:
    """The members of one sample."""

    key: str
    spans: dict[str, Span] = field(default_factory=dict)
    """Of the roles `image`, `caption`, `cls`, `metadata`."""


class TarSource:
    """The source of tar shards.

    Where img2dataset left `00000.parquet` beside `00000.tar`, its columns are the metadata and no JSON is read. The
    caption of a sample without a `txt` member is its metadata field `caption`.

    Args:
        paths: paths or URLs of the shards.
        access: how remote ones are read.
    """

    identity = "tar"

    def __init__(self, paths: Sequence[str], access: Access) -> None:
        self.paths, self.access = list(paths), access

    def shards(self) -> list[Shard]:
        """As `Source.shards`."""

        def one(path: str) -> Shard:
            state, sidecar = file_state(path, self.access), self._sidecar(path)
            versions = [state.version] if sidecar is None else [state.version, sidecar.version]
            return Shard(path, state.size, VERSION_SEPARATOR.join(versions))

        with ThreadPoolExecutor(_STATES_AT_ONCE) as pool:
            return list(pool.map(one, self.paths))

    def _sidecar(self, path: str) -> FileState | None:
        """The table beside a shard, if it exists."""
        stem, dot, _ = path.rpartition(".")
        return find_state(f"{stem}.parquet", self.access) if dot and not path.startswith(PIPE) else None

    def scan(self, shard: Shard) -> ShardScan:
        """As `Source.scan`."""
        sidecar = self._sidecar(shard.location)
        known = {} if sidecar is None else _read_sidecar(sidecar, self.access)

        def rows(report: Report) -> Iterator[Row]:
            near = ReadAhead(file) if "://" in shard.location else file
            samples = scan_tar(near, report)
            # The key 000012 may be the number 12 there.
            found = [known.get(sample.key, known.get(sample.key.lstrip("0") or "0")) for sample in samples]
            if known and samples and not any(row is not None for row in found):
                report("", "metadata table names no sample of its shard")
            for sample, row in zip(samples, found, strict=True):
                yield _row(sample, near, row, report)

        file = open_bytes(shard.location, self.access)
        try:
            return collect(shown(shard.location), rows, _COLUMNS)
        finally:
            file.close()

    def reader(self, index: IndexedShards) -> IndexedReader:
        """As `Source.reader`."""
        return IndexedReader(index, self.access)


def _read_sidecar(state: FileState, access: Access) -> Known:
    file = open_bytes(state, access)
    try:
        table = pq.read_table(seekable(file))
        if "key" not in table.column_names:  # not one of img2dataset's
            return {}
        names = [field.name for field in table.schema if field.name != "key" and is_metadata(plain_type(field.type))]
        columns = {name: plain(table[name].combine_chunks()).to_pylist() for name in names}
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(f"the metadata table '{shown(state.location)}' cannot be read: {error}") from error
    finally:
        file.close()
    rows = enumerate(table["key"].to_pylist())
    return {str(key): read_scalars({name: columns[name][row] for name in names}) for row, key in rows}


def _row(sample: TarSample, file: ByteFile, known: Mapping[str, Scalar] | None, report: Report) -> Row:
    """Reads caption, class, metadata and the header of the image."""

    def content(role: str) -> bytes:
        offset, length = sample.spans.get(role, (0, 0))
        return b"" if length > MAX_TEXT_BYTES else file.pread(length, offset)

    caption_offset, caption_length, crc = -1, None, 0
    if "caption" in sample.spans:
        offset, length = sample.spans["caption"]
        text = content("caption")
        crc = zlib.crc32(text)
        try:
            text.decode()  # other encodings would train on wrong letters, so they are no caption
            if length > MAX_TEXT_BYTES:
                report(sample.key, f"caption has too many bytes: {length:,}")
            else:
                caption_offset, caption_length = offset, length
        except UnicodeDecodeError:
            report(sample.key, "caption is not UTF-8 text")
    metadata: Mapping[str, Scalar] = known or {}
    if known is None and "metadata" in sample.spans:
        try:
            metadata = read_metadata(content("metadata").decode("utf-8-sig", "replace"))
        except (ValueError, RecursionError):
            report(sample.key, "metadata is not a JSON object")
    offset, length = sample.spans["image"]
    info = ImageInfo(length, 0, 0)
    if length <= MAX_IMAGE_BYTES:
        info = _known_info(length, known or {}) or image_info(file, offset, length)
    return Row(
        sample.key,
        info,
        metadata,
        offset=offset,
        caption=caption_of(metadata.get("caption")) if caption_offset < 0 else None,
        caption_offset=caption_offset,
        caption_length=caption_length,
        caption_crc=crc,
        cls=content("cls").decode("utf-8-sig", "replace").strip() if "cls" in sample.spans else None,
    )


def _known_info(length: int, known: Mapping[str, Scalar]) -> ImageInfo | None:
    """By the table of img2dataset. In other metadata `width` may be that of the original, before it was resized."""
    width, height = known.get("width"), known.get("height")
    if not isinstance(width, float) or not isinstance(height, float):
        return None
    is_size = all(1 <= side < _TOO_WIDE for side in (width, height))
    return ImageInfo(length, int(width), int(height)) if is_size else None


# --- The headers of one shard ---


def scan_tar(file: ByteFile, report: Report) -> list[TarSample]:
    """Groups the members of an uncompressed tar file, or of several in a row, into samples. No content is read.

    OSError and DataError are passed on.

    Args:
        file: the shard.
        report: takes what is wrong.

    Returns:
        The samples that have an image, in file order.
    """
    scanner = _Scanner(file, report)
    start: int | None = 0
    try:
        while start is not None:
            start = scanner.read_part(start)
    except (OSError, DataError):
        raise
    except Exception as error:  # tarfile raises many kinds on damaged headers, RecursionError among them
        kind = "shard is truncated or damaged" if scanner.samples else "shard is not an uncompressed tar file"
        report("", f"{kind}: {error or type(error).__name__}")
        scanner.drop_partial()
    samples = scanner.samples.values()
    if not samples and scanner.ignored:
        report(scanner.ignored[0][0], "shard has no member of a known extension")
    else:
        scanner.report_ignored_images()
    for sample in samples:
        if "image" not in sample.spans:
            report(sample.key, "image missing")
    return [sample for sample in samples if "image" in sample.spans]


class _Headers:
    """The file object that tarfile reads headers from: no header is longer than `_MAX_HEADER_BYTES`, whatever length
    the file claims. Raises tarfile.ReadError."""

    def __init__(self, file: BinaryIO) -> None:
        self.seek, self.tell, self._file = file.seek, file.tell, file

    def read(self, length: int) -> bytes:
        if not 0 <= length <= _MAX_HEADER_BYTES:
            raise tarfile.ReadError(f"a header of {length:,} bytes")
        return self._file.read(length)


class _Scanner:
    def __init__(self, file: ByteFile, report: Report) -> None:
        self.file, self.report = file, report
        self.samples: dict[str, TarSample] = {}
        self.ignored: list[tuple[str, str, str]] = []
        """Name, key and extension of the first member of an unknown extension, of all images and texts among them."""
        self.num_members = self.num_before_part = 0
        self.run_key, self.run = "", list[str]()
        """Key of the last member, and the roles that members in a row have filled for it."""
        self.repeating = set[str]()
        """Keys of samples that came a second time."""

    def read_part(self, start: int) -> int | None:
        """Reads one of the tar files that the shard is made of (`cat a.tar b.tar`); returns where the next begins."""
        self.num_before_part, self.run_key = len(self.samples), ""
        try:
            headers: Any = _Headers(seekable(self.file, start))
            tar = tarfile.open(fileobj=headers, mode="r:")  # noqa: SIM115  # closed below
        except tarfile.ReadError:
            if start == 0:
                raise
            self.report("", f"shard goes on after its end mark: what begins at byte {start} is no whole tar file")
            return None
        with tar:
            for member in self._members(tar):
                self._place(member, start)
            return self._next_part(start + tar.offset)

    def _members(self, tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
        end = -1
        while (member := tar.next()) is not None:
            if member.size < 0 or tar.offset <= end:  # a header that points backwards would be read for ever
                raise tarfile.ReadError(f"invalid size at byte {member.offset}")
            self.num_members += 1
            if self.num_members > MAX_MEMBERS or len(tar.pax_headers) > _MAX_GLOBAL_RECORDS:
                raise tarfile.ReadError(f"too many members or global headers at byte {member.offset}")
            end = tar.offset
            tar.members = []  # type: ignore[attr-defined]  # tarfile keeps every header; a large shard has many
            yield member

    def _place(self, member: tarfile.TarInfo, start: int) -> None:
        """Adds the member to its sample, if its name and type are safe and its extension is known."""
        name = member.name
        if member.isdir():
            return
        if len(name) > MAX_NAME_CHARACTERS:
            self.report(name[:MAX_NAME_CHARACTERS], "member with a long name ignored")
        elif member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or member.issparse():
            self.report(name, "link, device or sparse member ignored")
        elif name.startswith("/") or ".." in name.split("/"):
            self.report(name, "member with an unsafe name ignored")
        else:
            key, extension = _split_name(name)
            role = _ROLES.get(extension)
            if role is None or not key:
                if not self.ignored or name.rpartition(".")[2].lower() in (*IMAGE_EXTENSIONS, "txt"):
                    self.ignored.append((name, key, extension))
                return
            # Members of a sample need not be neighbours; of several with one role, the first counts.
            spans = self.samples.setdefault(key, TarSample(key)).spans
            if key != self.run_key:
                self.run_key, self.run = key, []
            if role in spans and len(self.run) < len(spans):  # a second sample: its caption is not that of the first
                self.repeating.add(key)
                for taken in self.run:
                    del spans[taken]
                    self.report(key, f"repeated member ignored: its {taken}")
                self.run = []
            if key in self.repeating or role in spans:
                self.report(key, f"repeated member ignored: {name}")
            else:
                spans[role] = (start + member.offset_data, member.size)
                self.run.append(role)

    def _next_part(self, offset: int) -> int | None:
        """Where the next tar file begins after the end mark at `offset`. tarfile ends silently at a damaged header and
        at the end of a truncated file; both are reported here."""
        ending = self.file.pread(min(_BLOCK, max(0, self.file.size - offset)), offset)
        if len(ending) < _BLOCK or any(ending):
            where = f"no end mark after {self.file.size} bytes"
            where = f"no valid header at byte {offset}" if len(ending) == _BLOCK else where
            self.report("", f"shard is truncated or damaged: {where}")
            self.drop_partial()
            return None
        for start in range(offset, self.file.size, _PADDING_READ):
            zeros = self.file.pread(min(_PADDING_READ, self.file.size - start), start)
            if rest := zeros.lstrip(b"\0"):
                return start + (len(zeros) - len(rest)) // _BLOCK * _BLOCK
        return None

    def drop_partial(self) -> None:
        """Removes the last sample if content is missing, or if it has fewer members than the one before it."""
        last = list(self.samples.values())[-2:]
        if len(self.samples) == self.num_before_part:
            return
        is_cut = any(offset + length > self.file.size for offset, length in last[-1].spans.values())
        if is_cut or (len(last) == 2 and len(last[1].spans) < len(last[0].spans)):
            del self.samples[last[-1].key]
            self.report(last[-1].key, "sample cut off with its shard")

    def report_ignored_images(self) -> None:
        """Reports images that look like samples of their own and are not: `1.0.jpg` has the extension `0.jpg`."""
        captioned = {name.rpartition(".")[0] for name, _, _ in self.ignored if name.lower().endswith(".txt")}
        for name, key, extension in self.ignored:
            has_image = key in self.samples and "image" in self.samples[key].spans
            is_image = name.rpartition(".")[2].lower() in IMAGE_EXTENSIONS
            if is_image and (name.rpartition(".")[0] in captioned or not has_image):
                self.report(name, f"image ignored: its extension is {extension}; keys have no dots")


def _split_name(name: str) -> tuple[str, str]:
    """`a/b.seg.JPG` → (`a/b`, `seg.jpg`); a name without a key or without an extension gives empty strings."""
    folder, slash, base = storable(name).rpartition("/")
    stem, dot, extension = base.partition(".")
    return (f"{folder}{slash}{stem}", extension.lower()) if stem and dot else ("", "")
