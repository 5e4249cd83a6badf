"""The headers of one tar shard: which members belong to which sample, and where they lie. No content is read.

Grouping follows webdataset: the key of a member is its path up to the first dot of the file name, the extension is
the rest in lower case. Damage is never an error here: complete samples are kept and the problem is reported.
"""

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from sd_training.data.index.columns import storable
from sd_training.data.sources.base import IMAGE_EXTENSIONS, Report
from sd_training.data.storage.byte_file import ByteFile, seekable
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

_ROLES = {**dict.fromkeys(IMAGE_EXTENSIONS, "image"), "txt": "caption", "cls": "cls", "json": "metadata"}

Span = tuple[int, int]
"""Offset and length of a member's content [bytes]."""


@dataclass
class TarSample:
    """The members of one sample."""

    key: str
    spans: dict[str, Span] = field(default_factory=dict)
    """Of the roles `image`, `caption`, `cls`, `metadata`."""


def scan_tar(file: ByteFile, report: Report) -> list[TarSample]:
    """Groups the members of an uncompressed tar file, or of several in a row, into samples.

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
        self.names: set[str] = set()
        self.repeating: set[str] = set()
        """Keys of samples that came a second time."""
        self.run_key = ""
        self.run: dict[str, str] = {}
        """Role → name of the members of `run_key` since another key was there."""

    def read_part(self, start: int) -> int | None:
        """Reads one of the tar files that the shard is made of (`cat a.tar b.tar`); returns where the next begins."""
        self.num_before_part = len(self.samples)
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
            if role is not None and key:
                self._add(key, role, name, (start + member.offset_data, member.size))
            elif not self.ignored or name.rpartition(".")[2].lower() in (*IMAGE_EXTENSIONS, "txt"):
                self.ignored.append((name, key, extension))

    def _add(self, key: str, role: str, name: str, span: Span) -> None:
        """Adds a member to the sample of its key, unless it belongs to a later sample with the same key.

        Members of a sample need not be neighbours, so a second sample shows only when a name, or a role that an
        earlier run of neighbours has filled, appears again. What its run gave until then is taken back.
        """
        spans = self.samples.setdefault(key, TarSample(key)).spans
        if key != self.run_key:
            self.run_key, self.run = key, {}
        is_new = name not in self.names
        self.names.add(name)
        repeated = [name]
        if key not in self.repeating and not (is_new and role in self.run):  # `1.jpg 1.png`: two images of one sample
            if is_new and role not in spans:
                self.run[role], spans[role] = name, span
                return
            self.repeating.add(key)
            if len(self.run) < len(spans):
                repeated = [*self.run.values(), name]
                for taken in self.run:
                    del spans[taken]
        for taken in repeated:
            self.report(key, f"repeated member ignored: {taken}")

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
