"""Copies of checkpoints: whole or not there, compared when they come back, never a reason to lose what is local."""

import os
import shutil
from pathlib import Path
from typing import Any

import obstore
import pytest

from sd_training.checkpoint.folder import NO_LOCK, acquire_run_lock, discard_checkpoint, verify_checkpoint
from sd_training.checkpoint.mirror import _MAX_MANIFEST_BYTES, Mirror
from sd_training.errors import ConfigError, DamagedCheckpointsError, TakenOverError
from tests.checkpoints import write_sealed
from tests.unit.checkpoint.test_folder import CONTENT, fill, listening_to_the_log


@pytest.fixture
def mirror(tmp_path: Path) -> Mirror:
    return Mirror(f"file://{tmp_path}/store", "run")


def sent(mirror: Mirror, root: Path, *steps: int, milestone: int = 0) -> None:
    for step in steps:
        mirror.send(write_sealed(root, step, fill, {"is_milestone": step == milestone}), NO_LOCK)


def copy_of(mirror: Mirror, step: int) -> Path:
    return Path(mirror.root.removeprefix("file://")) / f"step={step}"


def test_what_is_sent_comes_back_as_it_was(mirror: Mirror, root: Path) -> None:
    assert mirror.steps() == [] and mirror.restore(root, NO_LOCK) is None
    sent(mirror, root, 2, 4)
    assert mirror.steps() == [2, 4] and mirror.restore(root, NO_LOCK) is None  # nothing that is not here
    shutil.rmtree(root)
    assert mirror.restore(root, NO_LOCK) == root / "step=4"
    assert verify_checkpoint(root / "step=4") == [] and [path.name for path in root.iterdir()] == ["step=4"]
    assert (root / "step=4" / "more.bin").read_bytes() == CONTENT["more.bin"]


