"""A failed save is logged and counted; too many in a row, or the last one, end the run."""

import errno
import json
from pathlib import Path
from typing import Any

import pytest

from sd_training.callbacks.base import RunState, TrainingTimer
from sd_training.callbacks.save import Save
from sd_training.checkpoint.folder import NO_LOCK
from sd_training.config.schema import CheckpointConfig
from sd_training.errors import SaveError

FULL = OSError(errno.ENOSPC, "checkpoint step=2 could not be written to /x: No space left on device; 0.00 GiB are free")


def save_in(run_dir: Path, **config: Any) -> Save:
    state, timer = RunState(), TrainingTimer()
    return Save(run_dir, 2, CheckpointConfig(**config), True, lambda _: None, None, timer, state, NO_LOCK, False)


def fail(save: Save, step: int, *, is_last: bool = False) -> None:
    with save._failures_counted(step, is_last=is_last):
        raise FULL


def test_so_many_in_a_row_end_the_run(tmp_path: Path) -> None:
    save = save_in(tmp_path, max_failed_saves=2)
    fail(save, 2)
    save._failed_in_a_row = 0
    fail(save, 4)
    with pytest.raises(SaveError, match=r"2 saves in a row failed \(checkpoint.max_failed_saves\).*No space left"):
        fail(save, 6)
    for step, count in ((2, 1), (4, 1), (6, 2)):
        incident = json.loads((tmp_path / "incidents" / f"step={step}.save.json").read_text())
        assert incident["failed_in_a_row"] == count
        assert "No space left" in incident["cause"]


def test_the_last_save_must_succeed(tmp_path: Path) -> None:
    with pytest.raises(SaveError, match="the last save of this run, of step 8") as error:
        fail(save_in(tmp_path, max_failed_saves=9), 8, is_last=True)
    assert error.value.exit_status == 74


def test_no_space_for_the_incident_is_no_error(tmp_path: Path) -> None:
    fail(save_in(tmp_path / "missing", max_failed_saves=2), 2)
