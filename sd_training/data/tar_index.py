"""Reads the headers of one tar shard. Members are never extracted, and only text members and image headers are read.

Grouping follows webdataset: the key of a member is its path up to the first dot of the file name, the extension is
the rest in lower case. This module runs in index processes and does not import torch.
"""

import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from sd_training.data.byte_files import ByteFile, seekable
from sd_training.data.image_decode import image_size
from sd_training.data.index_columns import Scalar, read_metadata, storable
from sd_training.data.problems import Problems, SkippedSample

IMAGE_EXTENSIONS = frozenset({"jpg", "jpeg", "png", "webp"})
MAX_TEXT_BYTES = 1 << 20
"""Larger class and metadata members are refused."""
_BLOCK = 512
_HEADER_BUFFER = 4096
"""Bytes read at once where an image's size is looked up; the sizes of most files are in the first block."""

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


@dataclass
class TarScan:
    """Samples of a shard that have an image, in file order, and what was wrong."""

    samples: list[TarSample]
    problems: Problems


def scan_tar(location: str, file: ByteFile, known: Mapping[str, Mapping[str, Scalar]] | None = None) -> TarScan:
    """Groups the members of an uncompressed tar file into samples.

    Damage is no error here: complete samples are kept and the problem is named. OSError and DataError are passed on.

    Args:
        location: of the shard, for messages.
        file: the shard.
        known: key → metadata that is known already and need not be read.
    """
    problems = Problems()
    return TarScan(_Scanner(location, file, problems, known or {}).run(), problems)


class _Scanner:
    def __init__(
        self, location: str, file: ByteFile, problems: Problems, known: Mapping[str, Mapping[str, Scalar]]
    ) -> None:
        self.location, self.file, self.problems, self.known = location, file, problems, known
        self.samples: dict[str, TarSample] = {}
        self.first_ignored = ""

    def run(self) -> list[TarSample]:
        try:
            with tarfile.open(fileobj=seekable(self.file), mode="r:") as tar:
                for member in self._members(tar):
                    self._place(member)
                self._check_end(tar.offset)
        except tarfile.TarError as error:
            kind = "shard is truncated or damaged" if self.samples else "shard is not an uncompressed tar file"
            self._problem("", f"{kind}: {error}")
            self._drop_partial()
        if not self.samples and self.first_ignored:  # for example keys with dots: `1.0.jpg` has the extension `0.jpg`
            self._problem(self.first_ignored, "shard has no member of a known extension")
        for sample in self.samples.values():
            self._describe(sample)
        return [sample for sample in self.samples.values() if self._has_image(sample)]

    def _members(self, tar: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
        end = -1
        while (member := tar.next()) is not None:
            if member.size < 0 or tar.offset <= end:  # a header that points backwards would be read for ever
                raise tarfile.ReadError(f"invalid size at byte {member.offset}")
            end = tar.offset
            tar.members = []  # type: ignore[attr-defined]  # tarfile remembers every header; a large shard has many
            yield member

    def _place(self, member: tarfile.TarInfo) -> None:
        """Files the member under its sample, if its name and type are safe and its extension is one of ours."""
        if member.isdir():
            return
        key, extension = _split_name(member.name)
        if not (member.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and not member.issparse()):
            return self._problem(member.name, "link, device or sparse member ignored")
        if member.name.startswith("/") or ".." in member.name.split("/"):
            return self._problem(member.name, "member with an unsafe name ignored")
        role = _ROLES.get(extension)
        if role is None or not key:
            self.first_ignored = self.first_ignored or member.name
            return None
        sample = self.samples.setdefault(key, TarSample(key))
        if role in sample.spans:
            return self._problem(key, f"repeated member ignored: {member.name}")
        sample.spans[role] = (member.offset_data, member.size)
        return None

    def _check_end(self, offset: int) -> None:
        """tarfile ends silently at a damaged header and at a file that was cut; both are found here."""
        ending = self.file.pread(min(_BLOCK, max(0, self.file.size - offset)), offset)
        if len(ending) == _BLOCK and not any(ending):
            return
        if len(ending) == _BLOCK:
            self._problem("", f"shard is truncated or damaged: no valid header at byte {offset}")
        else:
            self._problem("", f"shard is truncated or damaged: no end mark after {self.file.size} bytes")
        self._drop_partial()

    def _drop_partial(self) -> None:
        """Removes the last sample if content is missing, or if it has fewer members than the one before it."""
        last = list(self.samples.values())[-2:]
        if not last:
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
        if "cls" in sample.spans:
            sample.cls = self._text(sample.spans["cls"]).strip()
        if (known := self.known.get(sample.key)) is not None:
            sample.metadata = dict(known)
        elif "metadata" in sample.spans:
            try:
                sample.metadata = read_metadata(self._text(sample.spans["metadata"]))
            except (ValueError, RecursionError):
                self._problem(sample.key, "metadata is not a JSON object")
        if "image" in sample.spans:
            sample.size = self._known_size(sample.key) or self._image_size(sample.spans["image"])

    def _known_size(self, key: str) -> tuple[int, int] | None:
        """As img2dataset gives it. Other metadata may mean the original, before it was resized, by `width`."""
        known = self.known.get(key, {})
        width, height = known.get("width"), known.get("height")
        return (int(width), int(height)) if isinstance(width, float) and isinstance(height, float) else None

    def _image_size(self, span: Span) -> tuple[int, int]:
        offset, length = span
        return image_size(seekable(self.file, offset, length, _HEADER_BUFFER))

    def _text(self, span: Span) -> str:
        offset, length = span
        return "" if length > MAX_TEXT_BYTES else self.file.pread(length, offset).decode("utf-8", "replace")

    def _problem(self, key: str, reason: str) -> None:
        self.problems.add(SkippedSample(self.location, storable(key), storable(reason)))


def _split_name(name: str) -> tuple[str, str]:
    """`a/b.seg.JPG` → (`a/b`, `seg.jpg`); a name without a key or without an extension gives empty strings."""
    folder, slash, base = storable(name).rpartition("/")
    stem, dot, extension = base.partition(".")
    return (f"{folder}{slash}{stem}", extension.lower()) if stem and dot else ("", "")
