"""Saves in the background: the same bytes, failures told, nothing in flight at the end."""

import hashlib
import threading
from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch

from sd_training.callbacks.base import OptimizerStepCallback
from sd_training.callbacks.save import STEP_FILE_VARIABLE
from sd_training.checkpoint import save as saving
from sd_training.checkpoint.folder import sealed_checkpoints, verify_checkpoint
from sd_training.checkpoint.save import WEIGHTS
from sd_training.errors import SaveError
from sd_training.training import TrainedModule
from tests.integration.failing_saves import FullDisk
from tests.integration.test_failed_saves import incidents, no_limit_afterwards, train_with  # noqa: F401 - a fixture
from tests.integration.training import checkpoint_tensors, options, train

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


class SlowToWrite(OptimizerStepCallback):
    """Weights and average are changed by the next steps before the background has read its copies."""

    def __init__(self, step_file: Path) -> None:
        self.was_busy = False
        self.gate = threading.Event()
        self.step_file = step_file
        self.told: list[str] = []
        """What a launcher knows of the saves after each step."""

    def slow(self, write: Callable[..., None]) -> Callable[..., None]:
        """The write waits for the gate; it begins in the thread, when the next step may have been taken."""

        def waiting(folder: Path, part: str, *arguments: Any) -> None:
            if part == WEIGHTS:  # the first one
                self.gate.wait(60)
                self.gate.clear()
            write(folder, part, *arguments)

        return waiting

    def on_optimizer_step(self, trainer: pl.Trainer, module: TrainedModule, step: int) -> None:
        saves: Any = next(c for c in trainer.callbacks if type(c).__name__ == "Save")  # type: ignore[attr-defined]
        self.was_busy |= saves.pending is not None
        self.told.append(self.step_file.read_text().strip() if self.step_file.exists() else "-")
        if step in (7, trainer.max_steps):
            self.gate.set()


class FullAfterASave(FullDisk):
    """The disk becomes full once the save before is done."""

    def on_optimizer_step(self, trainer: pl.Trainer, module: TrainedModule, step: int) -> None:
        saves: Any = next(c for c in trainer.callbacks if type(c).__name__ == "Save")  # type: ignore[attr-defined]
        if saves.pending is not None:
            wait([saves.pending])
        super().on_optimizer_step(trainer, module, step)


def files(folder: Path) -> dict[str, str]:
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in paths}


def test_the_same_bytes_as_without(
    pipeline_dir: Path, shards_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"experiment__save_every": 4, "checkpoint__keep": 3}
    train(options(tmp_path / "one", pipeline_dir, shards_dir, **changes))

    class Opened(SlowToWrite):
        """Lets the last save through, which the run waits for."""

        def on_before_optimizer_step(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == 7:
                threading.Timer(1, self.gate.set).start()

    monkeypatch.setenv(STEP_FILE_VARIABLE, str(tmp_path / "step"))
    slow = Opened(tmp_path / "step")
    monkeypatch.setattr(saving, "write_tensors", slow.slow(saving.write_tensors))
    train(options(tmp_path / "other", pipeline_dir, shards_dir, checkpoint__asynchronous=True, **changes), slow)
    assert slow.was_busy and slow.told[:7] == ["-"] * 7  # step 4 is not sealed before step 7
    assert (tmp_path / "step").read_text() == "8\n"
    for step in (4, 8):
        one, other = (checkpoint_tensors(tmp_path / name, step) for name in ("one", "other"))
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
        assert verify_checkpoint(tmp_path / "other" / "checkpoints" / f"step={step}") == []
    one, other = (files(tmp_path / name / "current_pipeline") for name in ("one", "other"))
    assert one == other
    assert (tmp_path / "other" / "exported_step").read_text() == "8\n"


def test_a_failure_in_the_background_is_told_at_the_next_save(
    pipeline_dir: Path, shards_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = options(tmp_path / "run", pipeline_dir, shards_dir, experiment__save_every=2, checkpoint__asynchronous=True)
    monkeypatch.setenv(STEP_FILE_VARIABLE, str(tmp_path / "step"))
    told: list[str] = []

    class Watched(FullAfterASave):
        def on_optimizer_step(self, *arguments: Any) -> None:
            super().on_optimizer_step(*arguments)
            told.append((tmp_path / "step").read_text().strip() if arguments[-1] > 3 else "-")

    train_with(Watched(4, 5), argv)
    assert told == ["-", "-", "-", "2", "2", "2", "6", "6"]  # as it stood before each step
    assert [incident["optimizer_step"] for incident in incidents(tmp_path / "run")] == [4]
    assert [folder.name for folder in sealed_checkpoints(tmp_path / "run" / "checkpoints")] == ["step=6", "step=8"]
    assert not list((tmp_path / "run").rglob("*.partial*"))
    with pytest.raises(SaveError, match="the last save of this run"):
        train_with(FullDisk(10, 10), [*argv, "experiment.num_examples_to_see=80"])
