"""How fast data comes, without a model: this trainer's loader beside webdataset's own pipeline, in alternation.

    python scripts/bench_data.py                                       JPEGs of 640 × 427, made for it, at 256 pixels
    python scripts/bench_data.py --size 2048x1365 --resolution 512
    python scripts/bench_data.py config=a.yaml dataset.params.path=…    the data of a config
    python scripts/bench_data.py config=a.yaml dataset.cache.path=…     the same from a cache, alone

Both read in this process (`--workers 0`), so images/s are those of one core, and both read the captions; webdataset
runs `shuffle(1000)`, `decode("pil")`, resize of the short side, centre crop. Turns of both follow each other, and
ratios are of neighbours. Samples that cannot be read are left out by both.
"""

import argparse
import io
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import webdataset
from PIL import Image

from scripts.index_dataset import load_data_config
from sd_training.cli import check_counts, run_cli
from sd_training.config.data_schema import DatasetConfig, DatasetParams
from sd_training.config.load import load_config
from sd_training.config.plan import BatchPlan
from sd_training.config.value_types import output_path
from sd_training.data.datamodule import TrainingData
from sd_training.data.index.report import report_text
from sd_training.data.samples.cache import LatentCache
from sd_training.data.samples.captions import Encoded, Tokenizer
from sd_training.data.samples.sample import DrawSettings
from sd_training.errors import ConfigError
from sd_training.log import quiet_libraries
from sd_training.models.family import latent_grid
from sd_training.types import LatentGrid

GRID = LatentGrid(4, 8)
_LENGTH = ("experiment.num_examples_to_see=1000000000", "experiment.num_steps=null", "experiment.num_epochs=null")


def make_shards(folder: Path, width: int, height: int, count: int) -> Path:
    """Distinct crops of scikit-learn's two photographs (640 × 427), as JPEGs of quality 90."""
    from sklearn.datasets import load_sample_images

    chance = np.random.default_rng(0)
    photos = [Image.fromarray(photo) for photo in load_sample_images().images]
    with webdataset.ShardWriter(f"{folder}/%05d.tar", maxcount=100, verbose=0) as sink:
        for number in range(count):
            photo, zoom = photos[number % 2], float(chance.uniform(0.7, 1.0))
            w, h = photo.width * zoom, photo.height * zoom
            left, top = chance.uniform(0, photo.width - w), chance.uniform(0, photo.height - h)
            box = (left, top, left + w, top + h)
            image = photo.resize((width, height), Image.Resampling.BICUBIC, box=box)
            sink.write({"__key__": f"{number:06d}", "jpg": _jpeg(image), "txt": f"photograph {number}"})
    return folder


def _jpeg(image: Image.Image) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=90)
    return stream.getvalue()


class CaptionReader(Tokenizer):
    """Takes captions and makes nothing of them: they are read, as webdataset reads them, but not tokenized."""

    def __init__(self) -> None:
        self.length = 0

    def encode(self, caption: str) -> Encoded:
        """No tokens."""
        return Encoded(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.bool_))


def make_data(dataset: DatasetConfig, batch: int, workers: int) -> TrainingData:
    """The loader of a config, for images without end."""
    plan, readers, draws = BatchPlan(batch, 1, 1, 10**9), {"captions": CaptionReader()}, DrawSettings(0, GRID)
    return TrainingData(dataset=dataset, plan=plan, workers=workers, tokenizers=readers, draws=draws, run_dir=None)


def cached_data(arguments: argparse.Namespace) -> TrainingData:
    """The loader of a config with a cache, with the model's draws and captions."""
    from sd_training.build import data, dry_run
    from sd_training.build.plan import make_plan

    own = [*_LENGTH, f"system.batch_size={arguments.batch}", f"system.workers={arguments.workers}"]
    plan = make_plan(load_config([*arguments.overrides, *own]), is_described=True)
    networks, family = dry_run.meta_networks(plan.config)
    cache = LatentCache(output_path(str(plan.config.dataset.cache.path)))
    return data.make_data(plan, family, latent_grid(networks["vae"]), cache)


def own_batches(data: TrainingData) -> Iterator[Any]:
    """Endless batches of this trainer."""
    return iter(data.loader(0, lambda: 0))


