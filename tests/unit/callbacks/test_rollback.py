"""Which checkpoint a run goes back to."""

from pathlib import Path

import pytest

from sd_training.callbacks.numerics import Rollback, newest_before
from sd_training.checkpoint.folder import write_sealed

DONE = Rollback(at=40, to=10, first_bad=15, kind="skipped")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for step in (10, 20, 30, 40, 50):
        write_sealed(tmp_path, step, lambda folder: folder.joinpath("file").write_text("content"), {})
    return tmp_path


@pytest.mark.parametrize(
    ("before", "done", "expected"),
    [
        (45, [], 40),
        (40, [], 30),  # a checkpoint after 40 steps has the weights that step 40 found wrong
        (10, [], None),
        (41, [DONE], 40),
        (40, [DONE], 10),  # 20 and 30 were left behind
        (60, [DONE], 50),
    ],
)
def test_the_newest_that_is_older(root: Path, before: int, done: list[Rollback], expected: int | None) -> None:
    assert newest_before(root, before, done) == expected


def test_a_damaged_one_is_not_taken(root: Path) -> None:
    (root / "step=30" / "file").write_text("damaged")
    assert newest_before(root, 40, []) == 20
