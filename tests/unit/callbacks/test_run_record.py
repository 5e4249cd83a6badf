"""`config.yaml` and `run.json` are there whole or as they were; a full disk at the start ends no run."""

import json
from pathlib import Path

import pytest
import pytorch_lightning as pl

from sd_training.callbacks.run_record import RunRecord
from tests.file_size_limit import file_size_limit
from tests.unit.checkpoint.test_folder import listening_to_the_log


def start(run_dir: Path, config: str) -> None:
    trainer = pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    RunRecord(run_dir, config, dict, str).on_train_start(trainer, pl.LightningModule())


def test_each_start_is_recorded_with_a_configuration_that_is_new(tmp_path: Path) -> None:
    for number in (1, 1, 2, 1):
        start(tmp_path, f"a: {number}\nb: é\n")
    assert (tmp_path / "config.yaml").read_text() == "a: 1\nb: é\n"
    starts = json.loads((tmp_path / "run.json").read_text())["starts"]
    assert [entry.get("config") for entry in starts] == [["a: 1", "b: é"], None, ["a: 2", "b: é"], ["a: 1", "b: é"]]


@pytest.mark.parametrize("text", ['{"starts": [1, {"config', '{"starts": 1}', '{"starts": ["x"]}', "[]"])
def test_a_damaged_record_ends_no_run(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    start(tmp_path, "a: 1\n")
    (entry,) = json.loads((tmp_path / "run.json").read_text())["starts"]
    assert entry["config"] == ["a: 1"]


def test_a_full_disk_leaves_the_record_as_it_was(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    start(tmp_path, "a: 1\n")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with listening_to_the_log(), file_size_limit(100):
        start(tmp_path, "a: 1\n" * 100)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    for name in ("config.yaml", "run.json"):
        assert f"{tmp_path / name} cannot be written" in caplog.text
