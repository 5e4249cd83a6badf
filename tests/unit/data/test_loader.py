import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sd_training.data.loader import BadSampleLog
from sd_training.data.sources.base import SkippedSample
from sd_training.errors import DataError


def make_log(run_dir: Path | None = None, max_bad_fraction: float = 1.0) -> BadSampleLog:
    return BadSampleLog(run_dir, max_bad_fraction)


def problem(key: int, reason: str = "image cannot be decoded: x", shard: str = "a.tar") -> SkippedSample:
    return SkippedSample(shard, str(key), reason)


def lines(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "bad_samples.jsonl").read_text().splitlines()]


def test_each_sample_is_named_once_also_after_a_restart(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    log = make_log(run_dir)
    log.count(3, [problem(1), problem(1), problem(2)])
    with (run_dir / "bad_samples.jsonl").open("a") as file:
        file.write('{"cut off by a cra')
    restarted = make_log(run_dir)
    restarted.count(3, [problem(2)])
    restarted.count(3, [problem(2), problem(3)])
    text = (run_dir / "bad_samples.jsonl").read_text().replace('{"cut off by a cra\n', "")
    named = [json.loads(line) for line in text.splitlines()]
    assert [(entry["shard"], entry["key"], entry["reason"]) for entry in named] == [
        ("a.tar", key, "image cannot be decoded: x") for key in "123"
    ]
    assert all(entry["time"] > 1.7e9 for entry in named)
    assert log.problems.counts == {"image cannot be decoded": 2}


def test_each_process_names_a_sample_once(tmp_path: Path) -> None:
    first, second = make_log(tmp_path), make_log(tmp_path)
    first.count(1, [problem(1)])
    second.count(1, [problem(2), problem(1)])  # the first one had named 1 before
    first.count(1, [problem(2), problem(3)])
    second.count(1, [problem(3), problem(4)])
    assert [line["key"] for line in lines(tmp_path)] == ["1", "2", "2", "3", "3", "4"]
    assert first.problems.total() == 3 and second.problems.total() == 4  # each still counts what it read itself


def test_no_secret_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_SERVICE_PASSWORD", "canary-1")
    shard = "pipe:curl https://u:canary-2@h/a.tar canary-1"
    for _ in range(2):  # the second start knows what the first one named
        log = make_log(tmp_path)
        log.count(3, [problem(1, "canary-1", shard), problem(1, "canary-1", shard)])
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
    log.count(1, [problem(1)])
    assert "bad_samples.jsonl cannot be written" in caplog.text
    with pytest.raises(DataError) as error:
        log.count(1, [problem(2)])
    assert "bad_samples.jsonl" not in str(error.value)


def test_the_limit_is_the_number_that_is_said() -> None:
    """0.00007 * 100,000 is a little less than 7 in floating point."""
    log = make_log(max_bad_fraction=0.00007)
    log.count(100, [problem(i) for i in range(7)])
    with pytest.raises(DataError, match="allows 7 of 100,000"):
        log.count(1, [problem(7)])


def test_nothing_is_written_without_problems(tmp_path: Path) -> None:
    make_log(tmp_path / "run", max_bad_fraction=0.0).count(10_000, [])
    assert not (tmp_path / "run").exists()


def test_too_large_a_share_of_the_window_stops_the_run(tmp_path: Path) -> None:
    """0.0001 of 100,000 are 10, also when fewer have been read."""
    log = make_log(tmp_path, max_bad_fraction=0.0001)
    log.count(979, [problem(i) for i in range(10)])
    with pytest.raises(DataError, match=r"11 of the last 1,001 samples.*max_bad_fraction=0\.0001 allows 10 of 100,000"):
        log.count(11, [problem(10)])
    assert len(lines(tmp_path)) == 11


def test_the_window_moves_on() -> None:
    log = make_log(max_bad_fraction=0.0001)
    for i in range(300):
        log.count(9_999, [problem(i)])
    assert log.num_read == 3_000_000


def test_one_bad_sample_of_a_small_data_set_is_visited_for_ever() -> None:
    log = make_log(max_bad_fraction=0.0001)
    for _ in range(1_000):
        log.count(20, [problem(1)])
    assert log.problems.total() == 1
