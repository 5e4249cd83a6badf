"""Reads the headers of one tar shard. Members are never extracted, and only text members and image headers are read.

Grouping follows webdataset: the key of a member is its path up to the first dot of the file name, the extension is
the rest in lower case. This module runs in index processes and does not import torch.

Which members of a tar shard belong to one sample.
"""

import tarfile
import zlib
from collections.abc import Iterator, Mapping, MutableMapping, Set
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from sd_training.data.index.columns import MAX_FIELDS, Scalar, read_metadata, storable
from sd_training.data.problems import Problems, SkippedSample
from sd_training.data.samples.image import image_size
from sd_training.data.storage.files import ByteFile, seekable
from sd_training.errors import DataError

IMAGE_EXTENSIONS = frozenset({"jpg", "jpeg", "png", "webp"})


class Groups:
    """Tells the members of a sample from those of a later sample with the same key.

    Members of a sample need not be neighbours, so the second sample shows itself only when a name, or a role that an
    earlier run of neighbours has filled, comes again. What its own run gave until then is taken back.
    """

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._repeating: set[str] = set()
        self._key = ""
        self._run: dict[str, str] = {}
        """Role → name of the members of `_key` since another key was there."""

    def repeated(self, key: str, role: str, name: str, spans: MutableMapping[str, Any]) -> list[str]:
        """Looks at the next member.

        Args:
            key: of its sample.
            role: of the member in the sample.
            name: of the member.
            spans: by role, what the sample has; loses what is of the second sample.

        Returns:
            Names of members that must be left out: this one, and perhaps others before it. Empty where all is well.
        """
        if key != self._key:
            self._key, self._run = key, {}
        is_new = name not in self._names
        self._names.add(name)
        if key in self._repeating or (is_new and role in self._run):  # `1.jpg 1.png`: two images of one sample
            return [name]
        if is_new and role not in spans:
            self._run[role] = name
            return []
        self._repeating.add(key)
        begun = self._run if len(self._run) < len(spans) else {}
        for taken in begun:
            del spans[taken]
        return [*begun.values(), name]


class IgnoredMembers:
    """Members of extensions that are none of ours."""

    def __init__(self) -> None:
        self.first = ""
        """The first one's name."""
        self._images: list[tuple[str, str, str]] = []
        self._captioned: set[str] = set()

    def add(self, name: str, key: str, extension: str) -> None:
        """Takes note of a member."""
        self.first = self.first or name
        stem, _, kind = name.rpartition(".")
        if kind.lower() in IMAGE_EXTENSIONS:
            self._images.append((name, key, extension))
        elif kind.lower() == "txt":
            self._captioned.add(stem)

    def images(self, with_image: Set[str]) -> Iterator[tuple[str, str]]:
        """Name and extension of images that seem meant as samples: with a caption, or without a sample to belong to.

        Args:
            with_image: keys of the samples that have an image.
        """
        for name, key, extension in self._images:
            if name.rpartition(".")[0] in self._captioned or key not in with_image:
                yield name, extension


MAX_TEXT_BYTES = 1 << 20
"""Larger caption, class and metadata members are refused."""
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
_TOO_WIDE = 2**31
_HEADER_BUFFER = 4096
"""Bytes read at once where an image's size is looked up; the sizes of most files are in the first block."""

MAX_MEMBER_BYTES = 1 << 28
"""Larger images are not read, neither for their size nor in training."""

Span = tuple[int, int]
"""Offset and length of a member's content [bytes]."""
_ROLES = {**dict.fromkeys(IMAGE_EXTENSIONS, "image"), "txt": "caption", "cls": "cls", "json": "metadata"}


@dataclass
class TarSample:
    """The members of one sample. Only `metadata` and `cls` were read."""

    key: str
    spans: dict[str, Span] = field(default_factory=dict)
    """Of the roles `image`, `caption`, `cls`, `metadata`."""
    cls: str | None = None
    metadata: dict[str, Scalar] = field(default_factory=dict)
    """As `read_metadata` gives it."""
    size: tuple[int, int] = (0, 0)
    """Width and height of the upright image [pixels]; 0 when it cannot be told."""
    caption_crc: int = 0
    """CRC-32 of the caption member: its length alone does not tell another text from it."""


@dataclass
class TarScan:
    """Samples of a shard that have an image, in file order, and what was wrong."""

    samples: list[TarSample]
    problems: Problems


