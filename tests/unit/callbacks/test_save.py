"""A failed save is logged and counted; too many in a row, or the last one, end the run. The file in which the
launcher finds the run's progress, also where the disk does not take it."""

import errno
import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sd_training.callbacks import save as saving
from sd_training.callbacks.base import RunState
from sd_training.callbacks.save import STEP_FILE_VARIABLE, Save
from sd_training.checkpoint.folder import NO_LOCK
from sd_training.config.schema import Config
from sd_training.errors import SaveError
from tests.file_size_limit import file_size_limit
from tests.unit.checkpoint.test_folder import listening_to_the_log

FULL = OSError(errno.ENOSPC, "checkpoint step=2 could not be written to /x: No space left on device; 0.00 GiB are free")


def save_in(run_dir: Path, **config: Any) -> Save:
    return Save(run_dir, config_of(checkpoint=config), lambda _: None, None, RunState(), NO_LOCK)


def config_of(**groups: Any) -> Config:
    experiment = {"log_dir": "/runs", "name": "a", "num_examples_to_see": 8, "save_every": 2}
    return Config.model_validate({"experiment": experiment, "dataset": {"params": {"path": "a.tar"}}, **groups})


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


def test_a_step_file_that_cannot_be_written_is_told_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, save = tmp_path / "folder" / "step", save_in(tmp_path)
    monkeypatch.setenv(STEP_FILE_VARIABLE, str(path))
    with listening_to_the_log():
        save._write_step_file(2)
    assert f"{STEP_FILE_VARIABLE}: {path} cannot be written" in caplog.text
    path.parent.mkdir()
    save._write_step_file(6)
    assert path.read_text() == "6\n"


@pytest.mark.parametrize("is_asynchronous", [False, True])
def test_a_save_that_was_not_sealed_is_not_told(
    is_asynchronous: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_save(*_: Any, **__: Any) -> Callable[[], None]:
        def seal() -> None:
            if num_sealed == 1:
                raise FULL

        return seal

    save, trainer = save_in(tmp_path), SimpleNamespace()
    monkeypatch.setenv(STEP_FILE_VARIABLE, str(tmp_path / "step"))
    monkeypatch.setattr(saving, "save_checkpoint", no_save)
    for num_sealed, step in enumerate((2, 4)):
        seal = save._begin_checkpoint(trainer, step, asynchronous=is_asynchronous)  # type: ignore[arg-type]
        with pytest.raises(OSError, match="No space left") if num_sealed else nullcontext():
            seal()
        assert (tmp_path / "step").read_text() == "2\n"


def test_a_full_disk_leaves_the_step_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = save_in(tmp_path)
    monkeypatch.setenv(STEP_FILE_VARIABLE, str(tmp_path / "step"))
    save._write_step_file(2)
    with file_size_limit(0):
        save._write_step_file(4)
    assert (tmp_path / "step").read_text() == "2\n" and os.listdir(tmp_path) == ["step"]
