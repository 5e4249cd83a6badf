"""Sealed folders: whole or absent, damage is found, the older one is used, nothing starts afresh in silence."""

import logging
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sd_training.checkpoint.folder import (
    DOWNLOAD,
    MANIFEST_NAME,
    acquire_run_lock,
    begin_partial,
    discard_checkpoint,
    last_saved_step,
    newest_verified,
    read_manifest,
    remove_leftovers,
    seal_partial,
    sealed_checkpoints,
    source_checkpoint,
    step_of,
    verify_checkpoint,
)
from sd_training.errors import CheckpointError, ConfigError
from tests.checkpoints import write_sealed

CONTENT = {"weights.bin": bytes(range(256)) * 40, "state.json": b'{"a": 1}', "more.bin": b"x" * 1000}


def fill(folder: Path) -> None:
    for name, content in CONTENT.items():
        (folder / name).write_bytes(content)


def write_steps(root: Path, *steps: int) -> list[Path]:
    return [write_sealed(root, step, fill, {"step": step}) for step in steps]


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_a_sealed_folder_holds_what_was_written(root: Path) -> None:
    folder = write_sealed(root, 12, fill, {"world_size": 4, "nested": {"a": [1.5, None]}})
    assert names(root) == ["step=12"] and folder == root / "step=12"
    assert {name: (folder / name).read_bytes() for name in CONTENT} == CONTENT
    assert verify_checkpoint(folder) == [] and newest_verified(root) == folder
    assert read_manifest(folder).info == {"world_size": 4, "nested": {"a": [1.5, None]}}


def test_no_checkpoint_is_not_an_error(root: Path) -> None:
    assert newest_verified(root) is None and sealed_checkpoints(root) == [] and remove_leftovers(root) == []


def test_order_is_by_number(root: Path) -> None:
    write_steps(root, 900, 1000, 99)
    (root / "step=5000").write_text("a file")
    (root / "step=x").mkdir()
    (root / "step=7.partial").mkdir()
    assert [folder.name for folder in sealed_checkpoints(root)] == ["step=99", "step=900", "step=1000"]
    assert newest_verified(root) == root / "step=1000"


def test_a_verified_checkpoint_of_the_same_step_is_kept(root: Path) -> None:
    (folder,) = write_steps(root, 3)
    assert write_sealed(root, 3, lambda _: pytest.fail("must not write"), {}) == folder
    assert read_manifest(folder).info == {"step": 3}


def test_a_damaged_checkpoint_of_the_same_step_is_set_aside(root: Path) -> None:
    (folder,) = write_steps(root, 3)
    (folder / "weights.bin").write_bytes(b"")
    assert verify_checkpoint(write_steps(root, 3)[0]) == []
    assert names(root) == ["step=3", "step=3.damaged"]


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def link(path: Path) -> None:
    path.rename(path.with_suffix(".moved"))
    path.symlink_to(path.with_suffix(".moved").name)


