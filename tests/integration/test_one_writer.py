"""A run whose folder another start has taken: it ends at its next save, and publishes and deletes nothing."""

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl

from sd_training.callbacks import save
from sd_training.callbacks.base import OptimizerStepCallback
from sd_training.errors import TakenOverError
from sd_training.training import TrainedModule
from tests.integration.training import metrics, options, train
from tests.unit.checkpoint.test_folder_lock import elsewhere


class TakenOverAfter(OptimizerStepCallback):
    """Another machine starts the run again."""

    def __init__(self, run_dir: Path, step: int) -> None:
        self.run_dir, self.step = run_dir, step

    def on_optimizer_step(self, trainer: pl.Trainer, module: TrainedModule, step: int) -> None:
        if step == self.step:
            elsewhere(self.run_dir)


def test_a_run_that_was_taken_over_ends(pipeline_dir: Path, shards_dir: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    argv = options(run_dir, pipeline_dir, shards_dir, experiment__save_every=2)
    with pytest.raises(TakenOverError, match="has taken this run over"):
        train(argv, TakenOverAfter(run_dir, 5))
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == ["step=2", "step=4"]
    assert [row["optimizer_step"] for row in metrics(run_dir)] == ["1", "2", "3", "4", "5"]
    assert (run_dir / "exported_step").read_text() == "4\n" and not list(run_dir.glob("*.partial*"))
    assert train(argv).trainer.global_step == 8


def test_a_run_that_slept_after_an_export_notes_none(
    pipeline_dir: Path, shards_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its note would say that the pipeline of the new start is older than it is."""
    run_dir, export_pipeline = tmp_path / "run", save.export_pipeline

    def export_and_sleep(*given: Any) -> None:
        export_pipeline(*given)
        elsewhere(run_dir)

    monkeypatch.setattr(save, "export_pipeline", export_and_sleep)
    with pytest.raises(TakenOverError, match="has taken this run over"):
        train(options(run_dir, pipeline_dir, shards_dir))
    assert (run_dir / "current_pipeline").is_dir() and not (run_dir / "exported_step").exists()
