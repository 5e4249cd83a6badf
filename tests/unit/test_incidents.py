"""Incident files hold hostile text and impossible numbers as short, printable JSON, and never end the run."""

import json
import logging
import math
from pathlib import Path

import pytest

from sd_training import log as sd_log
from sd_training.log import incident_path, write_incident
from tests.file_size_limit import file_size_limit


def test_everything_becomes_printable_json(tmp_path: Path) -> None:
    hostile = "a\x1b[2Jb\nc\u202e"
    facts = {"samples": [{hostile: hostile}], "numbers": (-math.inf, 1.5, True, None)}
    write_incident(tmp_path, "skipped", 3, loss=math.nan, path=Path("a"), **facts)
    text = incident_path(tmp_path, 3, "skipped").read_text()
    assert all(line.isprintable() for line in text.split("\n"))

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    written = json.loads(text, parse_constant=refuse)
    ((key, value),) = written["samples"][0].items()
    assert key == value and value == hostile
    assert (written["loss"], written["kind"]) == ("nan", "skipped")
    assert written["numbers"] == ["-inf", 1.5, True, None] and written["path"] == "a"
    assert written["optimizer_step"] == 3 and written["time_unix_s"] > 1_600_000_000


def test_no_secret_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = 'canary"\\\u00fc1'  # JSON writes it otherwise
    monkeypatch.setenv("SOME_PASSWORD", secret)
    write_incident(tmp_path, "save", 3, **{secret: [f"x {secret}", "https://u:canary@h/x?sig=canary"]})
    text = incident_path(tmp_path, 3, "save").read_text()
    assert "canary" not in text and json.loads(text)["(hidden)"] == ["x (hidden)", "https://h/x?(hidden)"]


def test_endless_incidents_do_not_fill_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sd_log, "MAX_INCIDENTS", 3)
    for step in (0, 1, 2, 3, 4, 2):
        write_incident(tmp_path, "skipped", step)
    assert sorted(p.name for p in (tmp_path / "incidents").iterdir()) == [f"step={i}.skipped.json" for i in range(3)]


def test_a_full_disk_is_logged_and_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR), file_size_limit(0):
        write_incident(tmp_path, "save", 3)
    assert str(incident_path(tmp_path, 3, "save")) in caplog.text
    (tmp_path / "file").write_text("no folder")
    write_incident(tmp_path / "file", "save", 3)
