"""The launcher's file of the run's progress, also where the disk does not take it."""

import math
import os
from pathlib import Path

import pytest
import pytorch_lightning as pl

from sd_training.callbacks.base import RunState
from sd_training.callbacks.preemption import STEP_FILE_VARIABLE, Preemption
from sd_training.errors import EXIT_INTERRUPTED, EXIT_STOPPED
from sd_training.signals import StopSignals
from sd_training.watchdog import STATUS_FILE_VARIABLE
from tests.file_size_limit import file_size_limit
from tests.unit.checkpoint.test_folder import listening_to_the_log


@pytest.fixture
def trainer() -> pl.Trainer:
    return pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)


@pytest.fixture
def preemption() -> Preemption:
    return Preemption(StopSignals(), math.inf, 0.0, 2, RunState(), None, timeout_s=60)


def saved(preemption: Preemption, trainer: pl.Trainer, step: int) -> None:
    preemption.state.sealed_step = preemption.state.last_save_step = step
    preemption._write_step_file(trainer)


def test_a_step_file_that_cannot_be_written_is_told_and_ends_nothing(
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
    assert f"{STEP_FILE_VARIABLE}: {path} cannot be written" in caplog.text
    path.parent.mkdir()
    saved(preemption, trainer, 6)
    assert path.read_text() == "6\n"


@pytest.mark.parametrize("status", [EXIT_STOPPED, EXIT_INTERRUPTED])
def test_the_status_of_a_run_that_stops_is_told_when_all_is_saved(
    status: int, trainer: pl.Trainer, preemption: Preemption, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not after what the end of a run may still wait for."""
    told = tmp_path / "status"
    monkeypatch.setenv(STATUS_FILE_VARIABLE, str(told))
    preemption.on_train_end(trainer, pl.LightningModule())
    assert not told.exists()  # all steps are done
    preemption.status = status
    preemption.on_train_end(trainer, pl.LightningModule())
    assert told.read_text() == f"{status}\n"


def test_a_save_that_was_not_sealed_is_not_told(
    trainer: pl.Trainer, preemption: Preemption, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(STEP_FILE_VARIABLE, str(tmp_path / "step"))
    saved(preemption, trainer, 2)
    preemption.state.last_save_step = 4
    preemption._write_step_file(trainer)
    assert (tmp_path / "step").read_text() == "2\n"


def test_a_full_disk_leaves_the_step_before(
    trainer: pl.Trainer, preemption: Preemption, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(STEP_FILE_VARIABLE, str(tmp_path / "step"))
    saved(preemption, trainer, 2)
    with file_size_limit(0):
        saved(preemption, trainer, 4)
    assert (tmp_path / "step").read_text() == "2\n" and os.listdir(tmp_path) == ["step"]


def test_what_can_be_broken_off_is_no_part_of_the_longest_step(trainer: pl.Trainer, preemption: Preemption) -> None:
    def step() -> None:
        preemption.on_optimizer_step(trainer, None, 1)  # type: ignore[arg-type]

    step()
    preemption.exclude_from_step(1000)
    step()
    assert preemption._longest_step_s == 0
    step()
    assert preemption._longest_step_s > 0
