"""One writer per run folder: two starts on one machine, and a start on another one that the lock does not see."""

import errno
import fcntl
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from sd_training.checkpoint import run_lock as writer
from sd_training.checkpoint.folder import (
    begin_partial,
    remove_leftovers,
    rotate,
    seal_partial,
    sealed_checkpoints,
)
from sd_training.checkpoint.run_lock import RunLock, _held_locks, acquire_run_lock
from sd_training.errors import ConfigError, TakenOverError
from sd_training.export.pipeline import recover_exports
from tests.checkpoints import write_sealed

PROGRAM = (
    "import sys, pathlib; from sd_training.checkpoint import run_lock; "
    "run_lock.acquire_run_lock(pathlib.Path(sys.argv[1])); print('taken', flush=True); sys.stdin.read()"
)


def elsewhere(run_dir: Path) -> RunLock:
    """A start on another machine: it does not see the lock, and this process keeps thinking that it has it."""
    (run_dir / "writer.lock").unlink()
    mine = dict(_held_locks)
    _held_locks.clear()
    run_lock = acquire_run_lock(run_dir)
    run_lock.release()
    _held_locks.update(mine)
    return run_lock


def fill(folder: Path) -> None:
    (folder / "weights").write_bytes(b"w" * 1000)


def test_the_newest_start_owns_the_folder(tmp_path: Path) -> None:
    first = acquire_run_lock(tmp_path)
    first.check()
    second = elsewhere(tmp_path)
    second.check()
    assert (first.number, second.number) == (1, 2) and os.listdir(tmp_path / "writers") == ["2.json"]
    with pytest.raises(TakenOverError, match=rf"start 2 \(process {os.getpid()} on .*\) has taken this run over from"):
        first.check()
    assert TakenOverError.exit_status == 69


@pytest.mark.parametrize("damage", ["", "{", "[1]", '{"token": "other"}', None])
def test_a_claim_that_is_not_ours_is_somebody_elses(tmp_path: Path, damage: str | None) -> None:
    run_lock = acquire_run_lock(tmp_path)
    path = tmp_path / "writers" / "1.json"
    path.unlink() if damage is None else path.write_text(damage)
    with pytest.raises(TakenOverError):
        run_lock.check()


