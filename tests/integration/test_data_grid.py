"""One stream, whatever the number of processes, workers, accumulation and restarts: real shards, buckets, a filter that
empties every ninth shard, and two percent of corrupt images."""

import hashlib
import itertools
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from sd_training.config.data_schema import BucketConfig, CaptionConfig
from sd_training.config.plan import BatchPlan
from sd_training.data.datamodule import TrainingData
from sd_training.types import PixelBatch
from tests import makers
from tests.unit.data.making import training_data

GLOBAL_BATCH, STEPS = 16, 66
SHARDS, PER_SHARD = 18, 22
SHAPES = [(40, 40), (64, 32), (32, 64), (48, 36)]
CORRUPT = range(6, SHARDS * PER_SHARD, 50)


class Seen(NamedTuple):
    """Everything that a visit gives."""

    sample: int
    tokens: tuple[int, ...]
    crop_top_left: tuple[int, ...]
    target_size: tuple[int, ...]
    digest: str
    """Of pixels, noise and timestep."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("grid")
    chance = np.random.default_rng(0)
    for shard in range(SHARDS):
        samples = []
        for number in range(shard * PER_SHARD, (shard + 1) * PER_SHARD):
            width, height = SHAPES[int(chance.choice(4, p=[0.4, 0.3, 0.2, 0.1]))]
            image = makers.encode(makers.picture(number, width, height))
            metadata = {"keep": int(shard % 9 > 0 and number % 5 > 0), "other": f"caption of {number}"}
            samples.append(
                {
                    "__key__": f"{number:05d}",
                    "jpg": image[:-200] if number in CORRUPT else image,
                    "txt": ", ".join("abcdefgh"[i] for i in chance.permutation(8)[:5]),
                    "json": json.dumps(metadata).encode(),
                }
            )
        makers.write_shard(root / f"{shard:03d}.tar", samples)
    return root


def make_data(folder: Path, world: int, accumulation: int, workers: int, **options: Any) -> TrainingData:
    micro_batch = GLOBAL_BATCH // world // accumulation
    plan = BatchPlan(micro_batch, accumulation, world, STEPS * GLOBAL_BATCH)
    settings: dict[str, Any] = {
        "filters": {"keep": 1},
        "resolution": 32,
        "buckets": BucketConfig(mode="ladder", step=8, min_side=16, max_side=64, max_aspect=2.0),
        "crop": "random",
        "flip_prob": 0.5,
        "captions": CaptionConfig(
            fields={"caption": 2.0, "other": 1.0}, tag_separator=", ", shuffle_tags_prob=0.5, drop_tag_prob=0.2
        ),
        "dropout_prob": 0.1,
        "lanes": 8,
        "window": 7,
        "max_bad_fraction": 1.0,
    }
    return training_data(folder, plan, workers=workers, **{**settings, **options})


def visits(batch: PixelBatch) -> dict[int, Seen]:
    """Position → what it gave."""
    found, tokens = {}, batch.tokens["text_encoder"]
    for i, position in enumerate(batch.positions.tolist()):
        digest = hashlib.sha256(batch.pixels[i].numpy().tobytes())
        for tensor in (batch.noise, batch.posterior_noise, batch.timestep_draw, batch.original_size):
            digest.update(tensor[i].numpy().tobytes())
        sizes = (tuple(tensor[i].tolist()) for tensor in (tokens, batch.crop_top_left, batch.target_size))
        found[position] = Seen(int(batch.sample_ids[i]), *sizes, digest.hexdigest())
    return found


def read(data: TrainingData, first_step: int = 0, steps: int = STEPS) -> dict[int, Seen]:
    """The visits of `steps` optimizer steps over all ranks; the loaders are then dropped, as by a crash."""
    found: dict[int, Seen] = {}
    for rank in range(data.plan.processes):
        batches = iter(data.loader(rank, lambda: first_step))
        for _ in range(min(steps, STEPS - first_step) * data.plan.accumulation):
            found |= visits(next(batches))
    return found


@pytest.fixture(scope="module")
def reference(folder: Path) -> dict[int, Seen]:
    return read(make_data(folder, world=1, accumulation=1, workers=0))


@pytest.mark.parametrize(("world", "workers"), [(1, 0), (1, 3), (2, 0), (2, 1), (4, 0), (4, 3)])
def test_the_stream_depends_on_nothing_but_the_data(
    folder: Path, reference: dict[int, Seen], world: int, workers: int
) -> None:
    for accumulation in (1, 2, 4):
        chance = np.random.default_rng(world * 100 + workers * 10 + accumulation)
        whole = accumulation == 2
        cuts = [0] if whole else sorted(chance.choice(STEPS, 2, replace=False).tolist())
        for cut in cuts:
            data = make_data(folder, world, accumulation, workers)
            found = read(data, cut, STEPS if whole else 3)
            assert len(found) >= GLOBAL_BATCH
            mismatches = [position for position, seen in found.items() if seen != reference[position]]
            assert mismatches == []


def test_every_survivor_comes_once_per_epoch(folder: Path, reference: dict[int, Seen]) -> None:
    data = make_data(folder, 1, 1, 0)
    (opened,) = data.datasets
    planned = {
        step * GLOBAL_BATCH + slot: sample
        for step in range(STEPS)
        for slot, sample in enumerate(data.order.at(step).samples.tolist())
    }
    counts = np.bincount(list(planned.values()), minlength=SHARDS * PER_SHARD)
    survivors = [n for n in range(SHARDS * PER_SHARD) if (n // PER_SHARD) % 9 and n % 5]
    assert opened.selected.tolist() == survivors
    epochs = STEPS * GLOBAL_BATCH / len(survivors)
    assert counts.sum() == counts[survivors].sum()
    assert set(counts[survivors]) <= {int(epochs) - 1, int(epochs), int(epochs) + 1}
    assert counts[survivors].mean() == pytest.approx(epochs)
    # What was planned was read, but for the corrupt ones, whose replacements are of the same bucket.
    replaced = {p for p, seen in reference.items() if seen.sample != planned[p]}
    assert replaced == {p for p, sample in planned.items() if sample in CORRUPT}
    assert len(replaced) > 5
    assert all(reference[p].sample not in CORRUPT for p in replaced)


def test_a_step_has_one_shape_and_shapes_are_mixed(folder: Path, reference: dict[int, Seen]) -> None:
    shapes = [{reference[p].target_size for p in range(s * GLOBAL_BATCH, (s + 1) * GLOBAL_BATCH)} for s in range(STEPS)]
    assert all(len(shape) == 1 for shape in shapes)
    assert len(set().union(*shapes)) >= 3
    assert sum(a != b for a, b in itertools.pairwise(shapes)) > 15


def test_one_shard_feeds_four_ranks_of_three_workers(folder: Path) -> None:
    data = make_data(folder / "001.tar", 4, 1, 3, buckets=BucketConfig())
    assert sorted(read(data, 0, 6)) == list(range(6 * GLOBAL_BATCH))
