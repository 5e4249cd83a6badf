"""What rotation leaves: milestones, the best, two that verify, and whatever is damaged."""

import os
from pathlib import Path

import pytest

from sd_training.checkpoint.folder import (
    discard_checkpoint,
    rotate,
    sealed_checkpoints,
)
from tests.checkpoints import write_sealed
from tests.unit.checkpoint.test_folder import empty, flip_bit, names, write_steps


def save(root: Path, step: int, loss: float | None = None, *, is_milestone: bool = False) -> Path:
    info = {"is_milestone": is_milestone, "validation_loss": loss}
    return write_sealed(root, step, lambda folder: (folder / "w").write_bytes(b"w") and None, info)


def rotated(root: Path, num_best: int) -> list[str]:
    rotate(root, 2, num_best)
    return [folder.name for folder in sealed_checkpoints(root)]


@pytest.mark.parametrize(
    ("num_best", "left"),
    [
        (0, ["step=2", "step=6", "step=7"]),
        (1, ["step=2", "step=3", "step=6", "step=7"]),
        (3, ["step=1", "step=2", "step=3", "step=6", "step=7"]),  # step 7 is one of the three
    ],
)
def test_what_is_left(tmp_path: Path, num_best: int, left: list[str]) -> None:
    for step, loss in enumerate([0.4, 0.9, 0.1, 0.8, None, 0.7, 0.3], start=1):
        save(tmp_path, step, loss, is_milestone=step == 2)
    assert rotated(tmp_path, num_best) == left


def test_without_losses_nothing_is_protected(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write_sealed(tmp_path, step, lambda folder: (folder / "w").write_bytes(b"w") and None, {})
    assert rotated(tmp_path, 2) == ["step=2", "step=3"]


def test_a_damaged_manifest_is_left_alone(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step, 1.0)
    os.truncate(tmp_path / "step=1" / "MANIFEST.json", 5)
    assert rotated(tmp_path, 0) == ["step=1", "step=3", "step=4"]


def test_the_one_resumed_from_stays_until_two_newer_ones_verify(tmp_path: Path) -> None:
    resumed, damaged = save(tmp_path, 1), save(tmp_path, 2)
    (damaged / "w").write_bytes(b"x")
    save(tmp_path, 3)
    assert "step=1" in rotated(tmp_path, 0)
    save(tmp_path, 4)
    assert rotated(tmp_path, 0) == ["step=3", "step=4"] and not resumed.exists()


def test_rotation_deletes_the_oldest_and_never_leaves_fewer_than_two(root: Path) -> None:
    write_steps(root, 1, 2, 3, 4, 5)
    rotate(root, 3)
    assert names(root) == ["step=3", "step=4", "step=5"]
    rotate(root, 0)
    assert names(root) == ["step=4", "step=5"]


def test_damaged_checkpoints_do_not_count_as_kept(root: Path) -> None:
    folders = write_steps(root, 1, 2, 3, 4)
    flip_bit(folders[2] / "weights.bin")
    rotate(root, 2, newest=folders[3])
    assert names(root) == ["step=2", "step=3", "step=4"]


def test_old_damaged_ones_are_not_deleted(root: Path) -> None:
    folders = write_steps(root, 1, 2, 3)
    empty(folders[0] / "weights.bin")
    rotate(root, 2)
    assert names(root) == ["step=1", "step=2", "step=3"]


def test_discard_removes_a_folder_and_an_absent_one_is_fine(root: Path) -> None:
    (folder,) = write_steps(root, 1)
    discard_checkpoint(folder)
    discard_checkpoint(folder)
    assert names(root) == []