def webdataset_batches(shards: Sequence[str], resolution: int, batch: int) -> Iterator[Any]:
    """Endless batches of webdataset's own pipeline."""

    def transform(sample: tuple[Image.Image, str]) -> tuple[torch.Tensor, str]:
        image, caption = sample[0].convert("RGB"), sample[1]
        scale = resolution / min(image.size)
        size = (round(image.width * scale), round(image.height * scale))
        image = image.resize(size, Image.Resampling.BICUBIC)
        left, top = (image.width - resolution) // 2, (image.height - resolution) // 2
        image = image.crop((left, top, left + resolution, top + resolution))
        return torch.from_numpy(np.array(image)).permute(2, 0, 1), caption

    skip = {"handler": webdataset.ignore_and_continue}
    pipeline = webdataset.WebDataset(list(shards), shardshuffle=False, empty_check=False, **skip).repeat()
    pipeline = pipeline.shuffle(1000).decode("pil", **skip)
    return iter(pipeline.to_tuple("jpg;png;jpeg;webp", "txt", **skip).map(transform, **skip).batched(batch))


def compete(contestants: dict[str, Iterator[Any]], turns: int, batches: int) -> dict[str, list[list[float]]]:
    """Seconds of each batch, by contestant and turn; the first batches, which start things, are not counted."""
    for batches_of in contestants.values():
        next(batches_of)
    seconds: dict[str, list[list[float]]] = {name: [] for name in contestants}
    for _ in range(turns):
        for name, batches_of in contestants.items():
            moments = [time.perf_counter()]
            for _ in range(batches):
                next(batches_of)
                moments.append(time.perf_counter())
            seconds[name].append([end - start for start, end in pairwise(moments)])
    return seconds


def report(seconds: dict[str, list[list[float]]], batch: int) -> list[str]:
    """Images/s, latencies and ratios."""
    lines = []
    rates = {name: [batch * len(turn) / sum(turn) for turn in turns] for name, turns in seconds.items()}
    for name, turns in seconds.items():
        latencies = sorted(value for turn in turns for value in turn)
        p50, p99 = (latencies[min(len(latencies) - 1, int(len(latencies) * q))] for q in (0.5, 0.99))
        speed = f"{statistics.median(rates[name]):8.1f} images/s"
        lines.append(f"{name:12s} {speed}  batch latency p50 {p50 * 1e3:7.1f} ms, p99 {p99 * 1e3:7.1f} ms")
    if "webdataset" in rates:
        ratios = [own / other for own, other in zip(rates["sd_training"], rates["webdataset"], strict=True)]
        lines.append(f"ratio to webdataset: median {statistics.median(ratios):.2f}, lowest {min(ratios):.2f}")
    return lines


def dataset_of(arguments: argparse.Namespace, folder: Path) -> DatasetConfig:
    """The data of the config, or shards made for it."""
    if arguments.overrides:
        return load_data_config([*arguments.overrides, *_LENGTH]).dataset
    width, height = map(int, arguments.size.split("x"))
    shards = make_shards(folder, width, height, arguments.samples)
    return DatasetConfig(params=DatasetParams(path=str(shards), resolution=arguments.resolution, index_dir=str(folder)))


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line.

    Raises:
        ConfigError: a value cannot be used.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("overrides", nargs="*", metavar="config=… a.b.c=value")
    parser.add_argument("--size", default="640x427", help="width x height of the made images [pixels]")
    parser.add_argument("--resolution", type=int, default=256, help="of the made data [pixels]")
    parser.add_argument("--samples", type=int, default=2000, help="made images")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--workers", type=int, default=0, help="loader processes of sd_training; webdataset has none")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--batches", type=int, default=5, help="batches of a turn")
    arguments = parser.parse_intermixed_args(argv)
    if not re.fullmatch("[1-9][0-9]{0,4}x[1-9][0-9]{0,4}", arguments.size):
        raise ConfigError(f"--size: is {arguments.size!r}; write width x height in pixels, such as 640x427")
    check_counts(arguments, "resolution", "samples", "batch", "turns", "batches")
    if arguments.workers < 0:
        raise ConfigError(f"--workers: is {arguments.workers}; give 0 or more")
    return arguments


def main() -> None:
    """Measure and print."""
    arguments = parse_arguments()
    torch.set_num_threads(1)
    quiet_libraries()
    with tempfile.TemporaryDirectory() as folder:
        dataset = dataset_of(arguments, Path(folder))
        is_cached = dataset.cache.path is not None
        data = cached_data(arguments) if is_cached else make_data(dataset, arguments.batch, arguments.workers)
        print(report_text(data.report()))
        contestants = {"sd_training": own_batches(data)}
        shards = [unit.location for unit in data.samples().datasets[0].index.shards]
        if dataset.type == "WebDataset" and not is_cached and all(os.path.isfile(shard) for shard in shards):
            contestants["webdataset"] = webdataset_batches(shards, data.dataset.params.resolution, arguments.batch)
        seconds = compete(contestants, arguments.turns, arguments.batches)
        print("\n".join(report(seconds, arguments.batch)))


if __name__ == "__main__":
    run_cli(main)
