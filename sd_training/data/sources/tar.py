"""WebDataset shards: indexed tar files whose members are read by offset, without tar parsing while training."""

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from sd_training.data.index.columns import MAX_FIELDS, Scalar, metadata_columns, read_scalars
from sd_training.data.index.store import DatasetIndex
from sd_training.data.problems import BadSample, Problems, SkippedSample
from sd_training.data.sources.arrow_cells import is_metadata, plain, plain_type
from sd_training.data.sources.base import Shard, ShardScan
from sd_training.data.sources.files import caption_of, length_of, utf8
from sd_training.data.sources.tar_index import MAX_MEMBER_BYTES, TarSample, known_of, scan_tar
from sd_training.data.storage.files import (
    Access,
    ByteFile,
    FileState,
    ReadAhead,
    file_state,
    find_state,
    open_bytes,
    seekable,
)
from sd_training.data.storage.locations import shown
from sd_training.errors import DataError

MAX_OPEN_SHARDS = 64
"""Files kept open per process."""
_STATES_AT_ONCE = 16
_SIDECAR = "\n"
"""Between the versions of a shard and of the table beside it."""


class TarSource:
    """The source of tar shards; one unit per shard.

    Where img2dataset left `00000.parquet` beside `00000.tar`, its columns are the metadata and no JSON is read. The
    caption of a sample without a `txt` member is its metadata field `caption`.

    Args:
        shards: paths or URLs.
        access: how remote ones are read.
    """

    def __init__(self, shards: Sequence[str], access: Access) -> None:
        self.paths, self.access = list(shards), access

    @property
    def identity(self) -> str:
        return "tar"

    def shards(self) -> list[Shard]:
        with ThreadPoolExecutor(_STATES_AT_ONCE) as pool:
            return list(pool.map(self._unit, self.paths))

    def _unit(self, shard: str) -> Shard:
        state, sidecar = file_state(shard, self.access), self._sidecar(shard)
        return Shard(
            shard, state.size, state.version if sidecar is None else state.version + _SIDECAR + sidecar.version
        )

    def _sidecar(self, shard: str) -> FileState | None:
        """The table beside a shard, if it is there."""
        if shard.startswith("pipe:"):
            return None
        stem, dot, _ = shard.rpartition(".")
        return find_state(f"{stem}.parquet", self.access) if dot else None

    def scan(self, unit: Shard) -> ShardScan:
        """As `Source.scan`."""
        file = open_bytes(unit.location, self.access)
        try:
            near = ReadAhead(file) if "://" in unit.location else file
            known = self._known(unit.location)
            scan = scan_tar(shown(unit.location), near, known)
        finally:
            file.close()
        if known and scan.samples and all(known_of(known, sample.key) is None for sample in scan.samples):
            reason = "metadata table names no sample of its shard"
            scan.problems.add(SkippedSample(shown(unit.location), "", reason))
        return ShardScan(_columns(shown(unit.location), scan.samples, scan.problems), scan.problems)

    def _known(self, shard: str) -> dict[str | int, dict[str, Scalar]]:
        sidecar = self._sidecar(shard)
        if sidecar is None:
            return {}
        file = open_bytes(sidecar.location, self.access)
        try:
            return _read_sidecar(file)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise DataError(f"the metadata table '{shown(sidecar.location)}' cannot be read: {error}") from error
        finally:
            file.close()

    def reader(self, index: DatasetIndex) -> "TarReader":
        return TarReader(index, self.access)


def _read_sidecar(file: ByteFile) -> dict[str | int, dict[str, Scalar]]:
    """Key, or the number that it is, → metadata; a table without a `key` column is none of img2dataset's."""
    table = pq.read_table(seekable(file))
    if "key" not in table.column_names:
        return {}
    names = [field.name for field in table.schema if field.name != "key" and is_metadata(plain_type(field.type))]
    columns = {name: plain(table[name].combine_chunks()).to_pylist() for name in names}
    is_number = pa.types.is_integer(table.schema.field("key").type)
    return {
        key if is_number and key is not None else str(key): read_scalars({name: columns[name][i] for name in names})
        for i, key in enumerate(table["key"].to_pylist())
    }


def _columns(location: str, samples: list[TarSample], problems: Problems) -> dict[str, pa.Array]:
    columns = {"key": pa.array([sample.key for sample in samples], pa.large_string())}
    images = [sample.spans["image"] for sample in samples]
    captions = [sample.spans.get("caption", (-1, -1)) for sample in samples]
    texts = [None if "caption" in sample.spans else caption_of(sample.metadata.get("caption")) for sample in samples]
    lengths = [length if text is None else length_of(text) for (_, length), text in zip(captions, texts, strict=True)]
    columns["at:image_offset"] = pa.array([offset for offset, _ in images], pa.int64())
    columns["at:image_length"] = pa.array([length for _, length in images], pa.int64())
    columns["at:caption_offset"] = pa.array([offset for offset, _ in captions], pa.int64())
    columns["caption_length"] = pa.array(lengths, pa.int64())
    if any(text is not None for text in texts):
        columns["caption"] = pa.array(texts, pa.large_string())
    columns["check:caption"] = pa.array([sample.caption_crc for sample in samples], pa.int64())
    columns["width"] = pa.array([sample.size[0] for sample in samples], pa.int32())
    columns["height"] = pa.array([sample.size[1] for sample in samples], pa.int32())
    columns["cls"] = pa.array([sample.cls for sample in samples], pa.large_string())
    metadata, num_left_out = metadata_columns([sample.metadata for sample in samples])
    if num_left_out:
        problems.add(SkippedSample(location, "", f"more than {MAX_FIELDS} metadata fields"))
    return columns | metadata


class TarReader:
    """The `SampleReader` of tar shards."""

    def __init__(self, index: DatasetIndex, access: Access) -> None:
        self.index, self.access = index, access
        self._open: OrderedDict[int, ByteFile] = OrderedDict()

    def image(self, sample: int) -> bytes:
        numbers = self.index.numbers
        return self._read(sample, numbers("at:image_offset")[sample], numbers("at:image_length")[sample])

    def caption(self, sample: int) -> str:
        """As `SampleReader.caption`: the text member, else the metadata field `caption`."""
        numbers = self.index.numbers
        offset = numbers("at:caption_offset")[sample]
        if offset >= 0:
            return utf8(self._read(sample, offset, numbers("caption_length")[sample])).strip()
        text = self.index.text("caption", sample)
        if text is None:
            raise BadSample("caption missing")
        return text

    def _read(self, sample: int, offset: int, length: int) -> bytes:
        if length > MAX_MEMBER_BYTES:
            raise BadSample(f"member has too many bytes: {length}")
        return self._file(int(self.index.numbers("unit")[sample])).pread(int(length), int(offset))

    def _file(self, shard: int) -> ByteFile:
        if shard in self._open:
            self._open.move_to_end(shard)
            return self._open[shard]
        if len(self._open) >= MAX_OPEN_SHARDS:
            self._open.popitem(last=False)[1].close()
        unit = self.index.shards[shard]
        state = FileState(unit.location, unit.size, unit.version.partition(_SIDECAR)[0])
        self._open[shard] = open_bytes(state, self.access)
        return self._open[shard]

    def __getstate__(self) -> dict[str, Any]:
        return {"index": self.index, "access": self.access, "_open": OrderedDict()}

    def __del__(self) -> None:
        for file in getattr(self, "_open", {}).values():
            file.close()
