"""The loss on held-out pictures: the same triples each time, training is not touched, checkpoints are chosen by it."""

import csv
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch

from sd_training.checkpoint.folder import read_manifest, sealed_checkpoints, step_of
from sd_training.errors import EXIT_STOPPED, DataError
from tests import makers
from tests.integration.spoiled_held_out import empty
from tests.integration.training import (
    AtStep,
    CrashAfter,
    Interrupted,
    checkpoint_tensors,
    losses,
    options,
    prepare,
    train,
    train_in_processes,
)

EVERY = {"validation__every": 4, "validation__num_samples": 12, "validation__num_levels": 2}


@pytest.fixture(scope="module")
def held_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Other pictures than those that are trained on."""
    return makers.caption_shards(tmp_path_factory.mktemp("held_out"))


def rows(run_dir: Path) -> list[dict[str, str]]:
    with (run_dir / "validation.csv").open(newline="") as stream:
        return list(csv.DictReader(stream))


def means(run_dir: Path, weights: str) -> dict[int, float]:
    """Optimizer step → loss over all noise levels."""
    chosen = [row for row in rows(run_dir) if (row["weights"], row["quantile"]) == (weights, "all")]
    return {int(row["optimizer_step"]): float(row["loss"]) for row in chosen}


def test_training_is_the_same_to_the_bit_and_other_seeds_are_measured_alike(
    pipeline_dir: Path, shards_dir: Path, held_out: Path, tmp_path: Path
) -> None:
    for name, changes in {
        "without": {},
        "with": {"validation__path": held_out, **EVERY},
        "other": {"validation__path": held_out, **EVERY, "experiment__seed": 7, "objective__input_perturbation": 0.1},
    }.items():
        train(options(tmp_path / name, pipeline_dir, shards_dir, **changes))
    plain, measured = (checkpoint_tensors(tmp_path / name, 8) for name in ("without", "with"))
    assert all(torch.equal(plain[name], measured[name]) for name in plain)
    assert losses(tmp_path / "with") == losses(tmp_path / "without")
    found = means(tmp_path / "with", "trained")
    assert list(found) == [0, 4, 8] and found[8] < found[4] < found[0]
    average = means(tmp_path / "with", "average")
    assert average[0] == found[0] and found[8] < average[8] < found[0]
    other = means(tmp_path / "other", "trained")
    assert other[0] == found[0] and other[8] != found[8]
    levels = [row for row in rows(tmp_path / "with") if row["quantile"] != "all"]
    assert {(row["quantile"], row["timestep"], row["samples"]) for row in levels} == {
        ("0.25", "250", "12"),
        ("0.75", "750", "12"),
    }


@pytest.mark.parametrize("micro_batches", [1, 6], ids=["before the first save", "later"])
def test_a_killed_run_has_each_row_once_and_the_same(
    pipeline_dir: Path, shards_dir: Path, held_out: Path, tmp_path: Path, micro_batches: int
) -> None:
    changes = {"validation__path": held_out, **EVERY, "experiment__save_every": 2, "validation__every": 1}
    train(options(tmp_path / "whole", pipeline_dir, shards_dir, **changes))
    with pytest.raises(Interrupted):
        train(options(tmp_path / "killed", pipeline_dir, shards_dir, **changes), CrashAfter(micro_batches))
    train(options(tmp_path / "killed", pipeline_dir, shards_dir, **changes))
    assert rows(tmp_path / "killed") == rows(tmp_path / "whole")


class SignalAfter(pl.Callback):
    """A signal after this optimizer step, which the step itself has no part in."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(("step", "status"), [(4, EXIT_STOPPED), (8, 0)])
def test_a_run_that_is_asked_to_stop_while_it_is_measured_stops_there_and_is_measured_when_it_goes_on(
    step: int, status: int, pipeline_dir: Path, shards_dir: Path, held_out: Path, tmp_path: Path
) -> None:
    changes = {"validation__path": held_out, **EVERY, "experiment__save_every": 100}
    train(options(tmp_path / "whole", pipeline_dir, shards_dir, **changes))
    argv = options(tmp_path / "run", pipeline_dir, shards_dir, **changes)
    run = prepare(argv)
    run.trainer.callbacks.insert(1, SignalAfter(step))  # type: ignore[attr-defined]  # after signals are looked at
    run.trainer.fit(run.module, datamodule=run.data)
    assert (run.exit_status, run.trainer.global_step) == (status, step)
    assert str(step) not in {row["optimizer_step"] for row in rows(tmp_path / "run")}
    train(argv)
    assert rows(tmp_path / "run") == rows(tmp_path / "whole")


@pytest.mark.parametrize("processes", [1, 2])
def test_held_out_data_that_goes_away_costs_no_step(
    processes: int, pipeline_dir: Path, shards_dir: Path, held_out: Path, tmp_path: Path
) -> None:
    gone = shutil.copytree(held_out, tmp_path / "gone")
    changes = {"validation__path": gone, **EVERY, "experiment__save_every": 100}
    changes |= {"system__batch_size": 8 // processes, "trainer__accelerator": "cpu"}
    argv = options(tmp_path / "run", pipeline_dir, shards_dir, **changes)
    if processes == 1:
        with pytest.raises(DataError, match=r"validation\.path"):
            train(argv, AtStep(3, lambda: empty(gone)))
    else:
        words = [str(gone), *argv]
        said = train_in_processes(words, processes, "tests.integration.spoiled_held_out", status=1)
        assert said.count("error: validation.path") == 1
    assert [folder.name for folder in sealed_checkpoints(tmp_path / "run" / "checkpoints")] == ["step=4"]


def test_the_best_by_it_stay(pipeline_dir: Path, shards_dir: Path, held_out: Path, tmp_path: Path) -> None:
    changes = {"experiment__save_every": 1, "checkpoint__keep_best": 1}
    # So high a rate that the loss rises again.
    changes |= {"optimizer__params__learning_rate": 0.3, "model__use_ema": False}
    changes |= {"validation__every": 1, "validation__path": held_out}
    train(options(tmp_path / "run", pipeline_dir, shards_dir, **(EVERY | changes)))
    found = means(tmp_path / "run", "trained")
    best = min((step for step in found if step), key=lambda step: found[step])
    kept = [step_of(folder) for folder in sealed_checkpoints(tmp_path / "run" / "checkpoints")]
    assert kept == sorted({best, 7, 8})
    assert read_manifest(tmp_path / "run" / "checkpoints" / "step=8").info["validation_loss"] == pytest.approx(found[8])


def test_an_autoencoder_has_no_noise_levels(
    pipeline_dir: Path, shards_dir: Path, held_out: Path, tmp_path: Path
) -> None:
    changes = {"model__train": "vae", "validation__path": held_out, "validation__num_samples": 12}
    train(options(tmp_path / "run", pipeline_dir, shards_dir, validation__every=4, **changes))
    assert [
        (row["optimizer_step"], row["weights"], row["quantile"], row["timestep"]) for row in rows(tmp_path / "run")
    ] == [(step, weights, "all", "") for step in ("0", "4", "8") for weights in ("trained", "average")]
