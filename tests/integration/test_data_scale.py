"""The data engine at size: a million samples, a filter that keeps few, a resume far into a run, memory over epochs."""

import gc
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from sd_training.config.data_schema import CaptionConfig, DatasetParams, RemoteConfig
from sd_training.config.filters import parse_filters
from sd_training.config.plan import BatchPlan
from sd_training.data.index.selection import select
from sd_training.data.index.store import load_index
from sd_training.data.order.buckets import BucketTable, ladder, merge_small
from sd_training.data.order.order import SampleOrder
from sd_training.data.sources.base import Problems, Shard, Source
from tests import makers
from tests.integration.training import ROOT
from tests.unit.data.making import training_data

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
    """The order over what two filters keep, in buckets; and the seconds that it took from the index on disk."""
    start = time.perf_counter()
    rules, _ = parse_filters({"aesthetic": ">=2", "where": "language in [en, de] and aspect_ratio < 3"})
    index = load_index(MadeUp([], RemoteConfig()), index_dir, ["aesthetic", "language"])
    selected = select(index, rules, None, CaptionConfig()).selected
    table = BucketTable(tuple(ladder(1 << 20, 64, 512, 2048, 3.0)))
    bucket_of = table.assign(index.numbers("width")[selected], index.numbers("height")[selected])
    bucket_of, _ = merge_small(bucket_of, table, 256)
    order = SampleOrder(DatasetParams(path="."), 0, 256, index.numbers("block")[selected], bucket_of)
    order.at(0)
    return order, time.perf_counter() - start


def memory_mb(process: int, kind: str = "Pss") -> float:
    """Memory of a process, shared pages by their share."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(f"{kind}:")) / 1e3


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux")
def test_a_million_samples(tmp_path: Path) -> None:
    load_index(MadeUp([], RemoteConfig()), tmp_path, ["aesthetic", "language"])
    script = (
        "import os, gc; from pathlib import Path;"
        "from tests.integration.test_data_scale import open_million, memory_mb;"
        "before = memory_mb(os.getpid());"
        f"order, seconds = open_million(Path({str(tmp_path)!r})); gc.collect();"
        "print(seconds, memory_mb(os.getpid()) - before, len(order.bucket_of))"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    seconds, megabytes, selected = map(float, done.stdout.split())
    print(f"{seconds:.2f} s, {megabytes:.0f} MB, {selected:,.0f} selected")
    assert selected > 400_000
    assert seconds < 2
    assert megabytes < 200


def test_a_resume_at_position_a_million_starts_as_soon_as_a_fresh_run(tmp_path: Path) -> None:
    makers.caption_shards(tmp_path / "data", shards=4, per_shard=64)

    def first_batch_s(first_step: int) -> float:
        start = time.perf_counter()
        data = training_data(tmp_path / "data", BatchPlan(16, 1, 1, 2_000_000))
        next(iter(data.loader(0, lambda: first_step)))
        return time.perf_counter() - start

    first_batch_s(0)  # builds the index
    assert abs(first_batch_s(1_000_000 // 16) - first_batch_s(0)) < 1

    order, _ = open_million(tmp_path / "index")
    for step in (0, 1_000_000 // 256, 10**9):
        start = time.perf_counter()
        order.at(step)
        assert time.perf_counter() - start < 1


def test_a_filter_that_keeps_a_twentieth_costs_nothing_per_image(tmp_path: Path) -> None:
    samples = makers.caption_samples(1000, width=160, height=120)
    for number, sample in enumerate(samples):
        sample["json"] = b'{"keep": %d}' % (number % 20 == 0)
    for shard in range(10):
        makers.write_shard(tmp_path / f"{shard}.tar", samples[shard * 100 : (shard + 1) * 100])
    plan = BatchPlan(10, 1, 1, 10**6)
    loaders = [
        iter(training_data(tmp_path, plan, resolution=64, filters=filters).loader(0, lambda: 0))
        for filters in (None, {"keep": 1})
    ]
    ratios = []
    while len(ratios) < 10 and not any(ratio < 1.1 for ratio in ratios):  # other work on the machine only adds time
        seconds: list[list[float]] = [[], []]
        for pair in range(40):
            for which in (0, 1) if pair % 2 else (1, 0):  # neither always finds the caches as the other left them
                start = time.thread_time()  # all is in the page cache: there is nothing to wait for but other processes
                next(loaders[which])
                seconds[which].append(time.thread_time() - start)
        ratios.append(statistics.median(seconds[1][5:]) / statistics.median(seconds[0][5:]))
    print(f"time per delivered image, filtered to unfiltered: {min(ratios):.3f}")
    assert min(ratios) < 1.1


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux")
def test_memory_is_flat_over_ten_epochs(tmp_path: Path) -> None:
    """After two epochs, in which caches fill, the memory of this process and its four workers stays what it is."""
    makers.caption_shards(tmp_path / "data", shards=4, per_shard=100)
    data = training_data(tmp_path / "data", BatchPlan(20, 1, 1, 400 * 10), workers=4, crop="random", flip_prob=0.5)
    after: list[float] = []
    for step, _ in enumerate(data.loader(0, lambda: 0), start=1):
        if step in (40, 190):
            gc.collect()
            after.append(memory_mb(os.getpid()) + sum(memory_mb(child) for child in loader_processes()))
    print(f"PSS after two epochs {after[0]:.1f} MB, at the end {after[1]:.1f} MB")
    assert after[1] < after[0] * 1.02


def loader_processes() -> list[int]:
    """Loader processes of this run: they are children of the fork server, which is a child of this process."""
    parents = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        parents[int(status.parent.name)] = int(fields[1])
    return [pid for pid, parent in parents.items() if parents.get(parent) == os.getpid()]
