import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sd_training.config.data_schema import DatasetParams
from sd_training.data.loader import BadSampleLog
from sd_training.data.problems import SkippedSample
from sd_training.errors import DataError


def make_log(run_dir: Path | None = None, shard_size: int = 10**6, **limits: Any) -> BadSampleLog:
    """Limits that are never reached, but for those that a test gives."""
    far = {"max_bad_fraction": 1.0, "max_bad_in_row": 10**6, "max_bad_shard_fraction": 1.0}
    return BadSampleLog(run_dir, DatasetParams(path="x", **{**far, **limits}), lambda shard: shard_size)


def problem(key: int, reason: str = "image cannot be decoded: x", shard: str = "a.tar") -> SkippedSample:
    return SkippedSample(shard, str(key), reason)


def lines(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "bad_samples.jsonl").read_text().splitlines()]


def test_each_sample_is_named_once_also_after_a_restart(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    log = make_log(run_dir)
    log.count([True] * 3, [problem(1), problem(1), problem(2)])
    with (run_dir / "bad_samples.jsonl").open("a") as file:
        file.write('{"cut off by a cra')
    restarted = make_log(run_dir)
    restarted.count([True] * 3, [problem(2)])
    restarted.count([True] * 3, [problem(2), problem(3)])
    text = (run_dir / "bad_samples.jsonl").read_text().replace('{"cut off by a cra\n', "")
    named = [json.loads(line) for line in text.splitlines()]
    assert [(entry["shard"], entry["key"], entry["reason"]) for entry in named] == [
        ("a.tar", key, "image cannot be decoded: x") for key in "123"
    ]
    assert all(entry["time"] > 1.7e9 for entry in named)
    assert log.problems.counts == {"image cannot be decoded": 2}


def test_each_process_names_a_sample_once(tmp_path: Path) -> None:
    first, second = make_log(tmp_path), make_log(tmp_path)
    first.count([True], [problem(1)])
    second.count([True], [problem(2), problem(1)])  # the first one had named 1 before
    first.count([True], [problem(2), problem(3)])
    second.count([True], [problem(3), problem(4)])
    assert [line["key"] for line in lines(tmp_path)] == ["1", "2", "2", "3", "3", "4"]
    assert first.problems.total() == 3 and second.problems.total() == 4  # each still counts what it read itself


def test_no_secret_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_SERVICE_PASSWORD", "canary-1")
    shard = "pipe:curl https://u:canary-2@h/a.tar canary-1"
    for _ in range(2):  # the second start knows what the first one named
        log = make_log(tmp_path)
        log.count([True] * 3, [problem(1, "canary-1", shard), problem(1, "canary-1", shard)])
    (line,) = lines(tmp_path)
    hidden = "pipe:curl https://h/a.tar (hidden)"
    assert (line["shard"], line["key"], line["reason"]) == (hidden, "1", "(hidden)")


def test_processes_that_write_at_once(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from tests.unit.data.test_loader import make_log, problem\n"
        "log = make_log(Path(sys.argv[1])); print('ready', flush=True); sys.stdin.readline()\n"
        "for i in range(500): log.name(problem(i))"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    processes = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    assert [process.wait(600) for process in processes] == [0, 0, 0]
    assert {line["key"] for line in lines(tmp_path)} == {str(i) for i in range(500)}  # and every line is whole


def test_a_file_that_cannot_be_written_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "run").write_text("a file, where the folder should be")
    log = make_log(tmp_path / "run", max_bad_fraction=0.00001)
    log.count([True], [problem(1)])
    assert "bad_samples.jsonl cannot be written" in caplog.text
    with pytest.raises(DataError) as error:
        log.count([True], [problem(2)])
    assert "bad_samples.jsonl" not in str(error.value)


def test_the_limit_is_the_number_that_is_said() -> None:
    """0.00007 * 100,000 is a little less than 7 in floating point."""
    log = make_log(max_bad_fraction=0.00007)
    log.count([True] * 100, [problem(i) for i in range(7)])
    with pytest.raises(DataError, match="allows 7 of 100,000"):
        log.count([True], [problem(7)])


def test_nothing_is_written_without_problems(tmp_path: Path) -> None:
    make_log(tmp_path / "run", max_bad_fraction=0.0).count([True] * 10_000, [])
    assert not (tmp_path / "run").exists()


def test_too_large_a_share_of_the_window_stops_the_run(tmp_path: Path) -> None:
    """0.0001 of 100,000 are 10, also when fewer have been read."""
    log = make_log(tmp_path, max_bad_fraction=0.0001)
    log.count([True] * 979, [problem(i) for i in range(10)])
    with pytest.raises(DataError, match=r"11 of the last 1,001 samples.*max_bad_fraction=0\.0001 allows 10 of 100,000"):
        log.count([True] * 11, [problem(10)])
    assert len(lines(tmp_path)) == 11


def test_the_window_moves_on() -> None:
    log = make_log(max_bad_fraction=0.0001)
    for i in range(300):
        log.count([True] * 9_999, [problem(i)])
    assert log.num_read == 3_000_000


def test_one_bad_sample_of_a_small_data_set_is_visited_for_ever() -> None:
    log = make_log(max_bad_fraction=0.0001, max_bad_in_row=3, max_bad_shard_fraction=0.01, shard_size=20)
    for _ in range(1_000):
        log.count([True] * 10 + [False] + [True] * 9, [problem(1)])
    assert log.problems.total() == 1


def test_many_in_a_row_stop_the_run_over_batches() -> None:
    log = make_log(max_bad_in_row=5)
    log.count([True, False, False], [problem(1), problem(2)])
    log.count([False, False], [problem(3), problem(4)])
    log.count([True, False], [problem(5)])
    log.count([False, False, False], [problem(i) for i in (6, 7, 8)])
    with pytest.raises(DataError, match=r"5 samples in a row.*max_bad_in_row=5"):
        log.count([False, True], [problem(9)])


def test_a_bad_shard_stops_the_run() -> None:
    log = make_log(max_bad_shard_fraction=0.2, shard_size=50)
    log.count([True] * 100, [problem(i, shard="b.tar") for i in range(10)])
    log.count([True] * 100, [problem(i, shard="c.tar") for i in range(9)])
    with pytest.raises(DataError, match=r"11 of the 50 samples of b\.tar.*max_bad_shard_fraction=0\.2"):
        log.count([True], [problem(10, shard="b.tar")])


def test_a_tiny_shard_does_not_end_the_run() -> None:
    log = make_log(max_bad_shard_fraction=0.2, shard_size=9)
    log.count([True], [problem(i) for i in range(9)])
