"""Checkpoints that were moved to another disk and linked back: they count, and what is there is never deleted."""

import os
from pathlib import Path

import pytest

from sd_training.checkpoint.folder import (
    MANIFEST_NAME,
    NO_LOCK,
    newest_verified,
    read_manifest,
    remove_leftovers,
    rotate,
    sealed_checkpoints,
    verify_checkpoint,
)
from sd_training.checkpoint.mirror import Mirror
from sd_training.errors import DamagedCheckpointsError
from tests.checkpoints import write_sealed
from tests.unit.checkpoint.test_folder import fill, link, names, truncate, write_steps


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    (tmp_path / "disk").mkdir()
    return tmp_path / "disk"


def moved(disk: Path, *folders: Path) -> None:
    for folder in folders:
        os.rename(folder, disk / folder.name)
        folder.symlink_to(disk / folder.name)


def test_links_are_checkpoints(root: Path, disk: Path) -> None:
    folders = write_steps(root, 1, 2)
    moved(disk, *folders)
    assert sealed_checkpoints(root) == folders
    assert newest_verified(root) == folders[1] and read_manifest(folders[1]).info == {"step": 2}
    assert write_sealed(root, 2, lambda _: pytest.fail("must not write"), {}) == folders[1]


def test_rotation_removes_the_link_alone(root: Path, disk: Path) -> None:
    folders = write_steps(root, 1, 2, 3, 4)
    moved(disk, *folders[:2])
    rotate(root, 2)
    assert names(root) == ["step=3", "step=4"]
    assert all(verify_checkpoint(disk / name) == [] for name in ("step=1", "step=2"))


def test_a_damaged_one_is_set_aside_as_a_link(root: Path, disk: Path) -> None:
    older, newest = write_steps(root, 1, 2)
    moved(disk, newest)
    truncate(disk / "step=2" / "weights.bin")
    assert newest_verified(root) == older
    assert (root / "step=2.damaged").is_symlink() and names(disk) == ["step=2"]


@pytest.mark.parametrize("name", ["weights.bin", MANIFEST_NAME])
def test_a_link_inside_stays_damage(root: Path, disk: Path, name: str) -> None:
    moved(disk, *write_steps(root, 1))
    link(disk / "step=1" / name)
    assert any(name in problem for problem in verify_checkpoint(root / "step=1"))


def test_links_that_lead_nowhere_are_no_fresh_start(root: Path, disk: Path) -> None:
    """The other disk is not there."""
    moved(disk, *write_steps(root, 1, 2))
    disk.rename(disk.with_name("elsewhere"))
    with pytest.raises(DamagedCheckpointsError, match=r"step=2: MANIFEST.json is missing"):
        newest_verified(root)
    assert names(root) == ["step=1", "step=2"]


def test_a_save_replaces_a_link_that_leads_nowhere(root: Path, disk: Path) -> None:
    for count in (1, 2, 3):
        moved(disk, *write_steps(root, 1))
        (disk / "step=1").rename(disk / f"{count}")
    assert verify_checkpoint(write_steps(root, 1)[0]) == []
    assert names(root) == ["step=1", "step=1.damaged"]


@pytest.mark.parametrize("is_there", [True, False])
def test_what_a_kill_left_of_a_link_is_swept(root: Path, disk: Path, is_there: bool) -> None:
    write_steps(root, 1)
    (disk / "kept").mkdir()
    fill(disk / "kept")
    for name in ("step=2.deleting", "step=3.partial"):
        (root / name).symlink_to(disk / ("kept" if is_there else "gone"))
    remove_leftovers(root)
    assert names(root) == ["step=1"] and (disk / "kept" / "weights.bin").is_file()


def test_a_copy_is_made_of_what_a_link_leads_to(root: Path, disk: Path, tmp_path: Path) -> None:
    mirror = Mirror(f"file://{tmp_path}/store", "run")
    moved(disk, *write_steps(root, 1))
    mirror.send(root / "step=1", NO_LOCK)
    assert verify_checkpoint(tmp_path / "store" / "run" / "checkpoints" / "step=1") == []
