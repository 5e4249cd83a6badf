"""WebDataset shards: indexed tar files whose members are read by offset, without tar parsing while training."""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pyarrow.parquet as pq

from sd_training.data.index.columns import Scalar, read_metadata, read_scalars
from sd_training.data.sources.arrow_cells import is_metadata, plain, plain_type
from sd_training.data.sources.base import (
    MAX_IMAGE_BYTES,
    MAX_TEXT_BYTES,
    ImageInfo,
    IndexedShards,
    Report,
    Row,
    Shard,
    ShardScan,
    caption_of,
    collect,
)
from sd_training.data.sources.reader import VERSION_SEPARATOR, IndexedReader, image_info
from sd_training.data.sources.tar_index import Span, TarSample, scan_tar
from sd_training.data.storage.byte_file import Access, ByteFile, FileState, ReadAhead, seekable
from sd_training.data.storage.files import file_state, find_state, open_bytes
from sd_training.data.storage.locations import PIPE, shown
from sd_training.errors import DataError

_STATES_AT_ONCE = 16
_TOO_WIDE = 2**31
_COLUMNS = ("at:image_offset", "at:caption_offset", "check:caption")
Known = Mapping[str | int, Mapping[str, Scalar]]
"""Key, or the number that it is, → metadata that is known already and need not be read."""


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
        known = self._known(shard.location)

        def rows(report: Report) -> Iterator[Row]:
            near = ReadAhead(file) if "://" in shard.location else file
            samples = scan_tar(near, report)
            if known and samples and all(_known_of(known, sample.key) is None for sample in samples):
                report("", "metadata table names no sample of its shard")
            for sample in samples:
                yield _row(sample, near, _known_of(known, sample.key), report)

        file = open_bytes(shard.location, self.access)
        try:
            return collect(shown(shard.location), rows, _COLUMNS)
        finally:
            file.close()

    def _known(self, path: str) -> Known:
        sidecar = self._sidecar(path)
        if sidecar is None:
            return {}
        file = open_bytes(sidecar.location, self.access)
        try:
            return _read_sidecar(file)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise DataError(f"the metadata table '{shown(sidecar.location)}' cannot be read: {error}") from error
        finally:
            file.close()

    def reader(self, index: IndexedShards) -> IndexedReader:
        """As `Source.reader`."""
        return IndexedReader(index, self.access)


def _read_sidecar(file: ByteFile) -> Known:
    table = pq.read_table(seekable(file))
    if "key" not in table.column_names:  # not one of img2dataset's
        return {}
    names = [field.name for field in table.schema if field.name != "key" and is_metadata(plain_type(field.type))]
    columns = {name: plain(table[name].combine_chunks()).to_pylist() for name in names}
    is_number = pa.types.is_integer(table.schema.field("key").type)
    return {
        key if is_number and key is not None else str(key): read_scalars({name: columns[name][i] for name in names})
        for i, key in enumerate(table["key"].to_pylist())
    }


def _known_of(known: Known, key: str) -> Mapping[str, Scalar] | None:
    """What a table holds about a sample; the key 000012 may be the number 12 there."""
    found = known.get(key)
    return known.get(int(key)) if found is None and key.isascii() and key.isdecimal() and len(key) < 20 else found


def _row(sample: TarSample, file: ByteFile, known: Mapping[str, Scalar] | None, report: Report) -> Row:
    """Reads caption, class, metadata and the header of the image."""

    def text(role: str) -> str:
        offset, length = sample.spans[role]
        return "" if length > MAX_TEXT_BYTES else file.pread(length, offset).decode("utf-8-sig", "replace")

    span, crc = _caption(sample, file, report)
    cls = text("cls").strip() if "cls" in sample.spans else None
    metadata: Mapping[str, Scalar] = known or {}
    if known is None and "metadata" in sample.spans:
        try:
            metadata = read_metadata(text("metadata"))
        except (ValueError, RecursionError):
            report(sample.key, "metadata is not a JSON object")
    offset, length = sample.spans["image"]
    if length > MAX_IMAGE_BYTES:
        info = ImageInfo(length, 0, 0)
    else:
        info = _known_info(length, known or {}) or image_info(file, offset, length)
    where, size = (-1, None) if span is None else span
    caption = caption_of(metadata.get("caption")) if span is None else None
    return Row(sample.key, info, metadata, None, offset, None, caption, None, where, size, crc, cls)


def _caption(sample: TarSample, file: ByteFile, report: Report) -> tuple[Span | None, int]:
    """Where the caption is, and its CRC-32. Other encodings would train on wrong letters, so they are no caption."""
    if "caption" not in sample.spans:
        return None, 0
    offset, length = sample.spans["caption"]
    if length > MAX_TEXT_BYTES:
        report(sample.key, f"caption has too many bytes: {length:,}")
        return None, 0
    content = file.pread(length, offset)
    try:
        content.decode()
    except UnicodeDecodeError:
        report(sample.key, "caption is not UTF-8 text")
        return None, zlib.crc32(content)
    return (offset, length), zlib.crc32(content)


def _known_info(length: int, known: Mapping[str, Scalar]) -> ImageInfo | None:
    """By the table of img2dataset. In other metadata `width` may be that of the original, before it was resized."""
    width, height = known.get("width"), known.get("height")
    if not isinstance(width, float) or not isinstance(height, float):
        return None
    is_size = all(1 <= side < _TOO_WIDE for side in (width, height))
    return ImageInfo(length, int(width), int(height)) if is_size else None
