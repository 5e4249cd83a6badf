"""What a resumed run says of changed options, and which of them it does not change."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sd_training.build.data import make_data
from sd_training.build.plan import check_data, find_start, make_plan
from sd_training.checkpoint.folder import MANIFEST_NAME, seal_partial
from sd_training.config.changes import read_starts
from sd_training.config.load import load_config
from sd_training.errors import CheckpointError, ConfigError
from sd_training.types import LatentGrid
from tests.integration.training import CrashAfter, Interrupted, checkpoint_tensors, metrics, options, prepare, train
from tests.unit.checkpoint.test_folder import listening_to_the_log

CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"optimizer__name": "lion"}, 'optimizer.name was "adamw", now "lion"'),
    ({"optimizer__no_decay_on_norms_and_biases": True}, "no_decay_on_norms_and_biases was false, now true"),
    ({"objective__prediction_type": "v_prediction"}, 'objective.prediction_type was "epsilon", now "v_prediction"'),
    ({"model__train_text_encoder": True}, "model.train_text_encoder was false, now true"),
    ({"model__lora__rank": 4}, "model.lora.rank was 0, now 4"),
    ({"dataset__params__resolution": 32}, "dataset.params.resolution was 16, now 32"),
]
REFUSED: list[tuple[list[str], str]] = [
    (["model.use_ema=false"], "model.use_ema: was true at the last start of .* and is false now"),
    (["model.train=vae", "dataset.params.crop=center"], 'model.train: was "denoiser" at the last start'),
    (
        ["model.noise_scheduler_training.params.beta_end=0.5"],
        "model.noise_scheduler_training.params.beta_end: was null",
    ),
    (["conditioning.null_text=empty"], "conditioning.null_text: was null at the last start"),
    (["model.noise_scheduler_inference.target=DDIMScheduler"], "model.noise_scheduler_inference.target: was null"),
]


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory, pipeline_dir: Path, shards_dir: Path) -> Path:
    """A run with a checkpoint of step 2; not to be changed."""
    run_dir = tmp_path_factory.mktemp("begun") / "run"
    with pytest.raises(Interrupted):
        train(options(run_dir, pipeline_dir, shards_dir, experiment__save_every=2), CrashAfter(3))
    return run_dir


@pytest.fixture
def again(begun: Path, tmp_path: Path, pipeline_dir: Path, shards_dir: Path) -> list[str]:
    """The command of a copy of it."""
    shutil.copytree(begun, tmp_path / "run")
    return options(
        tmp_path / "run", pipeline_dir, shards_dir, experiment__save_every=2, experiment__num_examples_to_see=32
    )


def exported(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "current_pipeline" / "unet" / "diffusion_pytorch_model.safetensors")


def agrees(run_dir: Path, part: str, step: int) -> bool:
    """Whether the export is this part of the checkpoint."""
    stored = checkpoint_tensors(run_dir, step)
    return all(torch.equal(value, stored[f"{part}:network.{name}"]) for name, value in exported(run_dir).items())


@pytest.mark.parametrize(("change", "said"), CHANGES, ids=lambda value: str(value)[:40])
def test_other_options_are_named(again: list[str], change: dict[str, Any], said: str) -> None:
    more = [f"{name.replace('__', '.')}={value}" for name, value in change.items()]
    with pytest.raises((CheckpointError, ConfigError), match=said):
        train([*again, *more])


@pytest.mark.parametrize(("change", "said"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_would_change_the_export_is_refused(again: list[str], change: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        prepare([*again, *change])
    assert "allow it with 'experiment.allow_changed=[" in str(error.value)


def test_all_changes_that_a_run_cannot_go_on_with_are_one_error(again: list[str]) -> None:
    more = ["optimizer.name=lion", "model.use_ema=false", "system.batch_size=4", "experiment.seed=9"]
    more.append("dataset.params.filters.original_width='>=45'")
    with pytest.raises(ConfigError) as refused:
        find_start(make_plan(load_config([*again, *more])), None)
    export, state, data = refused.value.problems
    assert export.startswith("model.use_ema: was true at the last start of ")
    assert 'with other options: optimizer.name was "adamw", now "lion". Restore' in state
    filters = 'dataset.params.filters was null, now {"original_width": ">=45"}'
    batch = "system.batch_size × system.gradient_accumulation × processes was 8, now 4"
    assert f": {filters}; experiment.seed was 0, now 9; {batch}. Restore" in data
    # Other data alone is found when it is opened, and what follows from it is not named.
    plan = make_plan(load_config([*again, more[4]]))
    start = find_start(plan, None)
    with pytest.raises(CheckpointError) as error:
        check_data(start, make_data(plan, None, LatentGrid(4, 2)))
    assert f": {filters}; 32 samples were selected, now 27. Restore" in str(error.value)


def test_a_finished_run_names_options_that_have_changed(again: list[str], caplog: pytest.LogCaptureFixture) -> None:
    done = [word for word in again if "num_examples_to_see" not in word]
    with listening_to_the_log():
        prepare([*done, "experiment.num_examples_to_see=16", "optimizer.params.learning_rate=0.0003"])
    assert "is finished; it resumes from " in caplog.text
    assert "\n  optimizer.params.learning_rate: 0.001 -> 0.0003" in caplog.text


def test_a_dry_run_can_tell_that_the_data_is_other_data(again: list[str]) -> None:
    plan = make_plan(load_config(again))
    start = find_start(plan, None)
    check_data(start, make_data(plan, None, LatentGrid(4, 2)))
    other = make_plan(load_config([*again, "dataset.params.resolution=32"]))
    with pytest.raises(CheckpointError, match=r"dataset\.params\.resolution was 16, now 32"):
        check_data(start, make_data(other, None, LatentGrid(4, 2)))


def test_changed_options_take_effect_are_told_and_kept(
    again: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    change = (
        "optimizer.params.weight_decay=0.5",
        "optimizer.params.beta1=0.5",
        "optimizer.params.learning_rate=0.0003",
    )
    with listening_to_the_log():
        run = train([*again, *change, "objective.snr_gamma=5", "lr_scheduler.params.warmup_length=0"])
    (group,) = run.trainer.optimizers[0].param_groups
    assert (group["weight_decay"], group["betas"][0]) == (0.5, 0.5)
    run_dir = tmp_path / "run"
    assert [float(row["learning_rate"]) for row in metrics(run_dir)][2:] == pytest.approx([0.0003, 0.0003], rel=1e-6)
    (told,) = {text for text in caplog.messages if "\n  options that differ from the last start" in text}
    assert "resuming after optimizer step 2 of 4" in told
    assert "\n    optimizer.params.learning_rate: 0.001 -> 0.0003" in told
    assert "\n    objective.snr_gamma: null -> 5.0" in told and "api_key" not in told
    first, second = (start["config"] for start in read_starts(run_dir / "run.json"))
    assert any("learning_rate: 0.001" in line for line in first)
    assert any("learning_rate: 0.0003" in line for line in second)
    assert second == (run_dir / "config.yaml").read_text().splitlines()


def test_an_average_ends_and_begins_where_asked(
    again: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir, allowed = tmp_path / "run", "experiment.allow_changed=[model.use_ema]"
    assert agrees(run_dir, "ema", 2) and not agrees(run_dir, "weights", 2)
    (run_dir / "config.yaml").unlink()  # as in a run that comes back from a mirror
    with pytest.raises(ConfigError, match=r"model\.use_ema: was true at the last start"):
        train([*again, "model.use_ema=false"])
    with listening_to_the_log():
        train([*again, "model.use_ema=false", allowed])
    assert "model.use_ema: the checkpoint's average is dropped" in caplog.text
    assert agrees(run_dir, "weights", 4)
    longer = [*again, "experiment.num_examples_to_see=48"]
    with pytest.raises(ConfigError, match=r"model\.use_ema: was false at the last start"):
        train(longer)
    train([*longer, allowed])
    assert agrees(run_dir, "ema", 6) and not agrees(run_dir, "weights", 6)


def test_a_checkpoint_of_another_version_is_refused_before_model_and_data(again: list[str], tmp_path: Path) -> None:
    partial = (tmp_path / "run/checkpoints/step=2").rename(tmp_path / "run/checkpoints/step=2.partial")
    state = json.loads((partial / "state.json").read_text())
    (partial / "state.json").write_text(json.dumps(state | {"format": 2}))
    (partial / MANIFEST_NAME).unlink()
    seal_partial(partial, {})
    with pytest.raises(ConfigError, match=r"step=2.* format 2; this version reads format"):
        find_start(make_plan(load_config(again)), None)
