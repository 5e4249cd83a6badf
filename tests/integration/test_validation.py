"""The loss on held-out pictures: the same triples each time, training is not touched, checkpoints are chosen by it."""

import csv
import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from scipy import stats
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from scripts import compare_checkpoints
from sd_training.build.data import make_data
from sd_training.build.models import build_model
from sd_training.checkpoint.folder import read_manifest, sealed_checkpoints, step_of
from sd_training.errors import EXIT_STOPPED, DataError, UserError
from tests import family_makers, makers
from tests.integration.commands import fails
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


@pytest.fixture(scope="module")
def measured_run(
    pipeline_dir: Path, shards_dir: Path, held_out: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    run_dir = tmp_path_factory.mktemp("measured") / "with"
    train(options(run_dir, pipeline_dir, shards_dir, validation__path=held_out, **EVERY))
    return run_dir


def test_training_is_the_same_to_the_bit_and_other_seeds_are_measured_alike(
    measured_run: Path, pipeline_dir: Path, shards_dir: Path, held_out: Path, tmp_path: Path
) -> None:
    for name, changes in {
        "without": {},
        "other": {"validation__path": held_out, **EVERY, "experiment__seed": 7, "objective__input_perturbation": 0.1},
    }.items():
        train(options(tmp_path / name, pipeline_dir, shards_dir, **changes))
    plain, measured = (checkpoint_tensors(run_dir, 8) for run_dir in (tmp_path / "without", measured_run))
    assert all(torch.equal(plain[name], measured[name]) for name in plain)
    assert losses(measured_run) == losses(tmp_path / "without")
    found = means(measured_run, "trained")
    assert list(found) == [0, 4, 8] and found[8] < found[4] < found[0]
    average = means(measured_run, "average")
    assert average[0] == found[0] and found[8] < average[8] < found[0]
    other = means(tmp_path / "other", "trained")
    assert other[0] == found[0] and other[8] != found[8]
    levels = [row for row in rows(measured_run) if row["quantile"] != "all"]
    assert {(row["quantile"], row["timestep"], row["samples"]) for row in levels} == {
        ("0.25", "250", "12"),
        ("0.75", "750", "12"),
    }


class Compared:
    """Rows of a comparison by level, and what was printed."""

    def __init__(self, capsys: pytest.CaptureFixture[str], path: Path, *words: str | Path) -> None:
        capsys.readouterr()
        compare_checkpoints.main([*map(str, words), "--json", str(path)])
        self.printed, document = capsys.readouterr().out, json.loads(path.read_text())
        self.verdict, self.rows = document["verdict"], {row["level"]: row for row in document["rows"]}
        assert f"verdict: {self.verdict} (12 images" in self.printed


def test_checkpoints_are_compared_by_the_losses_of_the_validation(
    measured_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, folder = tmp_path / "rows.json", measured_run / "checkpoints"
    found = Compared(capsys, path, folder / "step=4/weights", measured_run)
    recorded = {(row["optimizer_step"], row["weights"], row["quantile"]): row for row in rows(measured_run)}
    for level, quantile in {0: "0.25", 1: "0.75", "all": "all"}.items():
        row = found.rows[level]
        before, after = recorded["4", "trained", quantile], recorded["8", "average", quantile]
        assert [f"{row[f'loss_{letter}']:.9g}" for letter in "ab"] == [before["loss"], after["loss"]]
        assert row["timestep"] == (float(after["timestep"]) if after["timestep"] else None)
        assert row["low"] < row["difference"] < row["high"] < 0 and row["is_different"]
    assert found.verdict == "B has the lower loss"
    turned = Compared(capsys, path, folder / "step=8/ema", folder / "step=4/weights")
    assert all(row["difference"] == -found.rows[level]["difference"] for level, row in turned.rows.items())
    assert turned.verdict == "A has the lower loss"
    same = Compared(capsys, path, folder / "step=8", measured_run)
    assert {row["difference"] for row in same.rows.values()} == {0.0} and same.verdict == "no difference"
    assert {row["images_needed"] for row in same.rows.values()} == {None} and "above 1,000,000" in same.printed


def test_intervals_are_over_the_images(measured_run: Path) -> None:
    """A text with nine digits; the unit is an image, also in the mean over the levels."""
    weights = compare_checkpoints.open_weights(measured_run)
    plan = compare_checkpoints.plan_of(weights, [])
    trained = build_model(plan)
    data = make_data(plan, trained.family, trained.latent_grid).held_out
    assert data is not None
    losses, _ = compare_checkpoints.measure(plan, trained.module, weights, data)
    ruined = weights._replace(tensors={name: tensor * torch.nan for name, tensor in weights.tensors.items()})
    with pytest.raises(UserError, match=r"step=8/ema: the loss of 12 of 12 images is not finite"):
        compare_checkpoints.measure(plan, trained.module, ruined, data)
    events = EventAccumulator(str(measured_run / "tensorboard")).Reload()
    for level, quantile in {0: "0.25", 1: "0.75", "all": "all"}.items():
        own = losses.mean(axis=1) if level == "all" else losses[:, level]
        low, high = stats.ttest_1samp(own, 0.0).confidence_interval(0.95)
        (row,) = [r for r in rows(measured_run) if (*r.values(),)[:3] == ("8", "average", quantile)]
        assert [float(row["loss_low"]), float(row["loss_high"])] == pytest.approx([low, high], rel=1e-8)
        tag = "" if level == "all" else f"/level_{level}"
        for name in ("loss", "loss_low", "loss_high"):
            values = {event.step: event.value for event in events.Scalars(f"validation_{name}_average{tag}")}
            assert values.keys() == {0, 4, 8} and values[8] == np.float32(row[name])


def test_what_cannot_be_compared_is_one_sentence(
    measured_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main, newest = compare_checkpoints.main, measured_run / "checkpoints" / "step=8"
    assert "nowhere is neither a checkpoint" in fails(main, newest, tmp_path / "nowhere")
    assert "has no such weights, but ema, weights" in fails(main, newest / "ema-sigma_rel=0.050", newest)
    assert "validation.path: the run of A has no" in fails(main, newest, newest, "validation.path=null")
    other = f"model.pretrained={family_makers.save_pipeline('sdxl', tmp_path / 'other')}"
    assert "its weights do not fit the model of these options" in fails(main, newest, newest, other)
    assert "note: options of B that are changed to measure it: model.pretrained: " in capsys.readouterr().out
    alone = f"validation.path={makers.caption_shards(tmp_path / 'alone', shards=1, per_shard=1)}"
    assert "has one image" in fails(main, newest, newest, alone)
    weights = compare_checkpoints.open_weights(newest)
    plan = compare_checkpoints.plan_of(weights, [])
    state = weights.stored.state | {"trained_as": {"objective.prediction_type": "v_prediction"}}
    bare = weights._replace(stored=replace(weights.stored, state={}))
    with pytest.raises(UserError, match=r"step=8/ema: the checkpoint does not hold the options of its run"):
        compare_checkpoints.plan_of(bare, [])
    others = weights._replace(stored=replace(weights.stored, state=state))
    with pytest.raises(UserError, match=r"prediction_type: is epsilon in .* and v_prediction in .* cannot be compared"):
        compare_checkpoints.check_alike(weights, others, plan)


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
