"""The status that a batch file is told: one per start, whole, of the process that ended first."""

from pathlib import Path

import pytest

from sd_training.errors import BadSamplesError
from sd_training.watchdog import STATUS_FILE_VARIABLE, FirstFailure, exit_together, write_status
from tests.file_size_limit import file_size_limit


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "job" / "slurm-1.step.status-0"
    path.parent.mkdir()
    monkeypatch.setenv(STATUS_FILE_VARIABLE, str(path))
    return path


def test_the_first_one_told_counts(path: Path) -> None:
    write_status(0)
    assert not path.exists()
    write_status(75)
    write_status(1)
    assert path.read_text() == "75\n" and list(path.parent.iterdir()) == [path]


def test_a_file_that_cannot_be_written_ends_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with file_size_limit(0):
        write_status(75)
    assert list(path.parent.iterdir()) == []
    path.parent.rmdir()
    write_status(75)
    monkeypatch.delenv(STATUS_FILE_VARIABLE)
    write_status(75)


def test_the_status_of_all_is_that_of_the_first_failure(path: Path, tmp_path: Path) -> None:
    first, second = FirstFailure(tmp_path, 0), FirstFailure(tmp_path, 1)
    assert second.claim(88, "too many")  # and died before it could tell the batch file
    with pytest.raises(SystemExit), exit_together(first, is_child=False):
        raise RuntimeError("connection closed by peer")
    assert path.read_text() == "88\n"


def test_a_mistake_is_told(path: Path, tmp_path: Path) -> None:
    with pytest.raises(BadSamplesError), exit_together(FirstFailure(tmp_path, 0), is_child=False):
        raise BadSamplesError("too many")
    assert path.read_text() == "88\n"
