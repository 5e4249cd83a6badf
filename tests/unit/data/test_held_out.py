"""Which samples a run is measured on, and what they are delivered with."""

import io
import json
import logging
import tarfile
from pathlib import Path

import pytest
import torch

from sd_training.config.data_schema import BucketConfig, DatasetConfig, DatasetParams
from sd_training.config.plan import BatchPlan
from sd_training.config.schema import ValidationConfig
from sd_training.data.datamodule import HeldOutData, TrainingData
from sd_training.data.samples.sample import NO_DROPOUT, DrawSettings
from sd_training.errors import ConfigError, DataError
from sd_training.types import LatentGrid, PixelBatch
from tests.makers import caption_samples, caption_shards, write_shard

GRID = LatentGrid(channels=4, downscale=2)


def held_out(
    shards: Path | str, seed: int = 0, batch_size: int = 5, run_dir: Path | None = None, **options: int
) -> HeldOutData:
    params = DatasetParams(path="trained.tar", resolution=16, crop="random", flip_prob=1.0, max_bad_fraction=1.0)
    draws = DrawSettings(
        seed, GRID, NO_DROPOUT.replace(size_dropout_prob=1.0), has_input_noise=True, is_stratified=True
    )
    config = ValidationConfig(path=str(shards), **options)
    plan = BatchPlan(batch_size, accumulation=1, processes=1, num_examples=batch_size)
    run = TrainingData(
        dataset=DatasetConfig(params=params),
        plan=plan,
        workers=0,
        tokenizers={},
        draws=draws,
        run_dir=run_dir,
        validation=config,
    )
    assert run.held_out is not None
    return run.held_out


def all_batches(data: HeldOutData) -> list[PixelBatch]:
    return list(data.batches(range(len(data))))


def test_samples_are_spread_evenly_and_the_same_for_every_seed(shards_dir: Path) -> None:
    data = held_out(shards_dir, num_samples=12)
    batches = all_batches(data)
    assert [len(batch.pixels) for batch in batches] == [5, 5, 2]
    assert torch.cat([batch.sample_ids for batch in batches]).tolist() == [i * 32 // 12 for i in range(12)]
    for batch, other in zip(batches, all_batches(held_out(shards_dir, seed=9, num_samples=12)), strict=True):
        assert torch.equal(batch.pixels, other.pixels) and torch.equal(batch.noise, other.noise)
    assert "12 of 32 held-out samples" in data.sentence()
    assert len(all_batches(held_out(shards_dir, num_samples=100))) == 7


def test_a_sample_is_the_same_in_batches_of_any_size(shards_dir: Path) -> None:
    both = [all_batches(held_out(shards_dir, batch_size=size)) for size in (3, 32)]
    for name in ("pixels", "noise", "posterior_noise"):
        first, second = (torch.cat([getattr(batch, name) for batch in batches]) for batches in both)
        assert torch.equal(first, second)


def test_a_batch_can_be_asked_for_by_number(shards_dir: Path) -> None:
    data = held_out(shards_dir)
    assert list(data.batches([])) == []
    (last,) = data.batches([6])
    assert torch.equal(last.pixels, all_batches(data)[6].pixels)
    first, again = data.batches([0, 0])
    assert torch.equal(first.pixels, again.pixels)


def test_what_is_there_to_regularise_is_left_out(shards_dir: Path) -> None:
    batch = all_batches(held_out(shards_dir))[0]
    assert batch.input_noise.numel() == 0 and not any(dropped.any() for dropped in batch.dropped.values())
    unmirrored = held_out(shards_dir)
    unmirrored.params.flip_prob = 0.0
    assert torch.equal(batch.pixels, all_batches(unmirrored)[0].pixels)


def test_a_batch_has_one_size(tmp_path: Path) -> None:
    wide, square = caption_samples(7), caption_samples(9, first=7, width=32, height=32)
    write_shard(tmp_path / "000.tar", [*wide, *square])
    data = held_out(tmp_path)
    data.params.buckets = BucketConfig(mode="table", sizes=[[16, 16], [16, 20]])
    sizes = [tuple(batch.pixels.shape) for batch in all_batches(data)]
    assert sizes == [(5, 3, 16, 16), (4, 3, 16, 16), (5, 3, 16, 20), (2, 3, 16, 20)]


def test_errors_name_the_option(tmp_path: Path) -> None:
    with pytest.raises((ConfigError, DataError), match=r"^validation\.path: .*nothing"):
        held_out(tmp_path / "nothing.tar").sentence()


def test_samples_that_cannot_be_read_are_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shards = caption_shards(tmp_path)
    with tarfile.open(sorted(shards.glob("*.tar"))[0]) as tar:
        members = [(member.name, (tar.extractfile(member) or io.BytesIO()).read()) for member in tar]
    for shard in sorted(shards.glob("*.tar"))[1:]:
        shard.unlink()
    with tarfile.open(sorted(shards.glob("*.tar"))[0], "w") as tar:
        for number, (name, content) in enumerate(members):
            kept = content[:200] if name.endswith("jpg") and number < 9 else content
            entry = tarfile.TarInfo(name)
            entry.size = len(kept)
            tar.addfile(entry, io.BytesIO(kept))
    data = held_out(shards, run_dir=tmp_path / "run")
    with caplog.at_level(logging.WARNING):
        first, second = all_batches(data), all_batches(data)
    told = [record.message for record in caplog.records if "another sample replaces it" in record.message]
    named = [json.loads(line) for line in (tmp_path / "run" / "bad_samples.jsonl").read_text().splitlines()]
    assert len(told) == len(named) == 3 and {entry["key"] for entry in named} == {"000000", "000001", "000002"}
    assert all(torch.equal(a.pixels, b.pixels) for a, b in zip(first, second, strict=True))


def test_shards_that_are_trained_on_are_told(shards_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = held_out(shards_dir)
    data.report([])
    assert not caplog.records or "trained on" not in caplog.text
    data.report(data.samples.datasets)
    assert "trained on as well: 2 shards" in caplog.text
