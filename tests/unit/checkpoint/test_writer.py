"""One writer per run folder: two starts on one machine, and a start on another one that the lock does not see."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sd_training.checkpoint import rotation, seal, writer
from sd_training.errors import ConfigError, TakenOverError
from sd_training.export.pipeline import recover_exports


def elsewhere(run_dir: Path) -> writer.Fence:
    """A start on another machine: it does not see the lock, and this process keeps thinking that it has it."""
    (run_dir / "writer.lock").unlink()
    mine = dict(writer._locks)
    writer._locks.clear()
    fence = writer.take(run_dir)
    fence.release()
    writer._locks.update(mine)
    return fence


def fill(folder: Path) -> None:
    (folder / "weights").write_bytes(b"w" * 1000)


def test_the_newest_start_owns_the_folder(tmp_path: Path) -> None:
    first = writer.take(tmp_path)
    first.check()
    second = elsewhere(tmp_path)
    second.check()
    assert (first.number, second.number) == (1, 2) and os.listdir(tmp_path / "writers") == ["2.json"]
    with pytest.raises(TakenOverError, match=rf"start 2 \(process {os.getpid()} on .*\) has taken this run over from"):
        first.check()
    assert TakenOverError.exit_status == 69


@pytest.mark.parametrize("damage", ["", "{", "[1]", '{"token": "other"}', None])
def test_a_claim_that_is_not_ours_is_somebody_elses(tmp_path: Path, damage: str | None) -> None:
    fence = writer.take(tmp_path)
    path = tmp_path / "writers" / "1.json"
    path.unlink() if damage is None else path.write_text(damage)
    with pytest.raises(TakenOverError):
        fence.check()


def test_a_second_start_while_the_first_lives_is_refused(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib; from sd_training.checkpoint import writer; "
        "writer.take(pathlib.Path(sys.argv[1])); print('taken', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "taken\n"
        with pytest.raises(ConfigError, match=rf"start 1 \(process {other.pid} on .*still lives"):
            writer.take(tmp_path)
        other.communicate()
    assert writer.take(tmp_path).number == 2  # its lock went with it


def test_this_process_may_take_a_folder_again(tmp_path: Path) -> None:
    first, second = writer.take(tmp_path), writer.take(tmp_path)
    second.check()
    with pytest.raises(TakenOverError):
        first.check()


def test_released_means_free_for_others(tmp_path: Path) -> None:
    writer.take(tmp_path).release()
    handle = os.open(tmp_path / "writer.lock", os.O_RDWR)
    writer.fcntl.flock(handle, writer.fcntl.LOCK_EX | writer.fcntl.LOCK_NB)
    os.close(handle)


def test_a_claim_says_who_made_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "3")
    first = writer.take(tmp_path)
    owner = json.loads((tmp_path / "writers" / "1.json").read_text())
    assert (owner["job_id"], owner["restart_count"], owner["pid"]) == ("77", "3", os.getpid())
    elsewhere(tmp_path)
    with pytest.raises(TakenOverError, match="SLURM job 77"):
        first.check()


def test_a_former_start_publishes_and_deletes_nothing(tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    old = writer.take(tmp_path)
    for step in (1, 2, 3):
        seal.write_sealed(root, step, fill, {})
    half = seal.begin(root, 4, fence=old)
    assert half is not None and half.name == "step=4.partial-1"
    fill(half)
    elsewhere(tmp_path)
    for act in (
        lambda: seal.finish(half, {}, old),
        lambda: seal.begin(root, 5, fence=old),
        lambda: rotation.rotate(root, 2, fence=old),
    ):
        with pytest.raises(TakenOverError):
            act()
    assert [folder.name for folder in seal.sealed(root)] == ["step=1", "step=2", "step=3"]


def test_one_that_has_looked_already_finds_nothing_to_publish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped between its look at the fence and the rename: the start after it swept the folder."""
    root = tmp_path / "checkpoints"
    old = writer.take(tmp_path)
    half = seal.begin(root, 4, fence=old)
    assert half is not None
    fill(half)
    look, looks = writer.Fence.check, []

    def stopped_after_it(fence: writer.Fence) -> None:
        look(fence)
        if not looks:
            looks.append(fence)
            elsewhere(tmp_path)
            seal.sweep(root)

    monkeypatch.setattr(writer.Fence, "check", stopped_after_it)
    with pytest.raises(FileNotFoundError):
        seal.finish(half, {}, old)
    assert list(root.iterdir()) == []


def test_half_written_exports_of_all_starts_are_removed(tmp_path: Path) -> None:
    for name in ("current_pipeline.partial-3", "current_pipeline.partial", "pipelines/step_4.partial-12"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "pipelines" / "step_2").mkdir()
    recover_exports(tmp_path)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["pipelines", "step_2"]
