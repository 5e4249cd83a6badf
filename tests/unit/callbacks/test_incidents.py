"""Incident files hold hostile text and impossible numbers as short, printable JSON, and never cost the run."""

import json
import math
from pathlib import Path

import pytest

from sd_training.callbacks import incidents
from sd_training.callbacks.incidents import MAX_ITEMS, MAX_TEXT, Incidents, plain


def test_everything_becomes_printable_json(tmp_path: Path) -> None:
    hostile = "a\x1b[2Jb\nc\u202e" + "x" * 10_000
    written = Incidents(tmp_path / "incidents", lambda: {"seed": 1})
    written.write(3, "skipped", {"loss": math.nan, "samples": [{hostile: hostile}], "all": list(range(5000))})
    text = written.path(3, "skipped").read_text()
    assert all(line.isprintable() for line in text.split("\n"))

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    told = json.loads(text, parse_constant=refuse)
    ((key, value),) = told["samples"][0].items()
    assert key == value and len(value) == MAX_TEXT and value.startswith("a\\u001b[2Jb\\nc\\u202e")
    assert (told["loss"], told["seed"], told["kind"], len(told["all"])) == ("nan", 1, "skipped", MAX_ITEMS)


@pytest.mark.parametrize(
    ("value", "expected"),
    [(math.inf, "inf"), (1.5, 1.5), (True, True), (None, None), ((1, -math.inf), [1, "-inf"]), (Path("a"), "a")],
)
def test_plain(value: object, expected: object) -> None:
    assert plain(value) == expected


def test_no_secret_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_PASSWORD", 'canary"1"')
    told = plain({'canary"1"': ['x canary"1"', "https://u:canary@h/x?sig=canary"], "token": "canary"})
    assert told == {"(hidden)": ["x (hidden)", "https://h/x?(hidden)"], "token": "(hidden)"}


def test_a_run_with_endless_trouble_fills_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incidents, "MAX_FILES", 3)
    for start in range(2):  # the second start counts the files of the first
        written = Incidents(tmp_path)
        for step in range(5):
            written.write(start * 10 + step, "skipped", {})
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"step={i}.skipped.json" for i in range(3)]


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "incidents").write_text("a file")
    Incidents(tmp_path / "incidents").write(0, "skipped", {})
