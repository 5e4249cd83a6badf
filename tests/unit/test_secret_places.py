"""The search for secrets finds them: in files, in names of files, and in base64. It looks where there is something."""

import json
from base64 import b64encode
from pathlib import Path

import pytest

from tests.faults.secrets import places, said_by, untold


def test_planted_secrets_are_found(tmp_path: Path) -> None:
    known = {"token": "f00dfeed" * 5}
    (tmp_path / "clean.txt").write_text("nothing")
    assert list(places(tmp_path, known)) == []
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "plain.bin").write_bytes(b"\0" + known["token"].encode() + b"\0")
    (tmp_path / "coded.txt").write_bytes(b64encode(known["token"].encode()))
    (tmp_path / f"{known['token']}.txt").touch()
    assert len(list(places(tmp_path, known))) == 3


URL = "http://127.0.0.1:1234/00"


class TestUntold:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        """As a pair of processes leaves it that told everything."""
        for part in ("said", "defect/incidents"):
            (tmp_path / part).mkdir(parents=True)
        incident = {"samples": [{"shard": f"{URL}0.tar?(hidden)"}]}
        (tmp_path / "defect" / "incidents" / "step=2.skipped.json").write_text(json.dumps(incident))
        (tmp_path / "defect" / "first_failure.json").write_text(json.dumps({"rank": 1, "text": f"no {URL}0.tar"}))
        said_by(tmp_path, "defect", 1).write_text(f"Traceback (most recent call last)\nno {URL}0.tar")
        return tmp_path

    def test_nothing(self, folder: Path) -> None:
        assert not list(untold(folder, ["defect"], URL))

    def test_an_incident_of_something_else(self, folder: Path) -> None:
        (folder / "defect" / "incidents" / "step=2.skipped.json").write_text('{"samples": [{"shard": "(hidden)"}]}')
        (problem,) = untold(folder, ["defect"], URL)
        assert "none of 1 incidents" in problem

    def test_another_end(self, folder: Path) -> None:
        (folder / "defect" / "first_failure.json").write_text(json.dumps({"rank": 0, "text": f"no {URL}0.tar"}))
        (problem,) = untold(folder, ["defect"], URL)
        assert "of rank 0" in problem

    def test_nothing_left(self, folder: Path) -> None:
        (folder / "defect" / "first_failure.json").unlink()
        (folder / "defect" / "incidents" / "step=2.skipped.json").unlink()
        said_by(folder, "defect", 1).write_text("")
        assert len(list(untold(folder, ["defect"], URL))) == 3
