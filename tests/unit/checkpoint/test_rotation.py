"""What rotation leaves: always two that verify, and whatever is damaged."""

from pathlib import Path

from sd_training.checkpoint.retention import discard_checkpoint, rotate
from tests.unit.checkpoint.test_seal import empty, flip_bit, names, write_steps


def test_rotation_deletes_the_oldest_and_never_leaves_fewer_than_two(root: Path) -> None:
    write_steps(root, 1, 2, 3, 4, 5)
    assert [path.name for path in rotate(root, 3)] == ["step=2", "step=1"]
    assert names(root) == ["step=3", "step=4", "step=5"]
    rotate(root, 0)
    assert names(root) == ["step=4", "step=5"]


def test_damaged_checkpoints_do_not_count_as_kept(root: Path) -> None:
    folders = write_steps(root, 1, 2, 3, 4)
    flip_bit(folders[2] / "weights.bin")
    rotate(root, 2, trusted=[folders[3]])
    assert names(root) == ["step=2", "step=3", "step=4"]


def test_old_damaged_ones_are_not_deleted(root: Path) -> None:
    folders = write_steps(root, 1, 2, 3)
    empty(folders[0] / "weights.bin")
    assert rotate(root, 2) == []


def test_discard_removes_a_folder_and_an_absent_one_is_fine(root: Path) -> None:
    (folder,) = write_steps(root, 1)
    discard_checkpoint(folder)
    discard_checkpoint(folder)
    assert names(root) == []
