"""`dataset.type=Synthetic`, and `dataset.reuse_batch`, which benchmarks use together."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sd_training.config.data_schema import SyntheticConfig
from sd_training.config.plan import BatchPlan
from sd_training.data.datamodule import TrainingData
from sd_training.data.samples.image import CropRequest, read_image
from sd_training.data.sources.base import IndexedReader
from sd_training.errors import CheckpointError
from tests import makers
from tests.unit.data.making import equal_bits, joined, stream, training_data

SIZES = [[48, 64], [64, 48], [40, 40]]
PLAN = BatchPlan(micro_batch=2, accumulation=2, processes=1, num_examples=24)
AUGMENTED: dict[str, Any] = {"crop": "random", "flip_prob": 0.5}


def synthetic(folder: Path, seed: int = 0, num_samples: int = 30, **options: Any) -> TrainingData:
    made = SyntheticConfig(num_samples=num_samples, sizes=SIZES, seed=seed)
    return training_data("", PLAN, kind="Synthetic", synthetic=made, index_dir=str(folder), **options)


def reader_of(data: TrainingData) -> IndexedReader:
    return data.datasets[0].reader


@pytest.mark.parametrize("sample", [0, 1, 2])
@pytest.mark.parametrize("flip", [False, True])
def test_a_crop_is_that_of_the_whole_picture(tmp_path: Path, sample: int, flip: bool) -> None:
    reader = reader_of(synthetic(tmp_path))
    height, width = SIZES[sample]
    for side, tolerance in ((min(height, width), 0.0), (32, 4.0)):  # not resized; resized, cut at whole pixels
        wanted = CropRequest(side, side, 0.3, 0.9, flip)
        whole = reader.picture(sample, CropRequest(height, width), 10**6).pixels.transpose(1, 2, 0)
        file = makers.encode(Image.fromarray(np.ascontiguousarray(whole)), "PNG")
        own, read = reader.picture(sample, wanted, 10**6), read_image(file, wanted, 10**6)
        assert own.original_size == read.original_size == (height, width)
        assert own.crop_top_left == read.crop_top_left
        assert own.pixels.shape == read.pixels.shape and own.pixels.dtype == np.uint8
        assert np.abs(own.pixels.astype(int) - read.pixels).mean() <= tolerance
        assert own.pixels.std() > 5


def test_pictures_depend_on_seed_and_sample_alone(tmp_path: Path) -> None:
    wanted, readers = CropRequest(32, 32), [reader_of(synthetic(tmp_path, seed)) for seed in (0, 0, 1)]
    more = reader_of(synthetic(tmp_path, num_samples=40))
    first, again, other = ([r.picture(s, wanted, 10**6).pixels for s in range(6)] for r in readers)
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(np.array_equal(a, b) for a, b in zip(first, other, strict=True))
    assert len({pixels.tobytes() for pixels in first}) == 6
    assert np.array_equal(more.picture(3, wanted, 10**6).pixels, first[3])
    assert readers[0].index.fingerprint != readers[2].index.fingerprint
    assert reader_of(synthetic(tmp_path)).caption(7) == "sample 7, a field of colour 48 wide and 64 high"


def test_loader_processes_buckets_and_resume_give_the_same_bits(tmp_path: Path) -> None:
    buckets = {"mode": "table", "sizes": [[16, 24], [24, 16], [16, 16]]}
    whole = stream(synthetic(tmp_path, buckets=buckets, **AUGMENTED))
    rest = stream(synthetic(tmp_path, buckets=buckets, workers=1, **AUGMENTED), first_step=2)
    assert len({tuple(batch.pixels.shape) for batch in whole}) == 3
    for own, other in zip(whole[4:], rest, strict=True):
        assert equal_bits(own, other)


def test_a_mask_is_full(tmp_path: Path) -> None:
    assert joined(stream(synthetic(tmp_path, has_mask=True))).mask.eq(255).all()


def test_a_reused_batch_is_the_first_of_the_run(tmp_path: Path) -> None:
    data = synthetic(tmp_path)
    first, *_ = stream(data)
    data.dataset = data.dataset.replace(reuse_batch=True)
    for workers, first_step in ((0, 0), (0, 4), (1, 0)):
        data.workers = workers
        batches = stream(data, first_step=first_step)
        assert len(batches) == 12 - 2 * first_step
        assert all(batch is batches[0] for batch in batches)
        assert equal_bits(batches[0], first) and first.positions.tolist() == [0, 1]


def test_a_run_does_not_resume_with_a_reused_batch_or_back(tmp_path: Path) -> None:
    plain, reused = synthetic(tmp_path), synthetic(tmp_path)
    reused.dataset = reused.dataset.replace(reuse_batch=True)
    reused.load_state_dict(reused.state_dict())
    for before, now in ((plain, reused), (reused, plain)):
        with pytest.raises(CheckpointError, match=r"dataset\.reuse_batch was (true|false), now"):
            now.load_state_dict(before.state_dict())
