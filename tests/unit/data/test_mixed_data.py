"""Several data sets in one run, drawing with replacement, and going on with other data."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sd_training.config.data_schema import DatasetConfig, DatasetParams, MixEntry, SourceParams
from sd_training.config.plan import BatchPlan
from sd_training.data.datamodule import TrainingData
from sd_training.data.index.report import report_text
from sd_training.errors import CheckpointError, DataError
from tests import makers
from tests.unit.data.making import equal_bits, joined, stream, training_data


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    makers.caption_shards(tmp_path / "first", shards=2, per_shard=10)
    makers.write_shard(tmp_path / "second" / "a.tar", makers.caption_samples(12, first=100))
    return [tmp_path / "first", tmp_path / "second"]


def mixed(folders: list[Path], plan: BatchPlan, workers: int = 0, **entry: Any) -> TrainingData:
    dataset = DatasetConfig(
        params=DatasetParams(path=str(folders[0]), resolution=16),
        weight=3.0,
        mix=[MixEntry(params=SourceParams(path=str(folders[1]), filters={"uid": "not in [u100]"}), **entry)],
    )
    return training_data(folders[0], plan, dataset=dataset, workers=workers)


def test_shares_ids_and_captions(folders: list[Path]) -> None:
    data = mixed(folders, BatchPlan(4, 1, 1, 4 * 400))
    batches = stream(data)
    second = [bool((batch.sample_ids >= 20).all()) for batch in batches]
    assert all(bool((batch.sample_ids >= 20).all()) or bool((batch.sample_ids < 20).all()) for batch in batches)
    assert sum(second) == pytest.approx(100, abs=3)
    ids = np.concatenate([batch.sample_ids.numpy() for batch in batches])
    assert set(ids.tolist()) == set(range(20)) | set(range(21, 32))
    counts = np.bincount(ids, minlength=32)
    assert np.ptp(counts[:20]) <= 1 and np.ptp(counts[21:]) <= 1
    assert [report.num_steps for report in data.report()] == [400 - sum(second), sum(second)]
    assert "data set 2 of 2" in report_text(data.report())


def test_start_and_end_and_resume(folders: list[Path]) -> None:
    plan = BatchPlan(4, 1, 1, 4 * 60)
    whole = stream(mixed(folders, plan, start_step=20, end_step=40))
    second = [bool((batch.sample_ids >= 20).any()) for batch in whole]
    assert not any(second[:20]) and any(second[20:40]) and not any(second[40:])
    resumed = stream(mixed(folders, plan, workers=1, start_step=20, end_step=40), first_step=33)
    assert equal_bits(joined(resumed), joined(whole[33:]))


def test_two_data_sets_of_equal_length_are_shuffled_apart(tmp_path: Path) -> None:
    makers.caption_shards(tmp_path / "a", shards=1, per_shard=30)
    makers.caption_shards(tmp_path / "b", shards=1, per_shard=30)
    batches = stream(mixed([tmp_path / "a", tmp_path / "b"], BatchPlan(30, 1, 1, 30 * 40), weight=3.0))
    first = next(b.sample_ids.tolist() for b in batches if b.sample_ids[0] < 30)
    second = next((b.sample_ids - 30).tolist() for b in batches if b.sample_ids[0] >= 30)
    assert first != second


def test_with_replacement(folders: list[Path]) -> None:
    ids = joined(stream(training_data(folders[0], BatchPlan(4, 1, 1, 400), resampled=True))).sample_ids
    counts = np.bincount(ids.numpy(), minlength=20)
    assert counts.sum() == 400
    assert np.ptp(counts) > 5


def test_fewer_samples_than_a_step_takes_is_an_error_before_the_first_one(folders: list[Path]) -> None:
    plan = BatchPlan(6, 2, 2, 4800)
    with pytest.raises(DataError, match=r"20 samples of .*fewer than one optimizer step of 24 takes.*resampled=true"):
        training_data(folders[0], plan).report()


def test_with_replacement_a_step_may_take_more_samples_than_there_are(tmp_path: Path) -> None:
    makers.caption_shards(tmp_path / "few", shards=1, per_shard=3)
    data = training_data(tmp_path / "few", BatchPlan(4, 1, 1, 40), resampled=True)
    assert "3 samples 13.33 times each, in 10 steps" in report_text(data.report())
    batches = stream(data)
    assert [len(batch.sample_ids) for batch in batches] == [4] * 10
    assert set(joined(batches).sample_ids.tolist()) == {0, 1, 2}


def test_other_data_is_refused_unless_told_to(folders: list[Path]) -> None:
    state = training_data(folders[0]).state_dict()
    for change in ({"filters": {"original_width": ">=45"}}, {"lanes": 2}, {"window": 1}, {"resampled": True}):
        with pytest.raises(CheckpointError, match=r"dataset\.params\.allow_change=true"):
            training_data(folders[0], **change).load_state_dict(state)
        training_data(folders[0], allow_change=True, **change).load_state_dict(state)
    with pytest.raises(CheckpointError, match="other data"):
        training_data(folders[1]).load_state_dict(state)
    training_data(folders[0]).load_state_dict(state)
