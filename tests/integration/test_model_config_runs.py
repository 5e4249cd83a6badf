"""Every shipped config of a model and every template takes two steps on a tiny pipeline and exports its objective."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sd_training.config.load import load_config
from sd_training.config.schema import PRESETS, Config
from sd_training.models.family import Family
from sd_training.training import DiffusionModule
from tests.family_makers import save_pipeline
from tests.integration.shipped_models import (
    CONTINUED,
    FROM_SCRATCH,
    MODELS,
    family_name,
    in_the_project,  # noqa: F401 - a fixture
    path_of,
    read,
    write_shards,
)
from tests.integration.training import checkpoint_tensors, losses, train

WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_shards(tmp_path_factory.mktemp("shards"))


@pytest.fixture(scope="module")
def tiny_pipelines(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Family → folder, made when first asked for."""
    folder, made = tmp_path_factory.mktemp("tiny"), dict[str, Path]()

    def of(family: str) -> Path:
        if family not in made:
            made[family] = save_pipeline(family, folder / family)
        return made[family]

    return of


def tiny_run(name: str, pipeline: Path, shards: Path, folder: Path) -> list[str]:
    """The shipped file on a tiny pipeline, at a tiny size; objective, optimizer, schedule, average and conditioning
    are its own."""
    values = read(name)
    changes: dict[str, Any] = {
        "experiment.log_dir": folder,
        "experiment.num_examples_to_see": 4,
        "experiment.save_every": 2,
        "system.batch_size": 2,
        "system.gradient_accumulation": 1,
        "system.workers": 0,
        "model.pretrained": pipeline,
        "model.mixed_precision": "no",
        "dataset.params.path": shards,
        "dataset.params.resolution": 16,
        "logging.every": 1,
        "logging.progress_bar": False,
    }
    if values["model"].get("vae", {}).get("pretrained") == "???":
        changes["model.vae.pretrained"] = pipeline
    if "buckets" in values["dataset"]["params"]:
        changes |= {f"dataset.params.buckets.{k}": v for k, v in {"step": 4, "min_side": 8, "max_side": 32}.items()}
    return [f"config={path_of(name)}", *(f"{key}={value}" for key, value in changes.items())]


@pytest.mark.parametrize("name", [*MODELS, *FROM_SCRATCH, *CONTINUED])
def test_trains_two_steps_and_exports_its_objective(
    name: str, tiny_pipelines: Any, shards: Path, tmp_path: Path
) -> None:
    pipeline = tiny_pipelines(family_name(name))
    argv = tiny_run(name, pipeline, shards, tmp_path)
    run = train(argv)
    run_dir = tmp_path / read(name)["experiment"]["name"]
    assert len(losses(run_dir)) == 2
    assert all(math.isfinite(loss) for loss in losses(run_dir))
    assert isinstance(run.module, DiffusionModule)
    family = run.module.family
    before, after = load_file(pipeline / family.denoiser_part / WEIGHTS), raw_weights(run_dir)
    assert before.keys() >= after.keys()
    assert any(not torch.equal(before[part], tensor) for part, tensor in after.items())
    scheduler = run_dir / "current_pipeline" / "scheduler" / "scheduler_config.json"
    check_exported(json.loads(scheduler.read_text()), load_config(argv), family)


def raw_weights(run_dir: Path) -> dict[str, torch.Tensor]:
    """What is trained, not its average, which some files update rarely."""
    start = "weights:network."
    stored = checkpoint_tensors(run_dir, 2)
    return {name.removeprefix(start): tensor for name, tensor in stored.items() if name.startswith(start)}


def check_exported(stored: Mapping[str, Any], config: Config, family: Family) -> None:
    """The exported scheduler against the file's options."""
    assert config.objective.preset is not None
    prediction = PRESETS[config.objective.preset]["prediction_type"]
    assert family.schedulers.objective.prediction_type == prediction
    chosen = config.model.noise_scheduler_inference.target
    if prediction != "flow_prediction":
        assert stored["prediction_type"] == prediction
        options = family.schedulers.objective.config
        assert stored.get("rescale_betas_zero_snr", False) is bool(options.rescale_betas_zero_snr)
        assert stored["_class_name"] == (chosen or "DDIMScheduler")
        noise = config.model.noise_scheduler_training.params
        assert {key: stored[key] for key in noise} == noise
        return
    shift = config.objective.shift
    assert stored["_class_name"] == "FlowMatchEulerDiscreteScheduler"
    assert stored["use_dynamic_shifting"] is (shift.mode == "tokens")
    if shift.mode == "static":
        assert stored["shift"] == shift.value
    if shift.mode == "tokens":
        theirs = ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")
        ours = (shift.base_tokens, shift.max_tokens, shift.base_shift, shift.max_shift)
        assert tuple(stored[key] for key in theirs) == ours
