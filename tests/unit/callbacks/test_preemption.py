"""A run that stops: its status, and what the longest step is."""

import math
from pathlib import Path

import pytest
import pytorch_lightning as pl

from sd_training.callbacks.base import RunState
from sd_training.callbacks.preemption import Preemption
from sd_training.errors import EXIT_INTERRUPTED, EXIT_STOPPED
from sd_training.signals import StopSignals
from sd_training.watchdog import STATUS_FILE_VARIABLE
from tests.unit.callbacks.test_save import config_of


@pytest.fixture
def trainer() -> pl.Trainer:
    return pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)


@pytest.fixture
def preemption() -> Preemption:
    return Preemption(StopSignals(), config_of(), RunState(), math.inf, 0.0)


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


def test_what_can_be_broken_off_is_no_part_of_the_longest_step(trainer: pl.Trainer, preemption: Preemption) -> None:
    def step() -> None:
        preemption.on_optimizer_step(trainer, None, 1)  # type: ignore[arg-type]

    step()
    preemption.exclude_from_step(1000)
    step()
    assert preemption._longest_step_s == 0
    step()
    assert preemption._longest_step_s > 0
