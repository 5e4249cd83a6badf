"""Log lines: their form, beside a progress bar, and in `train.log`."""

import io
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tqdm import tqdm

from sd_training import log as rank_log
from sd_training.checkpoint.folder import acquire_run_lock
from sd_training.errors import DataError
from sd_training.log import FOR_FILE, RunLog, get_logger, write_lines_by
from tests.file_size_limit import file_size_limit

log = get_logger(__name__)
TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d "


def lines(folder: Path, name: str = "train.log") -> list[str]:
    """Without the times, which every line that begins a record has."""
    return [re.sub(f"^{TIME}", "", line) for line in (folder / name).read_text().splitlines()]


def anybody() -> None:
    pass


@pytest.fixture
def console(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    stream = io.StringIO()
    monkeypatch.setattr(rank_log._console, "stream", stream)
    yield stream
    write_lines_by(None)


def test_every_line_is_kept_from_the_first_on(
    tmp_path: Path, console: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "canary-1234")
    with RunLog().kept() as kept:
        log.info("before there is a folder")
        assert not (tmp_path / "train.log").exists()
        kept.open(tmp_path, anybody)
        log.warning("of canary-1234")
        log.info("step 4 of 8", extra=FOR_FILE)
    log.info("after the run")
    with pytest.raises(ZeroDivisionError), RunLog().kept() as kept:  # the next start
        kept.open(tmp_path, anybody)
        raise ZeroDivisionError("a defect")
    with pytest.raises(DataError), RunLog().kept() as kept:
        kept.open(tmp_path, anybody)
        raise DataError("data: are missing")
    first, *rest = lines(tmp_path)
    assert [first, *rest[:2]] == ["before there is a folder", "warning: of (hidden)", "step 4 of 8"]
    assert rest[2] == "error: Traceback (most recent call last):" and "ZeroDivisionError: a defect" in rest
    assert rest[-1] == "error: data: are missing"
    assert re.fullmatch(
        f"{TIME}before there is a folder\n{TIME}warning: of \\(hidden\\)\n{TIME}after the run\n", console.getvalue()
    )


def test_other_ranks_add_their_warnings_and_errors(
    tmp_path: Path, console: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    with RunLog().kept() as kept:
        log.warning("of the config, which every rank reads")
        log.error("early")
        kept.open(tmp_path / "later", anybody)  # the first process has not made it yet
        log.error("lost")
        kept.open(tmp_path, anybody)
        log.info("nothing new")
        log.warning("slow")
        log.error("broken")
    assert lines(tmp_path) == ["rank 3: warning: slow", "rank 3: error: broken"]
    said = re.sub(TIME, "", console.getvalue()).splitlines()
    assert said == ["rank 3: error: early", "rank 3: error: lost", "rank 3: error: broken"]


def test_a_full_disk_costs_lines(tmp_path: Path, console: io.StringIO) -> None:
    with RunLog().kept() as kept:
        kept.open(tmp_path, anybody)
        log.info("a line that fits")
        with file_size_limit(70):
            log.info("a line of which a part fits")
            log.info("none of this one")
        log.info("there is space again")
    said = (tmp_path / "train.log").read_text()
    assert "a line that fits\n" in said and said.endswith("there is space again\n") and "none of this" not in said


def test_who_lost_the_folder_writes_nothing_any_more(tmp_path: Path, console: io.StringIO) -> None:
    run_lock = acquire_run_lock(tmp_path)
    with RunLog().kept() as kept:
        kept.open(tmp_path, run_lock.check)
        log.info("mine")
        (tmp_path / "writer.json").write_text('{"token": 1}')
        log.info("a zombie's")
    run_lock.release()
    assert lines(tmp_path) == ["mine"]


def test_a_line_beside_a_bar_has_a_row_of_its_own(console: io.StringIO) -> None:
    bar = tqdm(total=8, file=console, desc="training", mininterval=0)
    write_lines_by(lambda line: tqdm.write(line, file=console))
    bar.update(4)
    log.info("saved")
    log.info("of the file only", extra=FOR_FILE)
    bar.close()
    write_lines_by(None)
    log.info("done")
    rows = [row.rpartition("\r")[2] for row in console.getvalue().splitlines() if row.strip("\r ")]
    assert [re.sub(f"^{TIME}", "", row) for row in rows if "training" not in row] == ["saved", "done"]


def test_a_stderr_that_takes_nothing_costs_the_line(
    console: io.StringIO, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with io.TextIOWrapper(io.FileIO("/dev/full", "w"), write_through=True) as full:
        monkeypatch.setattr(rank_log._console, "stream", full)
        log.info("lost")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("is_closed", [True, False])
def test_without_a_stderr_lines_are_lost_and_nothing_else(is_closed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO() if is_closed else None  # `2>&-` gives none
    if stream is not None:
        stream.close()
    monkeypatch.setattr(rank_log._console, "stream", stream)
    rank_log.log.error("lost")
