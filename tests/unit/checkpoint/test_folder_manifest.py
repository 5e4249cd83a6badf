"""The manifest notices every change of itself, and cannot point outside of its folder."""

import json
from pathlib import Path

import pytest

from sd_training.checkpoint.folder import (
    MANIFEST_NAME,
    FileRecord,
    Manifest,
    manifest_text,
    read_manifest,
    verify_checkpoint,
)
from tests.checkpoints import write_sealed


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sealed checkpoint with one file."""

    def fill(target: Path) -> None:
        (target / "weights.bin").write_bytes(b"weights")

    return write_sealed(tmp_path, 1, fill, {"world_size": 4})


def test_every_bit_of_the_manifest_counts(folder: Path) -> None:
    path = folder / MANIFEST_NAME
    whole = path.read_bytes()
    for position in range(len(whole)):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ (1 << position % 8)]) + whole[position + 1 :])
        assert verify_checkpoint(folder), f"byte {position}"


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "a/../../secret", "a/b", "..\\secret", "", ".", ".."])
def test_a_manifest_that_leaves_its_folder_is_refused(folder: Path, name: str) -> None:
    record = FileRecord(1, "0" * 64)
    (folder / MANIFEST_NAME).write_text(manifest_text(Manifest(1, {}, {name: record})))
    (problem,) = verify_checkpoint(folder)
    assert "outside of its folder" in problem


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        "null",
        "[]",
        "{}",
        '{"format": 2}',
        '{"format": 1, "step": true, "info": {}, "files": {"a": {"size": 1, "sha256": "x"}}}',
        '{"format": 1, "step": 1, "info": {}, "files": {}}',
        '{"format": 1, "step": 1, "info": {}, "files": {"a": 3}}',
        "9" * 10_000,
        "\ud800",
    ],
    ids=lambda text: text[:30].encode("unicode_escape").decode(),
)
def test_a_manifest_that_is_none_is_a_problem_not_a_crash(folder: Path, text: str) -> None:
    (folder / MANIFEST_NAME).write_bytes(text.encode("utf-8", "surrogatepass"))
    assert len(verify_checkpoint(folder)) == 1
    with pytest.raises(ValueError):
        read_manifest(folder)


def test_manifest_is_readable_json(folder: Path) -> None:
    listed = json.loads((folder / MANIFEST_NAME).read_text())["files"]
    assert {name: entry["size"] for name, entry in listed.items()} == {"weights.bin": 7}
