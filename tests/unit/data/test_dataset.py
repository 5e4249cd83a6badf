"""What takes part of a data set that is opened, and what is said about the rest."""

import json
from pathlib import Path

import pytest

from sd_training.config.data_schema import BucketConfig, CaptionConfig, DatasetParams, TagConfig
from sd_training.config.plan import BatchPlan
from sd_training.data.dataset import OpenDataset, open_dataset
from sd_training.data.index.report import report_text
from sd_training.data.order.buckets import training_sizes
from sd_training.errors import ConfigError, DataError
from tests import makers
from tests.unit.data.making import stream, training_data


def opened(params: DatasetParams, captions_needed: bool = True) -> OpenDataset:
    table = training_sizes(params)
    return open_dataset("WebDataset", params, params, table, 4, captions_needed=captions_needed)


def test_nothing_is_enlarged_to_fill_a_bucket(tmp_path: Path) -> None:
    samples = [
        *makers.caption_samples(19, width=64, height=64),
        *makers.caption_samples(1, first=19, width=40, height=40),
    ]
    makers.write_shard(tmp_path / "a.tar", samples)
    buckets = BucketConfig(mode="ladder", step=8, upscale=False)
    data = training_data(tmp_path, resolution=64, buckets=buckets)
    text = report_text(data.report())
    assert "19 samples" in text and "40×40 has 1 sample," in text and "left out" in text
    assert "without a bucket" in text and ": 1 sample\n" in text
    assert min(int(batch.original_size.min()) for batch in stream(data)) == 64
    reasons = [data.datasets[0].exclusion(sample, data.table) for sample in range(20)]
    assert reasons == [""] * 19 + ["too few samples in the bucket for 40 × 40 pixels"]


def test_too_few_samples_say_what_became_of_the_others(tmp_path: Path) -> None:
    samples = makers.caption_samples(40)
    for sample in samples[::2]:
        del sample["txt"]
    makers.write_shard(tmp_path / "a.tar", samples)
    with pytest.raises(DataError) as error:
        training_data(tmp_path, BatchPlan(32, 1, 1, 320), filters={"original_width": ">=42"}).report()
    message = str(error.value)
    assert "19 samples of" in message and "fewer than one optimizer step of 32" in message
    assert "filter original_width >= 42: 19 samples" in message
    assert "caption missing 20" in message


@pytest.mark.parametrize(
    ("captions", "said"),
    [
        (CaptionConfig(fields={"a": 0}), "fields: every weight is 0"),
    ],
)
def test_captions_that_cannot_be_made_are_told_before_anything_is_indexed(
    tmp_path: Path, captions: CaptionConfig, said: str
) -> None:
    makers.write_shard(tmp_path / "a.tar", makers.caption_samples(8))
    index_dir = tmp_path / "index"
    with pytest.raises(ConfigError) as error:
        opened(DatasetParams(path=str(tmp_path / "a.tar"), captions=captions, index_dir=str(index_dir)))
    assert error.value.problems[0].startswith(f"dataset.params.captions.{said}") and not index_dir.exists()


def test_images_of_too_many_pixels_do_not_end_the_run(tmp_path: Path) -> None:
    samples = [*makers.caption_samples(16), *makers.caption_samples(4, first=16, width=80)]
    makers.write_shard(tmp_path / "a.tar", samples)
    data = training_data(tmp_path, max_image_pixels=40 * 32)
    assert all(batch.sample_ids.max() < 16 for batch in stream(data))
    text = report_text(data.report())
    assert "image has too many pixels 4" in text and "left: 16 samples" in text


def test_captions_that_nobody_reads_may_be_missing(tmp_path: Path) -> None:
    samples = makers.caption_samples(8)
    for sample in samples:
        del sample["txt"]
    makers.write_shard(tmp_path / "a.tar", samples)
    params = DatasetParams(path=str(tmp_path), captions=CaptionConfig(fields={"nowhere": 1}))
    assert len(opened(params, captions_needed=False).selected) == 8
    with pytest.raises(DataError, match="no sample has 'nowhere'"):
        opened(params)


def test_an_empty_cell_is_named_once(tmp_path: Path) -> None:
    for number in range(6):
        makers.picture(number).save(tmp_path / f"{number}.png")
    rows = "".join(f"{number}.png,{'' if number == 3 else 'text'},x{number}\n" for number in range(6))
    (tmp_path / "t.csv").write_text(f"path,caption,long\n{rows}")
    data = training_data(tmp_path / "t.csv", kind="Table")
    assert data.datasets[0].selection.problems.counts == {"caption missing": 1}
    reasons = [data.datasets[0].exclusion(sample, data.table) for sample in range(6)]
    assert "".join(reasons) == reasons[3] == "no caption, a class without a prompt, or too large (40 × 32 pixels)"
    other = training_data(tmp_path / "t.csv", kind="Table", captions=CaptionConfig(fields={"long": 1}))
    assert other.datasets[0].selection.problems.counts == {} and len(other.datasets[0].selected) == 6


def test_limited_tag_folders_say_so(tmp_path: Path) -> None:
    (tmp_path / "metadata").mkdir()
    for number in range(8):
        makers.picture(number).save(tmp_path / f"{number}.png")
        record = {"path": f"{number}.png", "score": 90, "tags": ["cat"]}
        (tmp_path / "metadata" / f"{number}.json").write_text(json.dumps(record))
    data = training_data(tmp_path, kind="TagFolder", tags=TagConfig(limit_images=4))
    text = report_text(data.report())
    assert "left out by dataset.params.max_samples or tags.limit_images: 4 samples" in text
    assert "left: 4 samples" in text
    reasons = sorted(data.datasets[0].exclusion(n, data.table) for n in range(8))
    assert reasons == [""] * 4 + ["max_samples or tags.limit_images"] * 4
    fewer = training_data(tmp_path, kind="TagFolder", tags=TagConfig(limit_images=4), max_samples=3, resampled=True)
    assert {*fewer.datasets[0].selected} < {*data.datasets[0].selected} and len(fewer.datasets[0].selected) == 3
    assert len(training_data(tmp_path, kind="TagFolder", max_samples=9).datasets[0].selected) == 8
