"""WebDataset shards: indexed tar files whose members are read by offset, without tar parsing while training.

Grouping follows webdataset: the key of a member is its path up to the first dot of the file name, the extension is
the rest in lower case; but members of a sample need not be neighbours. Damage is never an error here: complete samples
are kept and the problem is reported. As webdataset does, a shard is read up to its end mark; what follows is reported.
"""

import tarfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field

from sd_training.data.sources import base
from sd_training.data.sources.base import Report, Row, Shard, storable
from sd_training.data.storage.files import ByteFile, open_bytes
from sd_training.errors import DataError

_BLOCK = 512
_PADDING_READ = 1 << 20
"""Bytes read at once where only zeros are expected."""
_ROLES = {**dict.fromkeys(base.IMAGE_EXTENSIONS, "image"), "txt": "caption", "cls": "cls", "json": "metadata"}


@dataclass
class TarSample:
    """The members of one sample."""

    key: str
    image: Row = field(default_factory=dict)
    """Columns about the size of the image."""
    spans: dict[str, tuple[int, int]] = field(default_factory=dict)
    """`image`, `caption`, `cls`, `metadata` → offset and length of the member's content [bytes]."""


class TarSource(base.Source):
    """The source of tar shards. The caption of a sample without a `txt` member is its metadata field `caption`."""

    identity = "tar"
    columns = ("at:image_offset", "at:caption_offset", "check:caption")

    def image_root(self, shard: Shard) -> str:
        """As `Source.image_root`: no image is a separate file."""
        return ""

    def rows(self, shard: Shard, report: Report) -> Iterator[Row]:
        """As `Source.rows`."""
        with closing(open_bytes(shard.location, self.access)) as file:
            for sample in scan_tar(file, report):
                yield _row(sample, file, report)


def _row(sample: TarSample, file: ByteFile, report: Report) -> Row:
    """Reads caption, class and metadata."""

    def content(role: str) -> bytes:
        offset, length = sample.spans[role]
        return b"" if length > base.MAX_TEXT_BYTES else file.pread(length, offset)

    row: Row = {"key": sample.key, "at:caption_offset": -1, "check:caption": 0, **sample.image}
    if "caption" in sample.spans:
        offset, length = sample.spans["caption"]
        text = content("caption")
        row["check:caption"] = zlib.crc32(text)
        try:
            text.decode()  # other encodings would train on wrong letters, so they are no caption
            if length > base.MAX_TEXT_BYTES:
                report(sample.key, f"caption has too many bytes: {length:,}")
            else:
                row |= {"at:caption_offset": offset, "caption_length": length}
        except UnicodeDecodeError:
            report(sample.key, "caption is not UTF-8 text")
    if "metadata" in sample.spans:
        row["metadata"] = base.metadata_of(sample.key, content("metadata"), report)
        if row["at:caption_offset"] < 0:
            row["caption"] = base.caption_of(row["metadata"].get("caption"))
    if "cls" in sample.spans:
        row["cls"] = content("cls").decode("utf-8-sig", "replace").strip()
    return row


def scan_tar(file: ByteFile, report: Report) -> list[TarSample]:
    """Groups the members of an uncompressed tar file into samples. Of contents, headers of images are read.

    OSError and DataError are passed on.

    Args:
        file: the shard.
        report: takes what is wrong.

    Returns:
        The samples that have an image, in file order.
    """
    samples, repeated, ignored = dict[str, TarSample](), set[str](), list[tuple[str, str, str]]()
    damage, end = None, -1
    try:
        with tarfile.open(fileobj=file.stream, mode="r:") as tar:
            while (member := tar.next()) is not None:
                if member.size < 0 or tar.offset <= end:  # a header that points backwards would be read forever
                    raise tarfile.ReadError(f"invalid size at byte {member.offset}")
                end = tar.offset
                tar.members = []  # type: ignore[attr-defined]  # tarfile keeps every header; a large shard has many
                key, role, extension = _placed(member, report)
                if role is not None:
                    sample = samples.setdefault(key, TarSample(key))
                    if role in sample.spans:  # what belongs together is not known
                        repeated.add(key)
                        report(key, f"sample with a second {role} ignored: {member.name}")
                    sample.spans[role] = (member.offset_data, member.size)
                    if role == "image" and (content := tar.extractfile(member)):
                        place = {"at:image_offset": member.offset_data}
                        sample.image = {**place, **base.image_columns(content, member.size)}
                elif extension.rpartition(".")[2] in base.IMAGE_EXTENSIONS:
                    ignored.append((key, member.name, extension))
            damage = _damage_after(file, tar.offset, report)
    except (OSError, DataError):
        raise
    except Exception as error:  # tarfile raises many kinds on damaged headers, RecursionError among them
        damage = str(error) or type(error).__name__
    if damage is not None:
        kind = "shard is truncated or damaged" if samples else "shard is not an uncompressed tar file"
        report("", f"{kind}: {damage}")
        for key in _cut_off(list(samples.values()), file):
            report(key, "sample cut off with its shard")
            del samples[key]
    elif not samples and not ignored:
        report("", "shard has no member of a known extension")
    for key, name, extension in ignored:
        if key not in samples or "image" not in samples[key].spans:
            report(name, f"image ignored: its extension is {extension}; keys have no dots")
    found = [sample for sample in samples.values() if sample.key not in repeated]
    for sample in found:
        if "image" not in sample.spans:
            report(sample.key, "image missing")
    return [sample for sample in found if "image" in sample.spans]


def _cut_off(samples: Sequence[TarSample], file: ByteFile) -> list[str]:
    """Keys of samples whose content is missing, and of the last one if it has fewer members than the one before it."""
    cut = [s.key for s in samples if any(offset + length > file.size for offset, length in s.spans.values())]
    if len(samples) > 1 and len(samples[-1].spans) < len(samples[-2].spans) and samples[-1].key not in cut:
        cut.append(samples[-1].key)
    return cut


def _placed(member: tarfile.TarInfo, report: Report) -> tuple[str, str | None, str]:
    """Key, role if the member is a part of a sample, and extension; empty where its name or type is not safe."""
    name = storable(member.name)
    if member.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or member.issparse():
        if not member.isdir():
            report(name, "link, device or sparse member ignored")
    elif name.startswith("/") or ".." in name.split("/"):
        report(name, "member with an unsafe name ignored")
    else:
        folder, slash, file_name = name.rpartition("/")
        stem, _, extension = file_name.partition(".")
        extension = extension.lower()
        return f"{folder}{slash}{stem}", _ROLES.get(extension) if stem else None, extension
    return "", None, ""


def _damage_after(file: ByteFile, offset: int, report: Report) -> str | None:
    """What is wrong where tarfile ended: it ends silently at a damaged header and at the end of a truncated file. What
    follows an end mark is reported."""
    ending = file.pread(min(_BLOCK, max(0, file.size - offset)), offset)
    if len(ending) < _BLOCK:
        return f"no end mark after {file.size} bytes"
    if any(ending):
        return f"no valid header at byte {offset}"
    for start in range(offset, file.size, _PADDING_READ):
        if any(file.pread(min(_PADDING_READ, file.size - start), start)):
            report("", "shard goes on after its end mark: what follows is not read, as of tar files joined by `cat`")
            break
    return None
