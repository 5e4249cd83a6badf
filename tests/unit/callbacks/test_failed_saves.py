"""A failed save is told and counted; too many in a row, or the last one, end the run."""

import errno
import json
from pathlib import Path

import pytest

from sd_training.callbacks.save import FailedSaves
from sd_training.errors import SaveError

FULL = OSError(errno.ENOSPC, "checkpoint step=2 could not be written to /x: No space left on device; 0.00 GiB are free")


def test_so_many_in_a_row_end_the_run(tmp_path: Path) -> None:
    failures = FailedSaves(tmp_path, 2)
    failures.failed(2, FULL, is_last=False)
    failures.succeeded()
    failures.failed(4, FULL, is_last=False)
    with pytest.raises(SaveError, match=r"2 saves in a row failed \(checkpoint.max_failed_saves\).*No space left"):
        failures.failed(6, FULL, is_last=False)
    lines = [json.loads(line) for line in (tmp_path / "incidents.jsonl").read_text().splitlines()]
    assert [(line["optimizer_step"], line["failed_in_a_row"]) for line in lines] == [(2, 1), (4, 1), (6, 2)]
    assert {line["kind"] for line in lines} == {"save failed"} and "No space left" in lines[0]["cause"]
    assert all(line["free_bytes"] > 0 for line in lines)


def test_the_last_save_must_succeed(tmp_path: Path) -> None:
    with pytest.raises(SaveError, match="the last save of this run, of step 8") as error:
        FailedSaves(tmp_path, 9).failed(8, FULL, is_last=True)
    assert error.value.exit_status == 74


def test_no_space_for_the_incident_is_no_error(tmp_path: Path) -> None:
    FailedSaves(tmp_path / "missing", 2).failed(2, FULL, is_last=False)
