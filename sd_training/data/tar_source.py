"""Reads the members of indexed tar shards by offset: one `pread` each, no tar parsing while training."""

import os
from collections import OrderedDict
from pathlib import Path
from typing import Any, Protocol

from sd_training.data.index import DatasetIndex
from sd_training.data.problems import BadSample
from sd_training.errors import DataError

MAX_OPEN_SHARDS = 64
"""File handles kept per process."""
MAX_MEMBER_BYTES = 1 << 28
"""Larger members are skipped without reading them."""


class SampleSource(Protocol):
    """What the data set needs of a source: samples by number, with an image and a caption or class."""

    def __len__(self) -> int: ...

    def image(self, sample: int) -> bytes:
        """The image file. Raises BadSample (skip it) or DataError (stop)."""

    def caption(self, sample: int) -> str:
        """The caption text. Raises as `image` does."""

    def class_id(self, sample: int) -> str:
        """The class as text; empty if there is none."""

    def name(self, sample: int) -> tuple[str, str]:
        """Shard and key, for messages."""


class TarSource:
    """The `SampleSource` of tar shards. May be copied into loader processes."""

    def __init__(self, index: DatasetIndex) -> None:
        self.index = index
        self._open: OrderedDict[int, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self.index)

    def image(self, sample: int) -> bytes:
        index = self.index
        return self._read(int(index.shard_of[sample]), int(index.image_offset[sample]), int(index.image_length[sample]))

    def caption(self, sample: int) -> str:
        index = self.index
        offset, length = int(index.caption_offset[sample]), int(index.caption_length[sample])
        return self._read(int(index.shard_of[sample]), offset, length).decode("utf-8-sig", "replace").strip()

    def class_id(self, sample: int) -> str:
        return self.index.cls[sample].as_py() or ""

    def name(self, sample: int) -> tuple[str, str]:
        return self.index.name(sample)

    def _read(self, shard: int, offset: int, length: int) -> bytes:
        if length > MAX_MEMBER_BYTES:
            raise BadSample(f"member has too many bytes: {length}")
        path = self.index.shards[shard]
        try:
            data = _pread(self._descriptor(shard, path), length, offset)
        except OSError as error:
            raise DataError(f"cannot read the shard '{path}': {error}") from error
        if len(data) < length:
            raise DataError(f"the shard '{path}' has become shorter since it was indexed; start again to index it anew")
        return data

    def _descriptor(self, shard: int, path: Path) -> int:
        if shard in self._open:
            self._open.move_to_end(shard)
            return self._open[shard]
        if len(self._open) >= MAX_OPEN_SHARDS:
            os.close(self._open.popitem(last=False)[1])
        self._open[shard] = os.open(path, os.O_RDONLY)
        return self._open[shard]

    def __getstate__(self) -> dict[str, Any]:
        return {"index": self.index, "_open": OrderedDict()}

    def __del__(self) -> None:
        for descriptor in getattr(self, "_open", {}).values():
            os.close(descriptor)


def _pread(descriptor: int, length: int, offset: int) -> bytes:
    """`length` bytes, fewer only at the end of the file; some file systems answer in pieces."""
    data = os.pread(descriptor, length, offset)
    while 0 < len(data) < length:
        piece = os.pread(descriptor, length - len(data), offset + len(data))
        if not piece:
            break
        data += piece
    return data
