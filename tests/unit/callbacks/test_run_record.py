"""`config.yaml` and `run.json` are there whole or as they were; a full disk at the start ends no run."""

import json
from pathlib import Path

import pytest
import pytorch_lightning as pl

from sd_training.callbacks.run_record import RunRecord
from tests.file_size_limit import file_size_limit
from tests.unit.checkpoint.test_seal import listening_to_the_log


def start(run_dir: Path, config: str) -> None:
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    RunRecord(run_dir, config, dict).on_train_start(trainer, pl.LightningModule())


def test_each_start_is_recorded(tmp_path: Path) -> None:
    start(tmp_path, "a: 1\n")
    start(tmp_path, "a: 2\n")
    assert (tmp_path / "config.yaml").read_text() == "a: 2\n"
    assert len(json.loads((tmp_path / "run.json").read_text())["starts"]) == 2


def test_a_full_disk_leaves_the_record_as_it_was(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    start(tmp_path, "a: 1\n")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with listening_to_the_log(), file_size_limit(100):
        start(tmp_path, "a: 1\n" * 100)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    for name in before:
        assert f"{tmp_path / name} cannot be written" in caplog.text
