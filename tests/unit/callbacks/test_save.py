"""A failed save is logged and counted; too many in a row, or the last one, end the run. How long a save takes."""

import errno
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sd_training.callbacks.base import RunState, TrainingTimer
from sd_training.callbacks.ema import Ema
from sd_training.callbacks.save import Save
from sd_training.checkpoint.mirror import Mirror
from sd_training.checkpoint.run_lock import NO_LOCK
from sd_training.config.schema import CheckpointConfig, EmaConfig
from sd_training.errors import CheckpointError, SaveError

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


def test_a_failed_save_counts_as_one_but_is_not_saved_once_more(tmp_path: Path) -> None:
    save = save_in(tmp_path)
    save.state.is_consistent = True
    with pytest.raises(SaveError), save._recorded(3):
        time.sleep(0.01)
        fail(save, 3, is_last=True)
    state = save.state
    assert state.save_s >= 0.01
    assert state.last_save_step == 3 and state.sealed_step == -1 and not state.is_consistent
    assert time.monotonic() - state.last_save_end_s < 10


def test_a_save_in_the_background_takes_from_its_beginning_to_its_end(tmp_path: Path) -> None:
    save = save_in(tmp_path, asynchronous=True)
    assert save.state.save_s == 0
    save.state.pending_save_since_s = time.monotonic() - 30
    assert 30 <= save.state.save_s < 40


def test_between_saves_the_checkpoints_are_not_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that cannot be read for a moment would end the run."""
    monkeypatch.setattr("sd_training.callbacks.save.sealed_checkpoints", lambda _: pytest.fail("listed"))
    save, trainer = save_in(tmp_path), SimpleNamespace(is_global_zero=True, max_steps=9, should_stop=False)
    save.mirror = Mirror(f"file://{tmp_path}/store", "run")
    save.on_optimizer_step(trainer, None, 1)  # type: ignore[arg-type]
    save._uploaded, save.state.sealed_step = tmp_path / "checkpoints" / "step=2", 2
    save.on_optimizer_step(trainer, None, 3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("is_stored", "found"), [(True, "an average, which current_pipeline holds"), (False, "no average")]
)
def test_an_average_ends_or_begins_only_where_allowed(is_stored: bool, found: str, tmp_path: Path) -> None:
    save = save_in(tmp_path)
    save.ema = None if is_stored else Ema(EmaConfig(), Path())
    with pytest.raises(CheckpointError, match=f"the checkpoint has {found}; set it to {str(is_stored).lower()}, "):
        save._check_average(is_stored=is_stored)
    save.may_change_ema = True
    save._check_average(is_stored=is_stored)