DAMAGES = [flip_bit, truncate, empty, Path.unlink, link]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda d: d.__name__)
@pytest.mark.parametrize("name", [*CONTENT, MANIFEST_NAME])
def test_damage_is_found_and_the_older_one_is_used(
    root: Path, name: str, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    older, newest = write_steps(root, 1, 2)
    damage(newest / name)
    (problem,) = verify_checkpoint(newest)
    assert name in problem
    with caplog.at_level(logging.ERROR), listening_to_the_log():
        assert newest_verified(root) == older
    assert names(root) == ["step=1", "step=2.damaged"]
    assert problem in caplog.text


@contextmanager
def listening_to_the_log() -> Iterator[None]:
    """The package's logger does not hand its lines to the root logger, where pytest listens."""
    logger = logging.getLogger("sd_training")
    logger.propagate = True
    try:
        yield
    finally:
        logger.propagate = False


def test_all_damaged_is_refused_and_stays_refused(root: Path) -> None:
    for folder in write_steps(root, 1, 2):
        truncate(folder / "weights.bin")
    for _ in range(2):
        with pytest.raises(CheckpointError) as error:
            newest_verified(root)
        for word in (str(root), "step=1", "step=2", "weights.bin has 10,239 bytes", "take another experiment.name"):
            assert word in str(error.value)
        assert names(root) == ["step=1", "step=2"]


def test_only_set_aside_ones_left_is_refused(root: Path) -> None:
    _, newest = write_steps(root, 1, 2)
    empty(newest / "state.json")
    discard_checkpoint(newest_verified(root) or root)
    with pytest.raises(CheckpointError, match=r"step=2\.damaged: set aside earlier"):
        newest_verified(root)


def test_leftovers_are_no_finished_checkpoints(root: Path) -> None:
    for name in ("step=2.partial", "step=3.deleting"):
        (root / name).mkdir(parents=True)
    assert newest_verified(root) is None
    (root / "step=2.partial").rename(root / "step=2.damaged-2")
    with pytest.raises(CheckpointError):
        newest_verified(root)


def test_a_second_damaged_one_of_a_step_replaces_the_first(root: Path) -> None:
    write_steps(root, 1)
    for _ in range(3):
        empty(write_steps(root, 2)[0] / "state.json")
        newest_verified(root)
    assert names(root) == ["step=1", "step=2.damaged"]


def test_a_half_written_newest_is_ignored_and_swept(root: Path) -> None:
    (good,) = write_steps(root, 1)
    for name in ("step=2.partial", "step=3.deleting"):
        (root / name).mkdir()
        fill(root / name)
    (root / "notes.partial").mkdir()
    assert newest_verified(root) == good
    assert [path.name for path in remove_leftovers(root)] == ["step=2.partial", "step=3.deleting"]
    assert names(root) == ["notes.partial", "step=1"]


def test_a_folder_under_another_step_is_refused(root: Path) -> None:
    (folder,) = write_steps(root, 1)
    folder.rename(root / "step=9")
    assert verify_checkpoint(root / "step=9") == ["MANIFEST.json belongs to step 1"]


@pytest.mark.parametrize(("umask", "folder_mode", "file_mode"), [(0o002, 0o775, 0o664), (0o077, 0o700, 0o600)])
def test_every_file_follows_the_umask(root: Path, umask: int, folder_mode: int, file_mode: int) -> None:
    before = os.umask(umask)
    try:
        (folder,) = write_steps(root, 1)
    finally:
        os.umask(before)
    for path in [root, folder, *folder.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (folder_mode if path.is_dir() else file_mode), path


@pytest.mark.parametrize("name", ["last.ckpt", "step=", "step=1.partial", "step=-1", "step=1x"])
def test_step_of_refuses_other_names(name: str) -> None:
    with pytest.raises(ValueError, match="step=N"):
        step_of(Path("checkpoints") / name)


def test_a_step_that_is_not_kept_is_named_with_those_that_are(root: Path) -> None:
    write_steps(root, 5, 10)
    with pytest.raises(ConfigError, match=r"step=7 is no folder; there are the steps 5, 10 \(checkpoint\.keep\)"):
        source_checkpoint(root / "step=7")


def test_a_checkpoint_is_found_without_torch(root: Path) -> None:
    write_steps(root, 7)
    program = (
        "import sys, pathlib; from sd_training.checkpoint import folder; "
        "print(folder.newest_verified(pathlib.Path(sys.argv[1]))); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program, str(root)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(root / "step=7")


def test_no_checkpoint_is_ever_without_the_record_of_a_save(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run whose checkpoints were deleted is not taken for a new one; one that was killed in its first save is."""
    root.mkdir(parents=True)
    run_lock = acquire_run_lock(root.parent)

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("sd_training.checkpoint.folder.os.rename", killed)
    with pytest.raises(KeyboardInterrupt):
        write_sealed(root, 2, fill, {}, run_lock)
    monkeypatch.undo()
    assert (root.parent / "saved_step").read_text() == "2\n" and last_saved_step(root.parent) is None
    remove_leftovers(root)
    assert last_saved_step(root.parent) is None and not (root.parent / "saved_step").exists()
    for step in (2, 4):
        write_sealed(root, step, fill, {}, run_lock)
    begin_partial(root, 6, run_lock)
    begin_partial(root, 4, kind=DOWNLOAD)  # of the mirror's copy: the run has saved this step all the same
    shutil.rmtree(root / "step=4")
    begin_partial(root, 4, kind=DOWNLOAD)
    assert last_saved_step(root.parent) == "4"
    shutil.rmtree(root)
    remove_leftovers(root)
    assert last_saved_step(root.parent) == "4"
    (root.parent / "saved_step").write_bytes(b"\xff")  # damaged, but there
    assert last_saved_step(root.parent) is not None


def test_a_save_that_cannot_get_its_name_is_no_save(root: Path) -> None:
    root.mkdir(parents=True)
    run_lock = acquire_run_lock(root.parent)
    for before, step in ((None, 2), ("4", 6)):
        partial = begin_partial(root, step, run_lock)
        assert partial is not None
        fill(partial)
        (root / f"step={step}" / "in the way").mkdir(parents=True)
        with pytest.raises(OSError, match="not empty"):
            seal_partial(partial, {}, run_lock)
        shutil.rmtree(partial)
        assert last_saved_step(root.parent) == before
        write_sealed(root, 4, fill, {}, run_lock)
