"""WebDataset shards: indexed tar files whose members are read by offset, without tar parsing while training.

Grouping follows webdataset: the key of a member is its path up to the first dot of the file name, the extension is
the rest in lower case; but members of a sample need not be neighbours. Damage is never an error here: complete samples
are kept and the problem is reported.
"""

import tarfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field

from sd_training.data.index.columns import Scalar, read_metadata, storable
from sd_training.data.sources import base
from sd_training.data.sources.base import Report, Row, Shard
from sd_training.data.storage.byte_file import Access, ByteFile, ReadAhead, seekable
from sd_training.data.storage.files import file_states, open_bytes
from sd_training.data.storage.locations import shown
from sd_training.errors import DataError

_BLOCK = 512
_PADDING_READ = 1 << 20
"""Bytes read at once where only zeros are expected."""
_COLUMNS = ("at:image_offset", "at:caption_offset", "check:caption")
_ROLES = {**dict.fromkeys(base.IMAGE_EXTENSIONS, "image"), "txt": "caption", "cls": "cls", "json": "metadata"}


@dataclass
class TarSample:
    """The members of one sample."""

    key: str
    spans: dict[str, tuple[int, int]] = field(default_factory=dict)
    """`image`, `caption`, `cls`, `metadata` → offset and length of the member's content [bytes]."""


class TarSource:
    """The source of tar shards. The caption of a sample without a `txt` member is its metadata field `caption`.

    Args:
        paths: paths or URLs of the shards.
        access: how remote ones are read.
    """

    identity = "tar"

    def __init__(self, paths: Sequence[str], access: Access) -> None:
        self.paths, self.access = list(paths), access

    def shards(self) -> list[Shard]:
        """As `Source.shards`."""
        return file_states(self.paths, self.access)

    def scan(self, shard: Shard) -> base.ShardScan:
        """As `Source.scan`."""
        with closing(open_bytes(shard.location, self.access)) as file:
            near = ReadAhead(file) if "://" in shard.location else file

            def rows(report: Report) -> Iterator[Row]:
                return (_row(sample, near, report) for sample in scan_tar(near, report))

            return base.collect(shown(shard.location), rows, _COLUMNS)

    def reader(self, index: base.IndexedShards) -> base.IndexedReader:
        """As `Source.reader`."""
        return base.IndexedReader(index, self.access)


def _row(sample: TarSample, file: ByteFile, report: Report) -> Row:
    """Reads caption, class, metadata and the header of the image."""

    def content(role: str) -> bytes:
        offset, length = sample.spans.get(role, (0, 0))
        return b"" if length > base.MAX_TEXT_BYTES else file.pread(length, offset)

    caption_offset, caption_length, crc = -1, None, 0
    if "caption" in sample.spans:
        offset, length = sample.spans["caption"]
        text = content("caption")
        crc = zlib.crc32(text)
        try:
            text.decode()  # other encodings would train on wrong letters, so they are no caption
            if length > base.MAX_TEXT_BYTES:
                report(sample.key, f"caption has too many bytes: {length:,}")
            else:
                caption_offset, caption_length = offset, length
        except UnicodeDecodeError:
            report(sample.key, "caption is not UTF-8 text")
    metadata: Mapping[str, Scalar] = {}
    if "metadata" in sample.spans:
        try:
            metadata = read_metadata(content("metadata").decode("utf-8-sig", "replace"))
        except (ValueError, RecursionError):
            report(sample.key, "metadata is not a JSON object")
    offset, length = sample.spans["image"]
    return Row(
        sample.key,
        base.image_info(file, offset, length),
        metadata,
        offset=offset,
        caption=base.caption_of(metadata.get("caption")) if caption_offset < 0 else None,
        caption_offset=caption_offset,
        caption_length=caption_length,
        caption_crc=crc,
        cls=content("cls").decode("utf-8-sig", "replace").strip() if "cls" in sample.spans else None,
    )


# --- The headers of one shard ---


def scan_tar(file: ByteFile, report: Report) -> list[TarSample]:
    """Groups the members of an uncompressed tar file, or of several in a row (`cat a.tar b.tar`), into samples. No
    content is read.

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
    else:
        if not scanner.samples and not scanner.ignored:
            report("", "shard has no member of a known extension")
    for key, name, extension in scanner.ignored:
        if key not in scanner.samples or "image" not in scanner.samples[key].spans:
            report(name, f"image ignored: its extension is {extension}; keys have no dots")
    samples = [sample for sample in scanner.samples.values() if sample.key not in scanner.repeated]
    for sample in samples:
        if "image" not in sample.spans:
            report(sample.key, "image missing")
    return [sample for sample in samples if "image" in sample.spans]


class _Scanner:
    def __init__(self, file: ByteFile, report: Report) -> None:
        self.file, self.report = file, report
        self.samples: dict[str, TarSample] = {}
        self.ignored: list[tuple[str, str, str]] = []
        """Key, name and extension of images of unknown extensions, such as `0.jpg` of `1.0.jpg`."""
        self.repeated = set[str]()
        """Keys of which a member came twice: what belongs together is not known."""
        self.num_before_part = 0

    def read_part(self, start: int) -> int | None:
        """Reads one of the tar files that the shard is made of; returns where the next begins."""
        self.num_before_part = len(self.samples)
        try:
            tar = tarfile.open(fileobj=seekable(self.file, start), mode="r:")  # noqa: SIM115  # closed below
        except tarfile.ReadError:
            if start == 0:
                raise
            self.report("", f"shard goes on after its end mark: what begins at byte {start} is no whole tar file")
            return None
        with tar:
            end = -1
            while (member := tar.next()) is not None:
                if member.size < 0 or tar.offset <= end:  # a header that points backwards would be read for ever
                    raise tarfile.ReadError(f"invalid size at byte {member.offset}")
                end = tar.offset
                tar.members = []  # type: ignore[attr-defined]  # tarfile keeps every header; a large shard has many
                self._place(member, start)
            return self._next_part(start + tar.offset)

    def _place(self, member: tarfile.TarInfo, start: int) -> None:
        """Adds the member to its sample, if its name and type are safe and its extension is known."""
        if member.isdir():
            return
        name = storable(member.name)
        folder, slash, file_name = name.rpartition("/")
        stem, _, extension = file_name.partition(".")
        key, extension = f"{folder}{slash}{stem}", extension.lower()
        role = _ROLES.get(extension)
        if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or member.issparse():
            self.report(name, "link, device or sparse member ignored")
        elif name.startswith("/") or ".." in name.split("/"):
            self.report(name, "member with an unsafe name ignored")
        elif role is not None and stem:
            spans = self.samples.setdefault(key, TarSample(key)).spans
            if role in spans:
                self.repeated.add(key)
                self.report(key, f"sample with a second {role} ignored: {name}")
            spans[role] = (start + member.offset_data, member.size)
        elif extension.rpartition(".")[2] in base.IMAGE_EXTENSIONS:
            self.ignored.append((key, name, extension))

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
