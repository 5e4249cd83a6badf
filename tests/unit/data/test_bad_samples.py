import json
from pathlib import Path

import pytest

from sd_training.data.bad_samples import MIN_READ, BadSampleLog
from sd_training.data.problems import SkippedSample
from sd_training.errors import DataError


def problem(key: int, reason: str = "image cannot be decoded: x") -> SkippedSample:
    return SkippedSample("a.tar", str(key), reason)


def lines(run_dir: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (run_dir / "bad_samples.jsonl").read_text().splitlines()]


def test_each_sample_is_named_once_also_after_a_restart(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    log = BadSampleLog(run_dir, 1.0)
    log.count(3, [problem(1), problem(1), problem(2)])
    with (run_dir / "bad_samples.jsonl").open("a") as file:
        file.write('{"cut off by a cra\n')
    BadSampleLog(run_dir, 1.0).count(3, [problem(2), problem(3)])
    text = (run_dir / "bad_samples.jsonl").read_text().replace('{"cut off by a cra\n', "")
    named = [json.loads(line) for line in text.splitlines()]
    assert named == [{"shard": "a.tar", "key": key, "reason": "image cannot be decoded: x"} for key in "123"]
    assert log.problems.counts == {"image cannot be decoded": 3}


def test_nothing_is_written_without_problems(tmp_path: Path) -> None:
    BadSampleLog(tmp_path / "run", 0.0).count(10_000, [])
    assert not (tmp_path / "run").exists()


def test_too_large_a_share_stops_the_run(tmp_path: Path) -> None:
    log = BadSampleLog(tmp_path, 0.01)
    log.count(MIN_READ - 20, [problem(i) for i in range(19)])
    with pytest.raises(
        DataError, match=r"21 of 1,001 samples.*max_bad_fraction \(0\.01\).*image cannot be decoded 21"
    ) as e:
        log.count(0, [problem(20), problem(21)])
    assert str(tmp_path / "bad_samples.jsonl") in str(e.value)
    assert len(lines(tmp_path)) == 21


def test_a_share_within_the_limit_goes_on() -> None:
    log = BadSampleLog(None, 0.02)
    for i in range(100):
        log.count(99, [problem(i)])
    assert (log.num_read, log.problems.total()) == (10_000, 100)
