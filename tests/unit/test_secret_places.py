"""The search for secrets finds them: in files, in names of files, and in base64."""

from base64 import b64encode
from pathlib import Path

from scripts.campaign.secrets import places


def test_planted_secrets_are_found(tmp_path: Path) -> None:
    known = {"token": "f00dfeed" * 5}
    (tmp_path / "clean.txt").write_text("nothing")
    assert list(places(tmp_path, known)) == []
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "plain.bin").write_bytes(b"\0" + known["token"].encode() + b"\0")
    (tmp_path / "coded.txt").write_bytes(b64encode(known["token"].encode()))
    (tmp_path / f"{known['token']}.txt").touch()
    assert len(list(places(tmp_path, known))) == 3
