"""One writer per run folder: two starts on one machine, and a start on another one that the lock does not see."""

import errno
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sd_training.checkpoint.folder import (
    RunLock,
    _held_locks,
    acquire_run_lock,
    begin_partial,
    remove_leftovers,
    rotate,
    seal_partial,
    sealed_checkpoints,
)
from sd_training.errors import ConfigError, TakenOverError
from sd_training.export.pipeline import recover_exports
from tests.checkpoints import write_sealed

PROGRAM = (
    "import sys, pathlib; from sd_training.checkpoint import folder; "
    "folder.acquire_run_lock(pathlib.Path(sys.argv[1])); print('taken', flush=True); sys.stdin.read()"
)


def elsewhere(run_dir: Path) -> RunLock:
    """A start on another machine: it does not see the lock, and this process keeps thinking that it has it."""
    lock_of(run_dir).unlink()
    mine = dict(_held_locks)
    _held_locks.clear()
    run_lock = acquire_run_lock(run_dir)
    run_lock.release()
    _held_locks.update(mine)
    return run_lock


def lock_of(run_dir: Path) -> Path:
    (path,) = run_dir.glob("writer-*.lock")
    return path


def fill(folder: Path) -> None:
    (folder / "weights").write_bytes(b"w" * 1000)


def test_the_newest_start_owns_the_folder(tmp_path: Path) -> None:
    first = acquire_run_lock(tmp_path)
    first.check()
    second = elsewhere(tmp_path)
    second.check()
    with pytest.raises(TakenOverError, match=rf"start \(process {os.getpid()} on .*\) has taken this run over"):
        first.check()
    assert TakenOverError.exit_status == 69


@pytest.mark.parametrize("damage", ["", "{", "[1]", '{"token": "other"}', None])
def test_a_claim_that_is_not_ours_is_somebody_elses(tmp_path: Path, damage: str | None) -> None:
    run_lock = acquire_run_lock(tmp_path)
    path = tmp_path / "writer.json"
    path.unlink() if damage is None else path.write_text(damage)
    with pytest.raises(TakenOverError):
        run_lock.check()


def test_a_folder_that_cannot_be_read_is_nobody_elses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that fails for a moment costs a save, not the run."""
    run_lock = acquire_run_lock(tmp_path)

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "read_text", refused)
    with pytest.raises(PermissionError):
        run_lock.check()


def test_a_second_start_while_the_first_lives_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "taken\n"
        with pytest.raises(ConfigError, match=rf"start \(process {other.pid} on .*is still running"):
            acquire_run_lock(tmp_path)
        other.communicate()
    acquire_run_lock(tmp_path).check()  # its lock went with it


def test_a_lock_of_another_machine_refuses_nobody(tmp_path: Path) -> None:
    """On file systems whose locks span machines, one that was lost keeps its own."""
    lost = os.open(tmp_path / "writer-another-boot.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(lost, fcntl.LOCK_EX)
    run_lock = acquire_run_lock(tmp_path)
    run_lock.check()
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    refused = subprocess.run(command, input="", capture_output=True, text=True)
    assert f"start (process {os.getpid()} on " in refused.stderr and "is still running" in refused.stderr
    run_lock.release()
    assert subprocess.run(command, input="", capture_output=True, text=True).stdout == "taken\n"
    os.close(lost)


def test_a_file_system_without_locks_lets_the_later_start_have_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refused)
    first, second = acquire_run_lock(tmp_path), acquire_run_lock(tmp_path)
    second.check()
    with pytest.raises(TakenOverError):
        first.check()


def test_this_process_may_take_a_folder_again(tmp_path: Path) -> None:
    first, second = acquire_run_lock(tmp_path), acquire_run_lock(tmp_path)
    second.check()
    with pytest.raises(TakenOverError):
        first.check()


def test_released_means_free_for_others(tmp_path: Path) -> None:
    acquire_run_lock(tmp_path).release()
    handle = os.open(lock_of(tmp_path), os.O_RDWR)
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(handle)


def test_a_claim_says_who_made_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    first = acquire_run_lock(tmp_path)
    owner = json.loads((tmp_path / "writer.json").read_text())
    assert (owner["job_id"], owner["pid"]) == ("77", os.getpid())
    assert owner["host"] == os.uname().nodename
    elsewhere(tmp_path)
    with pytest.raises(TakenOverError, match="SLURM job 77"):
        first.check()


def test_a_former_start_publishes_and_deletes_nothing(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    old = acquire_run_lock(tmp_path)
    for step in (1, 2, 3):
        write_sealed(root, step, fill, {})
    half = begin_partial(root, 4, run_lock=old)
    assert half is not None and half.name == f"step=4.partial-{old.token}"
    fill(half)
    elsewhere(tmp_path)
    for act in (
        lambda: seal_partial(half, {}, old),
        lambda: begin_partial(root, 5, run_lock=old),
        lambda: rotate(root, 2, run_lock=old),
    ):
        with pytest.raises(TakenOverError):
            act()
    assert [folder.name for folder in sealed_checkpoints(root)] == ["step=1", "step=2", "step=3"]


def test_one_that_has_looked_already_finds_nothing_to_publish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped between its check of the lock and the rename: the start after it has removed the folder."""
    root = tmp_path / "checkpoints"
    old = acquire_run_lock(tmp_path)
    half = begin_partial(root, 4, run_lock=old)
    assert half is not None
    fill(half)
    look, looks = RunLock.check, []

    def stopped_after_it(run_lock: RunLock) -> None:
        look(run_lock)
        if not looks:
            looks.append(run_lock)
            elsewhere(tmp_path)
            remove_leftovers(root)

    monkeypatch.setattr(RunLock, "check", stopped_after_it)
    with pytest.raises(TakenOverError):
        seal_partial(half, {}, old)
    assert list(root.iterdir()) == []


def test_half_written_exports_of_all_starts_are_removed(tmp_path: Path) -> None:
    for name in ("current_pipeline.partial-3", "current_pipeline.partial", "pipelines/step_4.partial-12"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "pipelines" / "step_2").mkdir()
    recover_exports(tmp_path)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["pipelines", "step_2"]
