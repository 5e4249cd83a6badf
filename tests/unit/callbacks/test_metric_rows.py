"""metrics.csv and metrics.jsonl after kills, on a full disk, and once there is space again."""

from pathlib import Path

import pytest

from sd_training.callbacks.metrics import JsonRows, MetricRows
from tests.file_size_limit import file_size_limit

COLUMNS = ("optimizer_step", "loss", "l1")


def made(path: Path, *steps: int) -> MetricRows:
    rows = MetricRows(path, COLUMNS)
    rows.keep_until(0)
    for step in steps:
        rows.add({"optimizer_step": str(step), "loss": f"{step}.5", "other": "x"})
    return rows


def test_rows_after_the_checkpoint_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.csv"
    made(path, 2, 4, 6)
    MetricRows(path, COLUMNS).keep_until(4)
    assert path.read_text().split() == ["optimizer_step,loss,l1", "2,2.5,", "4,4.5,"]
    assert [file.name for file in path.parent.iterdir()] == ["metrics.csv"]


@pytest.mark.parametrize("torn", ["12", "12,1", "12,1.5,", "\0\0\0", "12,\0\0,\n", "x,1,2\n", ",,\n", "1,2,3,4\n"])
def test_a_torn_last_row_is_dropped(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "metrics.csv"
    made(path, 10)
    with path.open("a") as stream:
        stream.write(torn)
    MetricRows(path, COLUMNS).keep_until(100)
    assert path.read_text().split() == ["optimizer_step,loss,l1", "10,10.5,"]


def test_rows_wait_while_the_disk_is_full(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    rows = made(path, 1)
    before = path.read_bytes()
    with file_size_limit(len(before) + 3):  # the first bytes of a row would fit
        rows.add({"optimizer_step": "2", "loss": "2"})
        rows.add({"optimizer_step": "3", "loss": "3"})
        assert path.read_bytes() == before
    rows.add({"optimizer_step": "4", "loss": "4"})
    rows.add({"optimizer_step": "5", "loss": "5"})
    assert path.read_text().split()[1:] == ["1,1.5,", "2,2,", "3,3,", "4,4,", "5,5,"]


def test_rows_of_one_step_come_together(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    rows = made(path, 1)
    with file_size_limit(path.stat().st_size + 7):  # one row would fit
        rows.add(*({"optimizer_step": "2", "loss": loss} for loss in "34"))
    assert not rows.has(2)
    rows.add({"optimizer_step": "3", "loss": "5"})
    assert path.read_text().split()[1:] == ["1,1.5,", "2,3,", "2,4,", "3,5,"]
    assert [step for step in range(9) if rows.has(step)] == [1, 2, 3]
    assert not MetricRows(tmp_path / "none.csv", COLUMNS).has(0)


def test_a_file_that_cannot_be_replaced_stays(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    made(path, 1, 2)
    before = path.read_bytes()
    with file_size_limit(5):
        MetricRows(path, COLUMNS).keep_until(1)
    assert path.read_bytes() == before


def test_columns_that_an_older_version_did_not_write_are_empty(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("optimizer_step,l1\n1,7\n2,8\n3,9\n")
    rows = MetricRows(path, COLUMNS)
    rows.keep_until(2)
    rows.add({"optimizer_step": "3", "loss": "0.5"})
    assert path.read_text().split() == ["optimizer_step,loss,l1", "1,,7", "2,,8", "3,0.5,"]


def test_lines_of_json_have_all_values(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    rows = JsonRows(path, COLUMNS)
    rows.keep_until(0)
    rows.add({"optimizer_step": "1", "loss": "1e-05", "other": "2"}, {"optimizer_step": "2", "loss": "nan"})
    first, second = '{"optimizer_step": 1, "loss": 1e-05, "other": 2}\n', '{"optimizer_step": 2, "loss": null}\n'
    assert path.read_text() == first + second and [rows.has(step) for step in range(4)] == [False, True, True, False]
    JsonRows(path, COLUMNS).keep_until(2)
    assert path.read_text() == first + second
    JsonRows(path, COLUMNS).keep_until(1)
    assert path.read_text() == first


@pytest.mark.parametrize(
    "torn", ['{"optimizer_step": 3', '{"optimizer_step": 3}', "[3]\n", "3\n", '{"loss": 1}\n', "\0\n"]
)
def test_a_torn_line_of_json_is_dropped(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = JsonRows(path, COLUMNS)
    rows.add({"optimizer_step": "1", "loss": "2.5"})
    whole = path.read_text()
    path.write_text(whole + torn + '{"optimizer_step": "x"}\n{"optimizer_step": 2, "loss": "high"}\n')
    JsonRows(path, COLUMNS).keep_until(100)
    assert path.read_text() == whole
