import json
import logging
from pathlib import Path

import pytest

from sd_training.incidents import note_incident
from tests.file_size_limit import file_size_limit


def test_a_line_for_each(tmp_path: Path) -> None:
    note_incident(tmp_path, "one thing", 3, how="so")
    note_incident(tmp_path, "another", 4)
    lines = [json.loads(line) for line in (tmp_path / "incidents.jsonl").read_text().splitlines()]
    assert [(line["kind"], line["optimizer_step"], line.get("how")) for line in lines] == [
        ("one thing", 3, "so"),
        ("another", 4, None),
    ]
    assert all(line["time_unix_s"] > 1_600_000_000 for line in lines)


def test_secrets_that_json_writes_otherwise_are_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = 'canary"\\\u00fc'
    monkeypatch.setenv("SOME_PASSWORD", secret)
    note_incident(tmp_path, "one thing", 3, why=f"no {secret} here", seen=[secret], token="canary")
    text = (tmp_path / "incidents.jsonl").read_text()
    line = json.loads(text)
    assert "canary" not in text
    assert (line["why"], line["seen"], line["token"]) == ("no (hidden) here", ["(hidden)"], "(hidden)")


def test_a_full_disk_is_told_and_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR), file_size_limit(0):
        note_incident(tmp_path, "one thing", 3)
    assert "one thing" in caplog.text and str(tmp_path / "incidents.jsonl") in caplog.text