def test_a_folder_that_cannot_be_read_is_nobody_elses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that fails for a moment costs a save, not the run."""
    run_lock = acquire_run_lock(tmp_path)

    def refused(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "listdir", refused)
    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(PermissionError):
        run_lock.check()


def test_a_second_start_while_the_first_lives_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "taken\n"
        with pytest.raises(ConfigError, match=rf"start 1 \(process {other.pid} on .*still lives"):
            acquire_run_lock(tmp_path)
        other.communicate()
    assert acquire_run_lock(tmp_path).number == 2  # its lock went with it


def held(run_dir: Path, **owner: str) -> int:
    """A lock that this machine sees, as on file systems whose locks span machines, and the claim beside it."""
    (run_dir / "writers").mkdir(parents=True)
    (run_dir / "writers" / "1.json").write_text(json.dumps({"token": "x", "pid": 17, "job_id": "5", **owner}))
    handle = os.open(run_dir / "writer.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(handle, fcntl.LOCK_EX)
    return handle


HERE = {"host": socket.gethostname(), "boot_id": Path("/proc/sys/kernel/random/boot_id").read_text().strip()}
ELSEWHERE = {"host": "node-that-is-lost", "boot_id": "another"}


@pytest.mark.parametrize(
    "owner",
    [ELSEWHERE, ELSEWHERE | {"host": HERE["host"]}],
    ids=["other boot", "the same name"],
)
def test_a_lock_of_another_machine_refuses_nobody(owner: dict[str, str], tmp_path: Path) -> None:
    lost = held(tmp_path, **owner)
    run_lock = acquire_run_lock(tmp_path)
    run_lock.check()
    assert run_lock.number == 2 and sorted(os.listdir(tmp_path)) == ["start.lock", "writer.lock", "writers"]
    assert os.listdir(tmp_path / "writers") == ["2.json"]
    # From now on the lock is this start's: another one on this machine is refused while it lives, and only then.
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    refused = subprocess.run(command, input="", capture_output=True, text=True)
    assert f"start 2 (process {os.getpid()} on " in refused.stderr and "still lives" in refused.stderr
    run_lock.release()
    assert subprocess.run(command, input="", capture_output=True, text=True).stdout == "taken\n"
    os.close(lost)


@pytest.mark.parametrize(
    "owner",
    [HERE, {"host": HERE["host"]}, HERE | {"host": "name-of-a-container"}, {}],
    ids=["this boot", "older file", "container", "no machine"],
)
def test_a_lock_of_this_machine_refuses(owner: dict[str, str], tmp_path: Path) -> None:
    lock = held(tmp_path, **owner)
    with pytest.raises(ConfigError, match=r"start 1 .*SLURM job 5.* still lives"):
        acquire_run_lock(tmp_path)
    assert os.listdir(tmp_path / "writers") == ["1.json"]
    os.close(lock)


@pytest.mark.parametrize("is_held", [True, False])
def test_of_starts_at_once_one_takes_over_from_a_lost_machine(is_held: bool, tmp_path: Path) -> None:
    folders = [tmp_path / str(number) for number in range(40)]
    locks = [held(folder, **ELSEWHERE) for folder in folders]
    if not is_held:
        while locks:
            os.close(locks.pop())
    program = (
        "import sys, pathlib; from sd_training.checkpoint import run_lock; print('ready', flush=True); input()\n"
        "for folder in sys.argv[1:]:\n"
        "    try: run_lock.acquire_run_lock(pathlib.Path(folder)); print(folder)\n"
        "    except run_lock.ConfigError: pass\n"
        "print('.', flush=True); input()"
    )
    command = [sys.executable, "-c", program, *map(str, folders)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    starts = [subprocess.Popen(command, text=True, **pipes) for _ in range(3)]  # type: ignore[call-overload]
    for start in starts:
        assert start.stdout.readline() == "ready\n"
    for start in starts:
        start.stdin.write("\n")
        start.stdin.flush()
    taken = [line.strip() for start in starts for line in iter(start.stdout.readline, ".\n")]
    assert sorted(taken) == sorted(map(str, folders))
    for start in starts:
        start.communicate("\n")
    for lock in locks:
        os.close(lock)


def test_this_process_may_take_a_folder_again(tmp_path: Path) -> None:
    first, second = acquire_run_lock(tmp_path), acquire_run_lock(tmp_path)
    second.check()
    with pytest.raises(TakenOverError):
        first.check()


def test_released_means_free_for_others(tmp_path: Path) -> None:
    acquire_run_lock(tmp_path).release()
    handle = os.open(tmp_path / "writer.lock", os.O_RDWR)
    writer.fcntl.flock(handle, writer.fcntl.LOCK_EX | writer.fcntl.LOCK_NB)
    os.close(handle)


def test_a_claim_says_who_made_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    first = acquire_run_lock(tmp_path)
    owner = json.loads((tmp_path / "writers" / "1.json").read_text())
    assert (owner["job_id"], owner["pid"]) == ("77", os.getpid())
    assert HERE.items() <= owner.items()
    elsewhere(tmp_path)
    with pytest.raises(TakenOverError, match="SLURM job 77"):
        first.check()


def test_a_former_start_publishes_and_deletes_nothing(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    old = acquire_run_lock(tmp_path)
    for step in (1, 2, 3):
        write_sealed(root, step, fill, {})
    half = begin_partial(root, 4, run_lock=old)
    assert half is not None and half.name == "step=4.partial-1"
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
    """Stopped between its look at the run_lock and the rename: the start after it swept the folder."""
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
    with pytest.raises(FileNotFoundError):
        seal_partial(half, {}, old)
    assert list(root.iterdir()) == []


def test_half_written_exports_of_all_starts_are_removed(tmp_path: Path) -> None:
    for name in ("current_pipeline.partial-3", "current_pipeline.partial", "pipelines/step_4.partial-12"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "pipelines" / "step_2").mkdir()
    recover_exports(tmp_path)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["pipelines", "step_2"]
