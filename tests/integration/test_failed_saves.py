"""A save that fails does not end the run; the one after it, with space again, saves everything."""

import json
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sd_training.build.run import Run
from sd_training.callbacks.save import STEP_FILE_VARIABLE
from sd_training.checkpoint.folder import newest_verified, verify_checkpoint
from sd_training.errors import SaveError
from sd_training.export.pipeline import load_pipeline
from tests.integration.failing_saves import FullDisk
from tests.integration.training import metrics, options, prepare, train_in_processes

# TensorBoard's writing thread ends with the error that the run survives.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


@pytest.fixture(autouse=True)
def no_limit_afterwards() -> Iterator[None]:
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def train_with(full: FullDisk, argv: list[str]) -> Run:
    run = prepare(argv)
    run.trainer.callbacks.insert(0, full)  # type: ignore[attr-defined]
    run.trainer.fit(run.module, datamodule=run.data)
    return run


def incidents(run_dir: Path) -> list[dict[str, Any]]:
    """By step; the name of a file begins with it."""
    return [json.loads(path.read_text()) for path in sorted((run_dir / "incidents").glob("step=*.json"))]


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def test_a_full_disk_is_survived(
    pipeline_dir: Path, shards_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, told = tmp_path / "run", tmp_path / "step"
    monkeypatch.setenv(STEP_FILE_VARIABLE, str(told))
    kept: list[bytes] = []

    class Watched(FullDisk):
        def on_optimizer_step(self, *arguments: Any) -> None:
            super().on_optimizer_step(*arguments)
            if arguments[-1] == 5:  # right after the failed save of step 4
                assert names(run_dir) == ["step=2"] and verify_checkpoint(run_dir / "checkpoints" / "step=2") == []
                assert not list(run_dir.glob("*.partial*")) and load_pipeline(run_dir / "current_pipeline")
                kept.append((run_dir / "exported_step").read_bytes())
            if arguments[-1] == 6:
                kept.append(told.read_bytes())

    changes = {"checkpoint__max_failed_saves": 2, "sampling__every": 2, "sampling__prompts": "[a]"}
    changes |= {"sampling__num_inference_steps": 1}
    train_with(Watched(4, 5), options(run_dir, pipeline_dir, shards_dir, experiment__save_every=2, **changes))
    assert kept == [b"2\n", b"2\n"] and told.read_bytes() == b"8\n"
    assert names(run_dir) == ["step=6", "step=8"] and (run_dir / "exported_step").read_bytes() == b"8\n"
    (incident,) = incidents(run_dir)
    assert incident["optimizer_step"] == 4 and "File too large" in incident["cause"]
    assert [int(row["optimizer_step"]) for row in metrics(run_dir)] == list(range(1, 9))


def test_an_export_that_fails_leaves_the_one_before(pipeline_dir: Path, shards_dir: Path, tmp_path: Path) -> None:
    """The disk fills up after the checkpoint."""
    run_dir = tmp_path / "run"
    run = prepare(options(run_dir, pipeline_dir, shards_dir, experiment__save_every=2))
    saves = next(c for c in run.trainer.callbacks if type(c).__name__ == "Save")  # type: ignore[attr-defined]
    exported, disk = saves.make_export, FullDisk(0, 0)

    def full_for_the_second(weights: Any) -> Any:
        disk.first, disk.last = (4, 4) if run.trainer.global_step == 4 else (0, 0)
        disk.on_optimizer_step(run.trainer, run.module, run.trainer.global_step)  # type: ignore[arg-type]
        return exported(weights)

    saves.make_export = full_for_the_second
    run.trainer.callbacks.insert(0, disk)  # type: ignore[attr-defined]
    run.trainer.fit(run.module, datamodule=run.data)
    (incident,) = incidents(run_dir)
    assert incident["cause"].startswith(f"[Errno 27] pipeline could not be written to {run_dir / 'current_pipeline'}")
    assert names(run_dir) == ["step=6", "step=8"] and (run_dir / "exported_step").read_bytes() == b"8\n"


@pytest.mark.parametrize(
    ("full", "most", "text"), [((3, 99), 2, "2 saves in a row failed"), ((8, 8), 9, "the last save of this run")]
)
def test_too_many_or_the_last_one_end_the_run(
    pipeline_dir: Path, shards_dir: Path, tmp_path: Path, full: tuple[int, int], most: int, text: str
) -> None:
    argv = options(
        tmp_path / "run", pipeline_dir, shards_dir, experiment__save_every=2, checkpoint__max_failed_saves=most
    )
    with pytest.raises(SaveError, match=text):
        train_with(FullDisk(*full), argv)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    newest = newest_verified(tmp_path / "run" / "checkpoints")
    assert newest is not None and newest.name == ("step=2" if most == 2 else "step=6")
    assert names(tmp_path / "run") == (["step=2"] if most == 2 else ["step=4", "step=6"])


def test_one_of_two_processes_cannot_write(pipeline_dir: Path, shards_dir: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    changes = {"system__batch_size": 4, "checkpoint__max_failed_saves": 2}
    argv = ["1", "4", "5", *options(run_dir, pipeline_dir, shards_dir, experiment__save_every=2, **changes)]
    output = train_in_processes(argv, 2, "tests.integration.failing_saves")
    assert "save of step 4 failed (1 in a row)" in output
    assert names(run_dir) == ["step=6", "step=8"]
    assert [line["optimizer_step"] for line in incidents(run_dir)] == [4]
