"""An index of a million rows. The processes that make it, and the one that is measured, import this and no torch."""

import time
from pathlib import Path

import numpy as np
import pyarrow as pa

from sd_training.config.data_schema import CaptionConfig, DatasetParams, RemoteConfig
from sd_training.config.filters import parse_filters
from sd_training.data.index.selection import select
from sd_training.data.index.store import load_index
from sd_training.data.order.buckets import BucketTable, ladder, merge_small
from sd_training.data.order.order import SampleOrder
from sd_training.data.sources.base import Problems, Shard, Source

UNITS, PER_UNIT = 100, 10_000


class MadeUp(Source):
    """A source of a million rows without files behind them."""

    identity = "made up"

    def shards(self) -> list[Shard]:
        return [Shard(f"{number:05d}.tar", 1, "1") for number in range(UNITS)]

    def scan(self, unit: Shard) -> tuple[dict[str, pa.Array], Problems]:
        chance = np.random.default_rng(int(unit.location[:5]))
        sizes = chance.integers(256, 2049, (2, PER_UNIT))
        words = np.array(["en", "de", "fr"])[chance.integers(0, 3, PER_UNIT)]
        columns = {
            "key": pa.array([f"{unit.location[:5]}{number:04d}" for number in range(PER_UNIT)]),
            "width": pa.array(sizes[0], pa.int32()),
            "height": pa.array(sizes[1], pa.int32()),
            "caption_length": pa.array(chance.integers(5, 200, PER_UNIT)),
            "at:image_offset": pa.array(np.arange(PER_UNIT) * 100_000),
            "at:image_length": pa.array(chance.integers(20_000, 90_000, PER_UNIT)),
            "at:caption_offset": pa.array(np.arange(PER_UNIT) * 100_000 + 99_000),
            "number:aesthetic": pa.array(chance.random(PER_UNIT) * 10),
            "number:language": pa.nulls(PER_UNIT, pa.float64()),
            "text:language": pa.array(words),
        }
        return columns, Problems()


def open_million(index_dir: Path) -> tuple[SampleOrder, float]:
    """The order over what two filters keep, in buckets; and the CPU time [s] that it took from the index on disk."""
    start = time.process_time()
    rules, _ = parse_filters({"aesthetic": ">=2", "where": "language in [en, de] and aspect_ratio < 3"})
    index = load_index(MadeUp([], RemoteConfig()), index_dir, ["aesthetic", "language"])
    selected = select(index, rules, None, CaptionConfig(), 10**9).selected
    table = BucketTable(tuple(ladder(1 << 20, 64, 512, 2048, 3.0)))
    bucket_of = table.assign(index.numbers("width")[selected], index.numbers("height")[selected])
    bucket_of, _ = merge_small(bucket_of, table, 256)
    order = SampleOrder(DatasetParams(path="."), 0, 256, index.numbers("block")[selected], bucket_of)
    order.at(0)
    return order, time.process_time() - start


def memory_mb(process: int, kind: str = "Pss") -> float:
    """Memory of a process, shared pages by their share."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(f"{kind}:")) / 1e3
