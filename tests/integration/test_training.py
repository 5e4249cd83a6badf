"""The promises of a run: accumulation does not change it, and an interruption does not either.

That the number of processes does not is shown by `tests/faults/elastic.py` and `tests/strategy_report.py`.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionPipeline

from tests import makers
from tests.integration.record_ids import RecordIds, read_ids
from tests.integration.training import (
    CrashAfter,
    Interrupted,
    checkpoint_tensors,
    losses,
    metrics,
    options,
    train,
    train_in_processes,
)


def assert_same_tensors(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert set(left) == set(right)
    different = [name for name in left if not torch.equal(left[name], right[name])]
    assert not different


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory, pipeline_dir: Path, shards_dir: Path) -> Path:
    """An uninterrupted run of 8 optimizer steps of 8 images."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    (run_dir.parent / "ids").mkdir()
    train(options(run_dir, pipeline_dir, shards_dir, experiment__save_every=2), RecordIds(run_dir.parent / "ids"))
    return run_dir


def test_a_run_leaves_what_the_readme_says(whole_run: Path) -> None:
    for name in ("config.yaml", "run.json", "metrics.csv", "tensorboard", "current_pipeline/model_index.json"):
        assert (whole_run / name).exists(), name
    assert sorted(p.name for p in (whole_run / "checkpoints").iterdir()) == ["step=6", "step=8"]
    assert [row["optimizer_step"] for row in metrics(whole_run)] == [str(i) for i in range(1, 9)]
    rates = [float(row["learning_rate"]) for row in metrics(whole_run)[:4]]
    np.testing.assert_allclose(rates, [0.001 / 3, 0.002 / 3, 0.001, 0.001])


def test_the_exported_pipeline_holds_the_average_and_draws(whole_run: Path) -> None:
    pipeline = StableDiffusionPipeline.from_pretrained(whole_run / "current_pipeline", local_files_only=True)
    tensors = checkpoint_tensors(whole_run, 8)
    weights = {n.split("network.")[-1]: t for n, t in tensors.items() if n.startswith("weights:")}
    assert any(not torch.equal(p.detach(), weights[n]) for n, p in pipeline.unet.named_parameters())
    average = {n: t for n, t in tensors.items() if n.startswith("ema:")}
    for name, parameter in pipeline.unet.named_parameters():
        assert any(key.endswith(name) and torch.equal(t, parameter.detach()) for key, t in average.items()), name
    image = pipeline("a red picture", num_inference_steps=2, height=16, width=16).images[0]
    assert image.size == (16, 16)


@pytest.mark.parametrize("crash_after", [1, 3, 4, 7])
def test_interrupted_and_resumed_is_bit_equal(
    crash_after: int, tmp_path: Path, whole_run: Path, pipeline_dir: Path, shards_dir: Path
) -> None:
    run_dir = tmp_path / "run"
    argv = options(run_dir, pipeline_dir, shards_dir, experiment__save_every=2)
    with pytest.raises(Interrupted):
        train(argv, CrashAfter(crash_after))
    run = train(argv)
    assert run.trainer.global_step == 8
    assert_same_tensors(checkpoint_tensors(run_dir, 8), checkpoint_tensors(whole_run, 8))
    assert losses(run_dir) == losses(whole_run)


def test_interrupted_inside_an_accumulation_is_bit_equal(tmp_path: Path, pipeline_dir: Path, shards_dir: Path) -> None:
    shape = {"system__batch_size": 2, "system__gradient_accumulation": 4}
    whole = options(tmp_path / "whole", pipeline_dir, shards_dir, **shape)
    cut = options(tmp_path / "cut", pipeline_dir, shards_dir, **shape, experiment__save_every=2)
    train(whole)
    for micro_batches in (11, 6, 9):
        with pytest.raises(Interrupted):
            train(cut, CrashAfter(micro_batches))
    train(cut)
    assert_same_tensors(checkpoint_tensors(tmp_path / "cut", 8), checkpoint_tensors(tmp_path / "whole", 8))