def scan_tar(location: str, file: ByteFile, known: Mapping[str | int, Mapping[str, Scalar]] | None = None) -> TarScan:
    """Groups the members of an uncompressed tar file, or of several in a row, into samples.

    Damage is no error here: complete samples are kept and the problem is named. OSError and DataError are passed on.

    Args:
        location: of the shard, for messages.
        file: the shard.
        known: key, or the number that it is, → metadata that is known already and need not be read.
    """
    problems = Problems()
    return TarScan(_Scanner(location, file, problems, known or {}).run(), problems)


class _Headers:
    """What tarfile reads headers from. It takes lengths from the file, and reads what they say into memory.

    Args:
        file: the shard.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.seek, self.tell, self._file = file.seek, file.tell, file

    def read(self, length: int) -> bytes:
        """Up to `length` bytes. Raises tarfile.ReadError where no header is so long."""
        if not 0 <= length <= _MAX_HEADER_BYTES:
            raise tarfile.ReadError(f"a header of {length:,} bytes")
        return self._file.read(length)


class _Scanner:
    def __init__(
        self, location: str, file: ByteFile, problems: Problems, known: Mapping[str | int, Mapping[str, Scalar]]
    ) -> None:
        self.location, self.file, self.problems, self.known = location, file, problems, known
        self.samples: dict[str, TarSample] = {}
        self.groups = Groups()
        self.first_of_part = self.num_members = 0
        self.fields: set[str] = set()
        self.ignored = IgnoredMembers()

    def run(self) -> list[TarSample]:
        """All samples of the shard, in their order."""
        start: int | None = 0
        try:
            while start is not None:
                start = self._part(start)
        except (OSError, DataError):
            raise
        except Exception as error:  # tarfile lets many kinds through on damaged headers, RecursionError among them
            kind = "shard is truncated or damaged" if self.samples else "shard is not an uncompressed tar file"
            self._problem("", f"{kind}: {error or type(error).__name__}")
            self._drop_partial()
        for sample in self.samples.values():
            self._describe(sample)
        self._name_ignored()
        return [sample for sample in self.samples.values() if self._has_image(sample)]

    def _part(self, start: int) -> int | None:
        """Reads one of the tar files that the shard is made of (`cat a.tar b.tar`); returns where the next begins."""
        self.first_of_part = len(self.samples)
        try:
            headers: Any = _Headers(seekable(self.file, start))
            tar = tarfile.open(fileobj=headers, mode="r:")  # noqa: SIM115  # closed below
        except tarfile.ReadError:
            if start == 0:
                raise
            self._problem("", f"shard goes on after its end mark: what begins at byte {start} is no whole tar file")
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
            tar.members = []  # type: ignore[attr-defined]  # tarfile remembers every header; a large shard has many
            yield member

    def _place(self, member: tarfile.TarInfo, start: int) -> None:
        """Files the member under its sample, if its name and type are safe and its extension is one of ours."""
        if member.isdir():
            return None
        if len(member.name) > MAX_NAME_CHARACTERS:
            return self._problem(member.name[:MAX_NAME_CHARACTERS], "member with a long name ignored")
        key, extension = _split_name(member.name)
        if not (member.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and not member.issparse()):
            return self._problem(member.name, "link, device or sparse member ignored")
        if member.name.startswith("/") or ".." in member.name.split("/"):
            return self._problem(member.name, "member with an unsafe name ignored")
        role = _ROLES.get(extension)
        if role is None or not key:
            return self.ignored.add(member.name, key, extension)
        sample = self.samples.setdefault(key, TarSample(key))
        repeated = self.groups.repeated(key, role, member.name, sample.spans)
        for name in repeated:
            self._problem(key, f"repeated member ignored: {name}")
        if not repeated:
            sample.spans[role] = (start + member.offset_data, member.size)
        return None

    def _next_part(self, offset: int) -> int | None:
        """tarfile ends silently at a damaged header and at a file that was cut; both are found here."""
        ending = self.file.pread(min(_BLOCK, max(0, self.file.size - offset)), offset)
        if len(ending) == _BLOCK and not any(ending):
            return self._after_zeros(offset)
        if len(ending) == _BLOCK:
            self._problem("", f"shard is truncated or damaged: no valid header at byte {offset}")
        else:
            self._problem("", f"shard is truncated or damaged: no end mark after {self.file.size} bytes")
        self._drop_partial()
        return None

    def _after_zeros(self, offset: int) -> int | None:
        """The first block from `offset` on that is not all zeros."""
        for start in range(offset, self.file.size, _PADDING_READ):
            zeros = self.file.pread(min(_PADDING_READ, self.file.size - start), start)
            if rest := zeros.lstrip(b"\0"):
                return start + (len(zeros) - len(rest)) // _BLOCK * _BLOCK
        return None

    def _drop_partial(self) -> None:
        """Removes the last sample if content is missing, or if it has fewer members than the one before it."""
        last = list(self.samples.values())[-2:]
        if len(self.samples) == self.first_of_part:
            return
        cut = any(offset + length > self.file.size for offset, length in last[-1].spans.values())
        if cut or (len(last) == 2 and len(last[1].spans) < len(last[0].spans)):
            del self.samples[last[-1].key]
            self._problem(last[-1].key, "sample cut off with its shard")

    def _has_image(self, sample: TarSample) -> bool:
        if "image" not in sample.spans:
            self._problem(sample.key, "image missing")
        return "image" in sample.spans

    def _describe(self, sample: TarSample) -> None:
        """Class, metadata and image size."""
        if "caption" in sample.spans:
            self._check_caption(sample)
        if "cls" in sample.spans:
            sample.cls = self._text(sample.spans["cls"]).strip()
        if (known := known_of(self.known, sample.key)) is not None:
            sample.metadata = self._limited(dict(known))
        elif "metadata" in sample.spans:
            try:
                sample.metadata = self._limited(read_metadata(self._text(sample.spans["metadata"])))
            except (ValueError, RecursionError):
                self._problem(sample.key, "metadata is not a JSON object")
        if "image" in sample.spans:
            if (length := sample.spans["image"][1]) > MAX_MEMBER_BYTES:
                return self._problem(sample.key, f"image has too many bytes: {length:,}")
            sample.size = _known_size(known or {}) or self._image_size(sample.spans["image"])
            if not sample.size[0]:
                self._problem(sample.key, "image size cannot be told")
        return None

    def _name_ignored(self) -> None:
        """Names what looks like samples of their own and is none: `1.0.jpg` has the extension `0.jpg`."""
        if not self.samples and self.ignored.first:
            return self._problem(self.ignored.first, "shard has no member of a known extension")
        with_image = {key for key, sample in self.samples.items() if "image" in sample.spans}
        for name, extension in self.ignored.images(with_image):
            self._problem(name, f"image ignored: its extension is {extension}; keys have no dots")
        return None

    def _limited(self, metadata: dict[str, Scalar]) -> dict[str, Scalar]:
        """Without the fields beyond one more than `MAX_FIELDS` of the shard: they are left out later, and named."""
        kept = {}
        for name, value in metadata.items():
            if name in self.fields or len(self.fields) <= MAX_FIELDS:
                self.fields.add(name)
                kept[name] = value
        return kept

    def _image_size(self, span: Span) -> tuple[int, int]:
        offset, length = span
        return image_size(seekable(self.file, offset, length, _HEADER_BUFFER))

    def _check_caption(self, sample: TarSample) -> None:
        """A caption in another encoding would train on wrong letters, so it is none."""
        offset, length = sample.spans["caption"]
        if length > MAX_TEXT_BYTES:
            del sample.spans["caption"]
            return self._problem(sample.key, f"caption has too many bytes: {length:,}")
        content = self.file.pread(length, offset)
        sample.caption_crc = zlib.crc32(content)
        try:
            content.decode()
        except UnicodeDecodeError:
            self._problem(sample.key, "caption is not UTF-8 text")
            del sample.spans["caption"]
        return None

    def _text(self, span: Span) -> str:
        offset, length = span
        return "" if length > MAX_TEXT_BYTES else self.file.pread(length, offset).decode("utf-8-sig", "replace")

    def _problem(self, key: str, reason: str) -> None:
        self.problems.add(SkippedSample(self.location, storable(key), storable(reason)))


def known_of(known: Mapping[str | int, Mapping[str, Scalar]], key: str) -> Mapping[str, Scalar] | None:
    """What a table knows about a sample; the key 000012 may be the number 12 there."""
    found = known.get(key)
    return known.get(int(key)) if found is None and key.isascii() and key.isdecimal() and len(key) < 20 else found


def _known_size(known: Mapping[str, Scalar]) -> tuple[int, int] | None:
    """As img2dataset gives it. Other metadata may mean the original, before it was resized, by `width`."""
    width, height = (known.get(name) for name in ("width", "height"))
    if not isinstance(width, float) or not isinstance(height, float):
        return None
    return (int(width), int(height)) if all(1 <= side < _TOO_WIDE for side in (width, height)) else None


def _split_name(name: str) -> tuple[str, str]:
    """`a/b.seg.JPG` → (`a/b`, `seg.jpg`); a name without a key or without an extension gives empty strings."""
    folder, slash, base = storable(name).rpartition("/")
    stem, dot, extension = base.partition(".")
    return (f"{folder}{slash}{stem}", extension.lower()) if stem and dot else ("", "")