def test_sending_a_new_copy_needs_no_right_to_delete(
    mirror: Mirror, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise PermissionError("AccessDenied")

    monkeypatch.setattr(obstore, "delete", refused)
    sent(mirror, root, 2)
    assert mirror.steps() == [2]


def test_a_copy_without_its_manifest_is_none(mirror: Mirror, root: Path) -> None:
    """As a process that is killed while it sends leaves it."""
    sent(mirror, root, 2, 4)
    (copy_of(mirror, 4) / "MANIFEST.json").unlink()
    assert mirror.steps() == [2]
    sent(mirror, root, 4)
    assert mirror.steps() == [2, 4]


@pytest.mark.parametrize("name", ["weights.bin", "more.bin", "MANIFEST.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "grow"])
def test_a_damaged_copy_is_not_used(name: str, damage: str, mirror: Mirror, root: Path) -> None:
    sent(mirror, root, 2, 4)
    path = copy_of(mirror, 4) / name
    content = path.read_bytes()
    changed = {"flip": bytes([content[0] ^ 1]) + content[1:], "cut": content[:-1], "grow": content + b" "}
    path.unlink() if damage == "remove" else path.write_bytes(changed[damage])
    shutil.rmtree(root)
    assert mirror.restore(root, NO_LOCK) == root / "step=2"
    assert [path.name for path in root.iterdir()] == ["step=2"]


def test_no_whole_copy_is_refused_where_nothing_else_is_left(mirror: Mirror, root: Path) -> None:
    sent(mirror, root, 2)
    (copy_of(mirror, 2) / "weights.bin").write_bytes(b"")
    sent_again = write_sealed(root, 1, fill, {})
    assert (mirror.restore(root, NO_LOCK) is None and sent_again.is_dir()) or (root / "step=2").is_dir()
    shutil.rmtree(root)
    with pytest.raises(DamagedCheckpointsError, match="none of them can be used"):
        mirror.restore(root, NO_LOCK)


def test_a_copy_of_another_step_is_not_used(mirror: Mirror, root: Path) -> None:
    sent(mirror, root, 2)
    os.rename(copy_of(mirror, 2), copy_of(mirror, 9))
    shutil.rmtree(root)
    with pytest.raises(DamagedCheckpointsError):
        mirror.restore(root, NO_LOCK)


@pytest.mark.parametrize("name", ["step=²", "step=007", "step=", "step=1x", "step=-1", "step=" + "1" * 200])
def test_folders_of_others_are_none_of_its_own(name: str, mirror: Mirror, root: Path) -> None:
    sent(mirror, root, 2)
    copy_of(mirror, 2).with_name(name).mkdir()
    assert mirror.steps() == [2]


def test_it_is_rotated_like_the_run_folder(mirror: Mirror, root: Path) -> None:
    sent(mirror, root, 1, 2, 3, 4, 5, milestone=2)
    (copy_of(mirror, 3) / "MANIFEST.json").unlink()
    mirror.rotate(5, 4, 0, NO_LOCK)
    assert mirror.steps() == [1, 2, 4, 5] and not copy_of(mirror, 3).exists()  # a half sent one
    mirror.rotate(5, 0, 0, NO_LOCK)
    assert mirror.steps() == [2, 4, 5] and not copy_of(mirror, 1).exists()
    mirror.rotate(4, 2, 0, NO_LOCK)  # the run went back to step 3 and has done step 4 again
    assert mirror.steps() == [2, 4]


def test_what_is_there_is_not_sent_again(mirror: Mirror, root: Path) -> None:
    sent(mirror, root, 2)
    before = (copy_of(mirror, 2) / "weights.bin").stat().st_mtime_ns
    sent(mirror, root, 2)
    assert (copy_of(mirror, 2) / "weights.bin").stat().st_mtime_ns == before
    discard_checkpoint(root / "step=2")
    write_sealed(root, 2, fill, {"other": True})
    mirror.send(root / "step=2", NO_LOCK)
    assert (copy_of(mirror, 2) / "MANIFEST.json").read_bytes() == (root / "step=2" / "MANIFEST.json").read_bytes()


def test_a_damaged_newest_one_here_is_replaced_by_its_copy(mirror: Mirror, root: Path) -> None:
    sent(mirror, root, 2, 4)
    (root / "step=4" / "weights.bin").write_bytes(b"")
    assert mirror.restore(root, NO_LOCK) == root / "step=4" and verify_checkpoint(root / "step=4") == []
    assert sorted(path.name for path in root.iterdir()) == ["step=2", "step=4", "step=4.damaged"]


def test_a_mirror_that_cannot_be_asked_is_no_damaged_copy(
    mirror: Mirror, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent(mirror, root, 2)
    shutil.rmtree(root)

    get = obstore.get

    def unreachable(store: Any, path: str) -> Any:
        if path.endswith("MANIFEST.json"):
            return get(store, path)
        raise ConnectionResetError("reset")

    monkeypatch.setattr(obstore, "get", unreachable)
    with pytest.raises(ConfigError, match="reset"):
        mirror.restore(root, NO_LOCK)
    assert list(root.iterdir()) == []


def test_whoever_lost_the_run_publishes_and_deletes_nothing(mirror: Mirror, root: Path) -> None:
    sent(mirror, root, 1, 2, 3)
    old = acquire_run_lock(root.parent)
    acquire_run_lock(root.parent)
    folder = write_sealed(root, 4, fill, {})
    for act in (lambda: mirror.send(folder, old), lambda: mirror.rotate(3, 2, 0, old)):
        with pytest.raises(TakenOverError):
            act()
    assert mirror.steps() == [1, 2, 3]


def test_errors_name_the_option(tmp_path: Path, root: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"checkpoint\.mirror: .*/file/run/checkpoints"):
        Mirror(f"file://{tmp_path}/file", "run").send(write_sealed(root, 1, fill, {}), NO_LOCK)
    assert Mirror(f"file://{tmp_path}/none", "run").steps() == [] and not (tmp_path / "none").exists()


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def fill_anew(folder: Path) -> None:
    (folder / "weights.bin").write_bytes(b"new")


@pytest.mark.parametrize("has_other_copy", [True, False])
def test_whoever_lost_the_run_leaves_the_copy_of_its_successor(
    mirror: Mirror, root: Path, has_other_copy: bool
) -> None:
    folder = write_sealed(root, 4, fill, {})
    successor = write_sealed(root.parent / "other", 4, fill_anew, {})
    old = acquire_run_lock(root.parent)
    new = acquire_run_lock(root.parent)
    if has_other_copy:
        mirror.send(successor, new)
    before = contents(copy_of(mirror, 4))
    with pytest.raises(TakenOverError):
        mirror.send(folder, old)
    assert contents(copy_of(mirror, 4)) == before and bool(before) == has_other_copy


def damaged(mirror: Mirror, step: int, manifest_bytes: bytes) -> None:
    (copy_of(mirror, step) / "MANIFEST.json").write_bytes(manifest_bytes)


def manifest_of(mirror: Mirror, step: int) -> bytes:
    return (copy_of(mirror, step) / "MANIFEST.json").read_bytes()


@pytest.mark.parametrize("damage", ["flip", "other format", "deep", "other step", "cut"])
def test_rotation_leaves_and_names_a_copy_that_it_cannot_read(
    damage: str, mirror: Mirror, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sent(mirror, root, 1, 2, 3, 4, 5, 6)
    own = manifest_of(mirror, 1)
    made = {
        "flip": own.replace(b"weights", b"weighty"),
        "other format": own.replace(b'"format": 1', b'"format": 2'),
        "deep": b'{"format": 1, "step": 1, "files": {}, "info": ' + b'{"a":' * 3000 + b"1" + b"}" * 3001,
        "other step": manifest_of(mirror, 2),
        "cut": own[:-5],
    }
    for step in (1, 6):  # older than the newest, and one that another program got further with
        damaged(mirror, step, made[damage])
    mirror.rotate(5, 2, 0, NO_LOCK)
    assert mirror.steps() == [1, 4, 5, 6] and (copy_of(mirror, 1) / "weights.bin").exists()
    assert sum(f"{mirror.root}/step=1 is left as it is" in message for message in caplog.messages) == 1


def test_rotation_never_deletes_the_newest(mirror: Mirror, root: Path) -> None:
    sent(mirror, root, 1, 2, 3)
    damaged(mirror, 3, b"")
    mirror.rotate(3, 2, 0, NO_LOCK)
    assert mirror.steps() == [1, 2, 3]


def test_a_manifest_that_vanishes_while_others_are_read_is_none(
    mirror: Mirror, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent(mirror, root, 1, 2, 3)
    copies = mirror._copies

    def vanishing() -> dict[int, list[str]]:
        found = copies()
        (copy_of(mirror, 2) / "MANIFEST.json").unlink(missing_ok=True)
        return found

    monkeypatch.setattr(mirror, "_copies", vanishing)
    mirror.rotate(3, 2, 0, NO_LOCK)
    assert mirror.steps() == [1, 3]


def test_a_huge_manifest_is_not_used(mirror: Mirror, root: Path) -> None:
    sent(mirror, root, 1, 2, 3)
    os.truncate(copy_of(mirror, 2) / "MANIFEST.json", _MAX_MANIFEST_BYTES + 1)
    mirror.rotate(3, 2, 0, NO_LOCK)
    assert mirror.steps() == [1, 2, 3]
    shutil.rmtree(root)
    (copy_of(mirror, 3) / "weights.bin").unlink()
    assert mirror.restore(root, NO_LOCK) == root / "step=1"
    sent(mirror, root, 2)
    assert manifest_of(mirror, 2) == (root / "step=2" / "MANIFEST.json").read_bytes()


def test_no_more_is_downloaded_than_was_sent(mirror: Mirror, root: Path, caplog: pytest.LogCaptureFixture) -> None:
    sent(mirror, root, 1, 2)
    shutil.rmtree(root)
    os.truncate(copy_of(mirror, 2) / "weights.bin", 2**40)
    with listening_to_the_log():
        assert mirror.restore(root, NO_LOCK) == root / "step=1"
    assert "step=2 cannot be used: weights.bin has 1,099,511,627,776 bytes, at most 10,240 belong there" in caplog.text
