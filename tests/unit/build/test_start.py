"""How a run ends that cannot begin. Whole runs are in tests/integration."""

import json
from pathlib import Path

import pytest

from sd_training.build.start import Start, _traces, _unreadable
from sd_training.callbacks.metrics import COLUMNS
from sd_training.checkpoint.mirror import MirrorError
from sd_training.data.storage.object_store import is_outage
from sd_training.errors import EXIT_MISTAKE, EXIT_STOPPED


@pytest.mark.parametrize(
    ("cause", "status"),
    [
        ("Generic S3 error: after 5 retries - Server returned non-2xx status code: 503 Slow Down", EXIT_STOPPED),
        ("Generic S3 error: after 5 retries - HTTP error: error sending request", EXIT_STOPPED),
        ("Generic HTTP error: HTTP error: error sending request: invalid peer certificate", EXIT_MISTAKE),
        ("Server returned non-2xx status code: 403 Forbidden", EXIT_MISTAKE),
        ("Not a directory (os error 20)", EXIT_MISTAKE),
    ],
)
def test_a_mirror_that_is_away_asks_for_another_start(cause: str, status: int) -> None:
    error = MirrorError(f"checkpoint.mirror: {cause}", is_outage(OSError(cause)))
    assert _unreadable(error).exit_status == status


def test_a_run_that_has_done_more_than_its_options_ask_for_says_so(tmp_path: Path) -> None:
    done = Start(tmp_path, num_steps=2, step=8, source="step=8").sentence()
    assert done.startswith("resumes from step=8, after 8 optimizer steps, and the options ask for 2; raise ")
    assert "after 1 of 1 optimizer step;" in Start(tmp_path, num_steps=1, step=1, source="step=1").sentence()


def test_metrics_without_a_record_of_a_start_are_those_of_a_run_that_has_trained(tmp_path: Path) -> None:
    """With the record alone beside them the run was stopped before its first save, and begins again."""
    (tmp_path / "metrics.csv").write_text("optimizer_step,loss\n")
    assert _traces(tmp_path) == []
    row = ["7", *["0"] * (len(COLUMNS) - 1)]
    (tmp_path / "metrics.csv").write_text(f"{','.join(COLUMNS)}\n{','.join(row)}\n")
    assert _traces(tmp_path) == ["metrics.csv up to step 7"]
    (tmp_path / "run.json").write_text(json.dumps({"starts": [{"first_optimizer_step": 0}]}))
    assert _traces(tmp_path) == []
    (tmp_path / "saved_step").write_text("4\n")
    last, *rest = _traces(tmp_path)
    assert last == "last save after 4 optimizer steps" and rest == ["metrics.csv up to step 7", "run.json of 1 start"]
