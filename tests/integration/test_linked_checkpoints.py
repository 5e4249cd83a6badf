"""A run whose checkpoints were moved to another disk and linked back goes on; while the disk is away, it is refused."""

import os
from pathlib import Path

import pytest

from sd_training.errors import DamagedCheckpointsError
from tests.integration.training import metrics, options, train


def test_a_run_goes_on_from_links(pipeline_dir: Path, shards_dir: Path, tmp_path: Path) -> None:
    run_dir, disk = tmp_path / "run", tmp_path / "disk"
    train(options(run_dir, pipeline_dir, shards_dir, experiment__save_every=2))
    disk.mkdir()
    for folder in sorted((run_dir / "checkpoints").iterdir()):
        os.rename(folder, disk / folder.name)
        folder.symlink_to(disk / folder.name)
    more = options(run_dir, pipeline_dir, shards_dir, experiment__save_every=2, experiment__num_examples_to_see=80)
    disk.rename(tmp_path / "unplugged")
    with pytest.raises(DamagedCheckpointsError, match=r"MANIFEST\.json is missing"):
        train(more)
    assert len(metrics(run_dir)) == 8
    (tmp_path / "unplugged").rename(disk)
    assert train(more).trainer.global_step == 10
    assert [row["optimizer_step"] for row in metrics(run_dir)] == [str(step) for step in range(1, 11)]
    assert {path.name: path.is_symlink() for path in (run_dir / "checkpoints").iterdir()} == {
        "step=8": True,
        "step=10": False,
    }
    assert sorted(path.name for path in disk.iterdir()) == ["step=6", "step=8"]
