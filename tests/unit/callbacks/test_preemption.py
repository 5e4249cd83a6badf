"""What the launcher is told of the run's progress, also where the disk does not take it."""

import os
import time
from pathlib import Path

import pytest
import pytorch_lightning as pl

from sd_training.callbacks.deadlines import Deadlines
from sd_training.callbacks.preemption import STEP_FILE_VARIABLE, Preemption
from sd_training.callbacks.save_times import SaveTimes
from sd_training.stop_signals import StopSignals
from tests.file_size_limit import file_size_limit
from tests.unit.checkpoint.test_seal import listening_to_the_log


@pytest.fixture
def trainer() -> pl.Trainer:
    return pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)


@pytest.fixture
def preemption() -> Preemption:
    return Preemption(StopSignals(), Deadlines(None, time.monotonic(), {}), SaveTimes(), None, timeout_s=60)


def saved(preemption: Preemption, trainer: pl.Trainer, step: int) -> None:
    with preemption.times.saving(step):
        pass
    preemption._tell_launcher(trainer)


def test_a_step_file_that_cannot_be_written_is_told_once_and_ends_nothing(
    trainer: pl.Trainer,
    preemption: Preemption,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = tmp_path / "folder" / "step"
    monkeypatch.setenv(STEP_FILE_VARIABLE, str(path))
    with listening_to_the_log():
        saved(preemption, trainer, 2)
        told = caplog.text
        saved(preemption, trainer, 4)
    assert f"{STEP_FILE_VARIABLE}: {path} cannot be written" in told and caplog.text == told
    path.parent.mkdir()
    saved(preemption, trainer, 6)
    assert path.read_text() == "6\n"


def test_a_full_disk_leaves_the_step_before(
    trainer: pl.Trainer, preemption: Preemption, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(STEP_FILE_VARIABLE, str(tmp_path / "step"))
    saved(preemption, trainer, 2)
    with file_size_limit(0):
        saved(preemption, trainer, 4)
    assert (tmp_path / "step").read_text() == "2\n" and os.listdir(tmp_path) == ["step"]
