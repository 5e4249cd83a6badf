"""The benchmarks of data and of the step run, data also where it is damaged; how fast they find things is not looked
at."""

from pathlib import Path

import pytest

from scripts import bench_data
from sd_training.errors import ConfigError
from tests import makers
from tests.integration.commands import ROOT, forked


def test_damaged_samples_are_left_out_by_both(tmp_path: Path) -> None:
    samples = makers.caption_samples(40)
    for sample in samples[::8]:
        sample["jpg"] = sample["jpg"][:300]
    del samples[3]["txt"]
    makers.write_shard(tmp_path / "a.tar", samples)
    options = [f"dataset.params.path={tmp_path}", "dataset.params.resolution=16", "--workers", "1"]
    sizes = ["--batch", "4", "--turns", "1", "--batches", "2"]
    done = forked("scripts/bench_data.py", *options, *sizes, "dataset.params.max_bad_fraction=1", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "ratio to webdataset" in done.stdout


def test_a_step_is_compared_with_a_loop_by_hand() -> None:
    done = forked("tests/bench_step.py", "--batch", "1", "--steps", "1", "--turns", "1", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "speed ratio to the hand-written loop" in done.stdout.splitlines()[-1]


def test_captions_are_read(tmp_path: Path) -> None:
    makers.caption_shards(tmp_path, shards=1)
    arguments = bench_data.parse_arguments([f"dataset.params.path={tmp_path}", "dataset.params.resolution=16"])
    data = bench_data.make_data(bench_data.dataset_of(arguments, tmp_path), 4, 0)
    asked = []
    read = data.datasets[0].captioner
    object.__setattr__(data.datasets[0], "captioner", lambda *visit: asked.append(visit) or read(*visit))
    next(bench_data.own_batches(data))
    assert len(asked) >= 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--size", "640"], "--size: is '640'"),
        (["--size", "0x10"], "--size"),
        (["--batch", "0"], "--batch: is 0"),
        (["--workers", "-1"], "--workers: is -1"),
        (["--turns", "0"], "--turns: is 0"),
    ],
)
def test_mistakes_are_sentences(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        bench_data.parse_arguments(arguments)
