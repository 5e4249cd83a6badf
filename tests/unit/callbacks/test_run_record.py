"""`config.yaml` and `run.json` are there whole or as they were; a full disk at the start ends no run."""

import json
from pathlib import Path

import pytest
import pytorch_lightning as pl

from sd_training.callbacks import run_record
from sd_training.callbacks.run_record import RunRecord
from tests.file_size_limit import file_size_limit
from tests.unit.checkpoint.test_folder import listening_to_the_log


def start(run_dir: Path, config: str) -> None:
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    RunRecord(run_dir, config, dict, str).on_train_start(trainer, pl.LightningModule())


def test_each_start_is_recorded(tmp_path: Path) -> None:
    start(tmp_path, "a: 1\n")
    start(tmp_path, "a: 2\n")
    assert (tmp_path / "config.yaml").read_text() == "a: 2\n"
    starts = json.loads((tmp_path / "run.json").read_text())["starts"]
    assert [entry["config"] for entry in starts] == ["configs/0001.yaml", "configs/0002.yaml"]
    assert (tmp_path / "configs" / "0001.yaml").read_text() == "a: 1\n"


def test_configurations_are_kept_once_and_not_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_record, "_MAX_CONFIGS", 3)
    for number in (0, 1, 1, 2, 3):
        start(tmp_path, f"a: {number}\n")
    kept = {path.name: path.read_text() for path in (tmp_path / "configs").iterdir()}
    assert kept == {"0001.yaml": "a: 0\n", "0003.yaml": "a: 2\n", "0004.yaml": "a: 3\n"}


def test_a_full_disk_leaves_the_record_as_it_was(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    start(tmp_path, "a: 1\n")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with listening_to_the_log(), file_size_limit(100):
        start(tmp_path, "a: 1\n" * 100)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    for name in ("config.yaml", "run.json", "configs"):
        assert f"{tmp_path / name} cannot be written" in caplog.text