@pytest.mark.parametrize(("batch", "accumulation"), [(2, 4), (4, 2)])
def test_accumulation_equals_one_large_batch(
    batch: int, accumulation: int, tmp_path: Path, whole_run: Path, pipeline_dir: Path, shards_dir: Path
) -> None:
    run_dir = tmp_path / "run"
    changes = {"system__batch_size": batch, "system__gradient_accumulation": accumulation}
    train(options(run_dir, pipeline_dir, shards_dir, **changes), RecordIds(tmp_path))
    np.testing.assert_allclose(losses(run_dir), losses(whole_run), rtol=1e-5)
    assert read_ids(tmp_path) == read_ids(whole_run.parent / "ids")


def test_four_times_eight_is_thirty_two(tmp_path: Path, pipeline_dir: Path, shards_dir: Path) -> None:
    shapes = {"one": (32, 1), "four": (8, 4)}
    for name, (batch, accumulation) in shapes.items():
        changes = {"system__batch_size": batch, "system__gradient_accumulation": accumulation}
        changes |= {"experiment__num_examples_to_see": 96, "experiment__save_every": 3}
        train(options(tmp_path / name / "run", pipeline_dir, shards_dir, **changes), RecordIds(tmp_path / name))
    np.testing.assert_allclose(losses(tmp_path / "four" / "run"), losses(tmp_path / "one" / "run"), rtol=1e-5)
    assert read_ids(tmp_path / "four") == read_ids(tmp_path / "one")
    assert len(read_ids(tmp_path / "one")) == 3


def test_buckets_train_alike_on_one_process_and_on_two_and_resume(tmp_path: Path, pipeline_dir: Path) -> None:
    shapes = [(40, 40), (64, 32), (32, 64)]
    for shard, (width, height) in enumerate(shapes * 2):
        samples = makers.caption_samples(10, first=shard * 10, width=width, height=height)
        makers.write_shard(tmp_path / "data" / f"{shard}.tar", samples)
    changes = {
        "dataset__params__buckets__mode": "ladder",
        "dataset__params__buckets__step": 8,
        "dataset__params__buckets__min_side": 8,
        "dataset__params__buckets__max_aspect": 4,
        "system__batch_size": 8,
    }
    whole = options(tmp_path / "whole", pipeline_dir, tmp_path / "data", **changes)
    train(whole)
    cut = options(tmp_path / "cut", pipeline_dir, tmp_path / "data", **changes)
    with pytest.raises(Interrupted):
        train(cut, CrashAfter(5))
    train(cut)
    assert_same_tensors(checkpoint_tensors(tmp_path / "cut", 8), checkpoint_tensors(tmp_path / "whole", 8))
    halves = {**changes, "system__batch_size": 4, "system__workers": 1}
    train_in_processes(options(tmp_path / "two", pipeline_dir, tmp_path / "data", **halves), 2)
    np.testing.assert_allclose(losses(tmp_path / "two"), losses(tmp_path / "whole"), rtol=1e-5)


def test_resume_with_another_accumulation_continues_the_same_samples(
    tmp_path: Path, whole_run: Path, pipeline_dir: Path, shards_dir: Path
) -> None:
    run_dir = tmp_path / "run"
    with pytest.raises(Interrupted):
        train(options(run_dir, pipeline_dir, shards_dir), CrashAfter(4))
    changes = {"system__batch_size": 2, "system__gradient_accumulation": 4}
    train(options(run_dir, pipeline_dir, shards_dir, **changes), RecordIds(tmp_path))
    expected = {step: pairs for step, pairs in read_ids(whole_run.parent / "ids").items() if step >= 4}
    assert read_ids(tmp_path) == expected
    np.testing.assert_allclose(losses(run_dir), losses(whole_run), rtol=1e-5)
