"""A run whose disk is lost goes on from its copies on a real S3-protocol server."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from sd_training.errors import ConfigError
from tests.integration.s3_server import BUCKET, S3Server, s3_environment, s3_server
from tests.integration.training import checkpoint_tensors, options, train, train_in_processes

STEPS = 6


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    with s3_server(tmp_path / "s3.log") as running:
        for name, value in s3_environment(running.url).items():
            monkeypatch.setenv(name, value)
        yield running


def mirrored(run_dir: Path, pipeline_dir: Path, shards_dir: Path, steps: int = STEPS, **changes: object) -> list[str]:
    changes = {"checkpoint__mirror": f"s3://{BUCKET}/runs", "trainer__accelerator": "cpu"} | changes
    changes |= {"experiment__num_examples_to_see": 8 * steps, "experiment__save_every": 2}
    return options(run_dir, pipeline_dir, shards_dir, **changes)


@pytest.mark.parametrize("in_background", [False, True])
def test_a_lost_disk_costs_nothing(
    in_background: bool, server: S3Server, tmp_path: Path, pipeline_dir: Path, shards_dir: Path
) -> None:
    asynchronous = {"checkpoint__asynchronous": in_background}
    train(mirrored(tmp_path / "run", pipeline_dir, shards_dir, STEPS - 2, **asynchronous))
    shutil.rmtree(tmp_path / "run")
    train(mirrored(tmp_path / "run", pipeline_dir, shards_dir, **asynchronous))
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == ["step=4", "step=6"]
    train(mirrored(tmp_path / "whole", pipeline_dir, shards_dir, checkpoint__mirror="null"))
    lost, whole = (checkpoint_tensors(tmp_path / name, STEPS) for name in ("run", "whole"))
    assert lost.keys() == whole.keys() and all(torch.equal(tensor, whole[name]) for name, tensor in lost.items())


def test_what_comes_back_is_compared_with_the_options(tmp_path: Path, pipeline_dir: Path, shards_dir: Path) -> None:
    """The run folder is gone, and with it the options of the last start; the checkpoint has them as well."""
    (tmp_path / "store").mkdir()
    argv = mirrored(tmp_path / "run", pipeline_dir, shards_dir, checkpoint__mirror=f"file://{tmp_path}/store")
    train([*argv, "experiment.num_examples_to_see=32"])
    shutil.rmtree(tmp_path / "run")
    for _ in range(2):  # the second time, the checkpoint has been downloaded
        with pytest.raises(ConfigError, match=r"model\.use_ema: was true at the last start of .* and is false now"):
            train([*argv, "model.use_ema=false"])
    assert train(argv).trainer.global_step == STEPS


def test_a_mirror_that_fails_ends_no_run_and_is_told(tmp_path: Path, pipeline_dir: Path, shards_dir: Path) -> None:
    (tmp_path / "store").mkdir()
    store = f"file://{tmp_path}/store"
    argv = mirrored(tmp_path / "run", pipeline_dir, shards_dir, checkpoint__mirror=store)
    (tmp_path / "store" / "run").write_text("no folder")
    with pytest.raises(ConfigError, match=r"checkpoint\.mirror: .*checkpoint\.mirror=null to continue"):
        train(argv)
    (tmp_path / "store" / "run").unlink()
    (tmp_path / "store" / "run").mkdir()
    (tmp_path / "store" / "run" / "checkpoints").write_text("no folder either, but it can be listed")
    run = train(argv)
    assert run.exit_status == 0 and (tmp_path / "run" / "checkpoints" / f"step={STEPS}").is_dir()
    incident = json.loads((tmp_path / "run" / "incidents" / f"step={STEPS}.mirror.json").read_text())
    assert str(tmp_path / "store") in incident["cause"]


@pytest.mark.slow
def test_two_processes_go_on_from_a_copy(
    server: S3Server, tmp_path: Path, pipeline_dir: Path, shards_dir: Path
) -> None:
    two = {"system__batch_size": 4}
    train_in_processes(mirrored(tmp_path / "run", pipeline_dir, shards_dir, STEPS - 2, **two), 2)
    shutil.rmtree(tmp_path / "run")
    said = train_in_processes(mirrored(tmp_path / "run", pipeline_dir, shards_dir, **two), 2)
    assert f"{tmp_path / 'run'}, resuming after optimizer step 4 of " in said
