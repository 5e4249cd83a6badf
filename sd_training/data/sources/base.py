"""What every kind of data set is to the rest of the data engine: units to index, and a reader of single samples.

A source names its units (files or folders), scans one into columns, and reads the samples of the finished index. The
order, filters, buckets and captions never know which kind of source they work on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import pyarrow as pa

from sd_training.data.problems import Problems

if TYPE_CHECKING:
    from sd_training.data.index.store import DatasetIndex


class Shard(NamedTuple):
    """A file or folder that is indexed as a whole, and again when its size or version changes."""

    location: str
    """Absolute path or URL."""
    size: int
    """[bytes]."""
    version: str
    """Differs when the content does: modification time, ETag, or a hash of a listing."""


@dataclass
class ShardScan:
    """The samples of one unit as columns of equal length, in a fixed order.

    `key` (text) is required. `width` and `height` are those of the upright image [pixels], 0 when unknown;
    `caption_length` is -1 without a caption [bytes]; `cls` is the class as text or null; `block` numbers the parts of
    the unit that are read together (row groups), ascending. `caption` (text) is for sources that keep captions in
    the index. Columns `at:…` say where the reader finds a sample; columns `check:…`, such as checksums, only
    count for the fingerprint and are not kept. Metadata columns are made by `index_columns`.
    """

    columns: dict[str, pa.Array]
    problems: Problems


class SampleReader(Protocol):
    """Reads single samples. Copied into loader processes, so it holds no open files when it is pickled."""

    def image(self, sample: int) -> bytes:
        """The image file. Raises BadSample (skip it) or DataError (stop)."""

    def caption(self, sample: int) -> str:
        """The caption. Raises as `image` does; BadSample when there is none."""


class Source(Protocol):
    """One kind of data set at one place. Small and picklable: it travels into index processes."""

    @property
    def identity(self) -> str:
        """Everything besides the unit that decides what `scan` returns; a change of it indexes anew."""

    def shards(self) -> Sequence[Shard]:
        """All units in a fixed order. Raises DataError when there are none, or one cannot be found."""

    def scan(self, unit: Shard) -> ShardScan:
        """Indexes one unit. Damage is named in the problems; OSError and DataError are passed on."""

    def reader(self, index: "DatasetIndex") -> SampleReader:
        """The reader of the samples of `index`, which was made from this source."""
