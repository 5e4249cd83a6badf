"""Autoencoder training, class labels, pictures, loggers and the run record, on real tiny runs."""

import csv
import json
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL, StableDiffusionPipeline
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from sd_training.errors import CheckpointError, ConfigError
from tests import makers
from tests.integration.training import (
    CrashAfter,
    Interrupted,
    checkpoint_tensors,
    losses,
    metrics,
    options,
    train,
    train_in_processes,
)

VAE_OPTIONS = (
    "model.pretrained=null",
    "model.train=vae",
    "model.vae.params.block_out_channels=[8,8]",
    "model.vae.params.down_block_types=[DownEncoderBlock2D,DownEncoderBlock2D]",
    "model.vae.params.up_block_types=[UpDecoderBlock2D,UpDecoderBlock2D]",
    "model.vae.params.latent_channels=4",
    "model.vae.params.norm_num_groups=4",
)


def test_autoencoder_trains_resumes_and_serves_as_pretrained(
    tmp_path: Path, pipeline_dir: Path, shards_dir: Path
) -> None:
    changes = {"optimizer__params__learning_rate": 0.01, "experiment__num_examples_to_see": 240}
    whole = [*options(tmp_path / "whole", pipeline_dir, shards_dir, **changes), *VAE_OPTIONS]
    cut = [*options(tmp_path / "cut", pipeline_dir, shards_dir, **changes), *VAE_OPTIONS]
    train(whole)
    with pytest.raises(Interrupted):
        train(cut, CrashAfter(17))
    train(cut)
    left, right = checkpoint_tensors(tmp_path / "whole", 30), checkpoint_tensors(tmp_path / "cut", 30)
    assert all(torch.equal(left[name], right[name]) for name in left)
    assert sum(losses(tmp_path / "whole")[-3:]) < 0.8 * sum(losses(tmp_path / "whole")[:3])
    assert float(metrics(tmp_path / "whole")[-1]["kl"]) > 0

    folder = tmp_path / "whole" / "current_pipeline"
    vae = AutoencoderKL.from_pretrained(folder, local_files_only=True)
    pixels = torch.stack([torch.randn(3, 16, 16).clamp(-1, 1) for _ in range(8)])
    assert 0.1 < float(vae.encode(pixels).latent_dist.sample().std() * vae.config.scaling_factor) < 10
    diffusion = options(tmp_path / "unet", pipeline_dir, shards_dir, experiment__num_examples_to_see=16)
    diffusion += ["model.pretrained=null", f"model.vae.pretrained={folder}"]
    for part in ("text_encoder", "tokenizer", "unet", "noise_scheduler_training", "noise_scheduler_inference"):
        diffusion.append(f"model.{part}.pretrained={pipeline_dir}")
    train(diffusion)
    exported = StableDiffusionPipeline.from_pretrained(tmp_path / "unet" / "current_pipeline", local_files_only=True)
    assert exported.vae.config.scaling_factor == vae.config.scaling_factor != 0.18215


@pytest.mark.parametrize(("asked", "kept"), [("auto", True), ("measure", False)])
def test_two_processes_export_a_pretrained_autoencoder(
    asked: str, kept: bool, tmp_path: Path, pretrained_vae: Path, shards_dir: Path
) -> None:
    """Its scale is measured by all of them: an export by the first one alone would wait for ever."""
    changes = {"system__batch_size": 4, "experiment__num_examples_to_see": 32, "trainer__accelerator": "cpu"}
    changes |= {"watch__save_s": 60, "checkpoint__asynchronous": kept, "model__vae_scaling_factor": asked}
    argv = options(tmp_path / "run", Path("null"), shards_dir, **changes)
    said = train_in_processes([*argv, "model.train=vae", f"model.vae.pretrained={pretrained_vae}"], 2)
    assert "done: " in said
    vae = AutoencoderKL.from_pretrained(tmp_path / "run" / "current_pipeline", local_files_only=True)
    assert (vae.config.scaling_factor == 0.31) == (vae.config.shift_factor == 0.05) == kept
    assert f"scaling_factor: {vae.config.scaling_factor:.5g} is exported" in said
    assert not kept or re.search(r"this run's latents measure \d\S+, shift_factor \S+ \(exported with", said)


def test_scales_of_autoencoders_in_one_process(tmp_path: Path, pretrained_vae: Path, shards_dir: Path) -> None:
    """Kept for pretrained weights, measured from scratch; a request wins; saved now or in the background."""

    def exported_scales(name: str, *argv: str, **changes: Any) -> tuple[float, float | None]:
        changes |= {"experiment__num_examples_to_see": 16, "model__train": "vae"}
        train([*options(tmp_path / name, Path("null"), shards_dir, **changes), *argv])
        stored = json.loads((tmp_path / name / "current_pipeline" / "config.json").read_text())
        return stored["scaling_factor"], stored["shift_factor"]

    pretrained = f"model.vae.pretrained={pretrained_vae}"
    assert exported_scales("kept", pretrained) == (0.31, 0.05)
    scale, shift = exported_scales("measured", pretrained, "model.vae_scaling_factor=measure", model__use_ema=False)
    assert scale != 0.31
    assert shift != 0.05
    later = {"checkpoint__asynchronous": True}
    assert exported_scales("measured later", pretrained, "model.vae_scaling_factor=measure", **later) == (scale, shift)
    assert exported_scales("from scratch", *VAE_OPTIONS)[0] != 0.18215
    assert exported_scales("as given", *VAE_OPTIONS, "model.vae_scaling_factor=keep") == (0.18215, None)


@pytest.fixture(scope="session")
def pretrained_vae(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stored autoencoder whose scale and shift are not those of its latents."""
    folder = tmp_path_factory.mktemp("autoencoder") / "vae"
    makers.tiny_vae(scaling_factor=0.31, shift_factor=0.05).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", ["idx_to_prompt", "class_mapping"])
def test_class_labels_become_prompts(name: str, tmp_path: Path, pipeline_dir: Path) -> None:
    samples = [{"__key__": f"{i:03d}", "png": makers.encode(makers.picture(i), "PNG"), "cls": i % 3} for i in range(24)]
    makers.write_shard(tmp_path / "shards" / "0.tar", samples)
    mapping = {"0": "zero", "1": ["one", "a one"], "2": "two"}
    (tmp_path / "prompts.json").write_text(json.dumps(mapping))
    argv = options(tmp_path / "run", pipeline_dir, tmp_path / "shards", dataset__type="ClassificationWebDataset")
    train([*argv, f"dataset.params.{name}={tmp_path / 'prompts.json'}"])
    assert len(losses(tmp_path / "run")) == 8


def test_previews_and_evaluation_images(tmp_path: Path, pipeline_dir: Path, shards_dir: Path) -> None:
    captions = tmp_path / "captions.csv"
    captions.write_text('uid,caption\nx1,"a red, small picture"\nx2,a blue picture\nx3,a green picture\n')
    run_dir = tmp_path / "run"
    argv = options(
        run_dir,
        pipeline_dir,
        shards_dir,
        experiment__save_every=4,
        experiment__eval_caption_file=captions,
        experiment__num_eval_images=1000,
        sampling__every=3,
        sampling__num_inference_steps=2,
        sampling__raw=True,
        sampling__denoising=True,
        logging__batch_every=8,
    )
    argv.append("sampling.prompts=[a red picture,a blue one]")
    train(argv)
    steps = sorted(path.name for path in (run_dir / "samples").iterdir())
    assert steps == ["step_0", "step_3", "step_4", "step_6", "step_8"]
    at_start = sorted(str(p.relative_to(run_dir / "samples")) for p in (run_dir / "samples/step_0").rglob("*.png"))
    sets = ("previews", "previews_denoising", "previews_trained", "previews_denoising_trained")
    drawn = sorted(f"{name}{file}" for name in sets for file in ("/000.png", "/001.png", "_grid.png"))
    assert at_start == [f"step_0/{name}" for name in drawn]
    step_8 = sorted(
        str(p.relative_to(run_dir / "samples" / "step_8")) for p in (run_dir / "samples/step_8").rglob("*.png")
    )
    assert step_8 == [
        "batch.png",
        "batch_reconstructions.png",
        "eval/x1.png",
        "eval/x2.png",
        "eval/x3.png",
        "eval_grid.png",
        *drawn,
    ]
    average, raw = (
        (run_dir / f"samples/step_8/{name}_grid.png").read_bytes() for name in ("previews", "previews_trained")
    )
    assert average != raw  # but the weights before the first step are their own average
    at_start_too = [(run_dir / "samples/step_0" / f"{name}_grid.png").read_bytes() for name in (sets[0], sets[2])]
    assert at_start_too[0] == at_start_too[1]
    row = Image.open(run_dir / "samples/step_8/previews_denoising/000.png")
    assert row.size == (2 * 16, 16)
    assert row.crop((0, 0, 16, 16)).tobytes() != row.crop((16, 0, 32, 16)).tobytes()
    assert Image.open(run_dir / "samples/step_8/batch.png").size == (8 * 16, 16)
    compared = np.asarray(Image.open(run_dir / "samples/step_8/batch_reconstructions.png")).astype(int)
    assert compared.shape == (2 * 16, 4 * 3 * 16, 3)
    batch, parts = np.asarray(Image.open(run_dir / "samples/step_8/batch.png")), np.split(compared[:16, :48], 3, axis=1)
    assert (parts[0] == batch[:16, :16]).all() and (parts[2] == abs(parts[1] - parts[0])).all()
    captions = (run_dir / "samples/step_8/batch.txt").read_text().splitlines()
    assert len(captions) == 8 and set(captions) <= {"a red picture", "a green picture", "a blue picture", ""}
    events = EventAccumulator(str(run_dir / "tensorboard")).Reload()
    (logged,) = events.Tensors("batch/text_summary")
    assert logged.step == 8 and logged.tensor_proto.string_val[0].decode().split("  \n")[:-1] == captions
    assert Image.open(run_dir / "samples/step_8/eval_grid.png").size == (48, 16)
    shutil.rmtree(run_dir / "samples" / "step_0")
    train([*argv, "experiment.num_examples_to_see=72"])
    assert sorted(path.name for path in (run_dir / "samples").iterdir()) == [*steps[1:], "step_9"]


def test_pictures_do_not_disturb_training(tmp_path: Path, pipeline_dir: Path, shards_dir: Path) -> None:
    plain = options(tmp_path / "plain", pipeline_dir, shards_dir)
    drawing = options(
        tmp_path / "drawing", pipeline_dir, shards_dir, sampling__every=1, sampling__num_inference_steps=1
    )
    train(plain)
    train([*drawing, "sampling.prompts=[a red picture]"])
    left, right = checkpoint_tensors(tmp_path / "plain", 8), checkpoint_tensors(tmp_path / "drawing", 8)
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_evaluation_images_are_the_same_on_two_processes(tmp_path: Path, pipeline_dir: Path, shards_dir: Path) -> None:
    captions = tmp_path / "captions.csv"
    captions.write_text("uid,caption\nonly,a red picture\n")
    common = {
        "experiment__num_examples_to_see": 16,
        "experiment__eval_caption_file": captions,
        "sampling__num_inference_steps": 2,
    }
    train(options(tmp_path / "one", pipeline_dir, shards_dir, **common))
    argv = options(tmp_path / "two", pipeline_dir, shards_dir, system__batch_size=4, **common)
    train_in_processes(argv, 2)
    for name in ("one", "two"):
        assert [path.name for path in (tmp_path / name / "samples" / "step_2" / "eval").iterdir()] == ["only.png"]


def test_all_pipelines_are_kept_when_asked(tmp_path: Path, pipeline_dir: Path, shards_dir: Path) -> None:
    run_dir = tmp_path / "run"
    train(
        options(run_dir, pipeline_dir, shards_dir, experiment__save_every=2, experiment__save_only_most_recent="False")
    )
    assert sorted(p.name for p in (run_dir / "pipelines").iterdir()) == ["step_2", "step_4", "step_6", "step_8"]
    assert (run_dir / "current_pipeline").resolve().name == "step_8"
    weights = [(run_dir / "pipelines").glob(f"*/{part}/*.safetensors") for part in ("vae", "text_encoder", "unet")]
    assert [len({path.stat().st_ino for path in paths}) for paths in weights] == [1, 1, 4]  # frozen parts: hard links
    StableDiffusionPipeline.from_pretrained(run_dir / "current_pipeline", local_files_only=True)


def test_v_prediction_with_zero_snr_is_exported_as_trained(
    tmp_path: Path, pipeline_dir: Path, shards_dir: Path
) -> None:
    run_dir = tmp_path / "run"
    train(
        options(
            run_dir,
            pipeline_dir,
            shards_dir,
            objective__prediction_type="v_prediction",
            objective__rescale_betas_zero_snr="true",
            objective__snr_gamma=5,
        )
    )
    scheduler = json.loads((run_dir / "current_pipeline/scheduler/scheduler_config.json").read_text())
    assert scheduler["prediction_type"] == "v_prediction"
    assert scheduler["rescale_betas_zero_snr"] is True
    assert scheduler["timestep_spacing"] == "trailing"


def test_checkpointing_and_bf16_train(tmp_path: Path, pipeline_dir: Path, shards_dir: Path) -> None:
    run_dir = tmp_path / "run"
    argv = options(
        run_dir, pipeline_dir, shards_dir, model__mixed_precision="bf16", model__gradient_checkpointing="True"
    )
    train([*argv, "model.xformers=True"])
    plain = tmp_path / "plain"
    train(options(plain, pipeline_dir, shards_dir))
    for mixed, full in zip(losses(run_dir), losses(plain), strict=True):
        assert mixed == pytest.approx(full, rel=0.02)
        assert mixed != full


def test_the_wandb_key_is_written_nowhere(
    tmp_path: Path,
    pipeline_dir: Path,
    shards_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    secret = "0123456789abcdef" * 3
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    run_dir = tmp_path / "run"
    argv = options(run_dir, pipeline_dir, shards_dir, experiment__num_examples_to_see=16, wandb__mode="offline")
    argv.append(f"wandb.api_key={secret}")
    monkeypatch.setattr("sys.argv", ["train.py", *argv])  # W&B writes the command line into its file
    train(argv)
    printed = capfd.readouterr()
    assert secret not in printed.out + printed.err
    assert (run_dir / "wandb").is_dir()
    assert secret not in os.environ.values()  # nor told to every process started from here
    for path in run_dir.rglob("*"):
        if path.is_file():
            assert secret.encode() not in path.read_bytes(), path
    assert json.loads((run_dir / "run.json").read_text())["starts"][0]["command"][-1] == "wandb.api_key=(hidden)"


def test_the_environment_chooses_a_mode_and_wandb_gets_options_and_curves(
    tmp_path: Path,
    pipeline_dir: Path,
    shards_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    run_dir = tmp_path / "run"
    held_out = makers.caption_shards(tmp_path / "held_out")
    measured = {"validation__path": held_out, "validation__every": 2, "validation__num_levels": 2}
    train(options(run_dir, pipeline_dir, shards_dir, experiment__num_examples_to_see=16, **measured))
    assert "wandb: " not in capfd.readouterr().err
    (offline,) = run_dir.glob("wandb/offline-run-*/*.wandb")
    missing = {b'"learning_rate":0.001', b"validation_loss_trained/level_1", b"validation_loss_low_average/level_0"}
    for _ in range(600):  # W&B's own process, which all tests here share, may still be writing
        written = offline.read_bytes()
        if not (missing := {each for each in missing if each not in written}):
            break
        time.sleep(0.1)
    assert not missing
    shown = EventAccumulator(str(run_dir / "tensorboard")).Reload()
    assert shown.Tags()["scalars"] and "hp_metric" not in shown.Tags()["scalars"]


def test_a_taken_folder_is_refused_without_requeue(tmp_path: Path, pipeline_dir: Path, shards_dir: Path) -> None:
    argv = options(tmp_path / "run", pipeline_dir, shards_dir, experiment__num_examples_to_see=16)
    train(argv)
    with pytest.raises(ConfigError, match=r"experiment.requeue: false, but .* already holds a run"):
        train([*argv, "experiment.requeue=False"])


def test_a_damaged_newest_save_falls_back_to_the_one_before(
    tmp_path: Path, pipeline_dir: Path, shards_dir: Path
) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train(options(whole, pipeline_dir, shards_dir, experiment__save_every=2))
    with pytest.raises(Interrupted):
        train(options(cut, pipeline_dir, shards_dir, experiment__save_every=2), CrashAfter(5))
    newest = cut / "checkpoints" / "step=4" / "optimizer.safetensors"
    newest.write_bytes(newest.read_bytes()[:-100])
    half_written = cut / "checkpoints" / "step=5.partial"
    half_written.mkdir()
    (half_written / "weights.safetensors").write_bytes(b"half")
    train(options(cut, pipeline_dir, shards_dir, experiment__save_every=2))
    left, right = checkpoint_tensors(whole, 8), checkpoint_tensors(cut, 8)
    assert all(torch.equal(left[name], right[name]) for name in left)
    assert not half_written.exists()


def test_no_usable_save_is_an_error_and_no_fresh_start(tmp_path: Path, pipeline_dir: Path, shards_dir: Path) -> None:
    argv = options(tmp_path / "run", pipeline_dir, shards_dir, experiment__num_examples_to_see=32)
    train(argv)
    for manifest in (tmp_path / "run" / "checkpoints").glob("*/MANIFEST.json"):
        manifest.write_text("{")
    with pytest.raises(CheckpointError):
        train(argv)


def test_other_data_is_refused_on_resume(tmp_path: Path, pipeline_dir: Path, shards_dir: Path) -> None:
    argv = options(tmp_path / "run", pipeline_dir, shards_dir)
    with pytest.raises(Interrupted):
        train(argv, CrashAfter(4))
    makers.caption_shards(tmp_path / "other", per_shard=5)
    with pytest.raises(CheckpointError, match="other data"):
        train(options(tmp_path / "run", pipeline_dir, tmp_path / "other"))


def test_moved_data_is_the_same_data(tmp_path: Path, pipeline_dir: Path, shards_dir: Path) -> None:
    argv = options(tmp_path / "run", pipeline_dir, shards_dir)
    with pytest.raises(Interrupted):
        train(argv, CrashAfter(4))
    shutil.copytree(shards_dir, tmp_path / "moved")
    run = train(options(tmp_path / "run", pipeline_dir, tmp_path / "moved"))
    assert run.trainer.global_step == 8


def test_metrics_rows_after_the_checkpoint_are_dropped_on_resume(
    tmp_path: Path, pipeline_dir: Path, shards_dir: Path
) -> None:
    argv = options(tmp_path / "run", pipeline_dir, shards_dir)
    with pytest.raises(Interrupted):
        train(argv, CrashAfter(5))
    with (tmp_path / "run" / "metrics.csv").open(newline="") as stream:
        assert [row["optimizer_step"] for row in csv.DictReader(stream)][-1] == "5"
    train(argv)
    assert [row["optimizer_step"] for row in metrics(tmp_path / "run")] == [str(i) for i in range(1, 9)]


def test_ema_path_starts_the_average(tmp_path: Path, pipeline_dir: Path, shards_dir: Path) -> None:
    other = makers.save_tiny_pipeline(tmp_path / "other", seed=9, unet=makers.SMALLER_UNET)
    run_dir = tmp_path / "run"
    argv = options(run_dir, pipeline_dir, shards_dir, ema__path=other, ema__warmup="False")
    train([*argv, "ema.decay=0.999999"])
    exported = StableDiffusionPipeline.from_pretrained(run_dir / "current_pipeline").unet
    started_from = StableDiffusionPipeline.from_pretrained(other).unet
    for ours, theirs in zip(exported.parameters(), started_from.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


def test_a_run_on_one_made_up_batch_resumes(tmp_path: Path, pipeline_dir: Path) -> None:
    made_up = {"dataset__type": "Synthetic", "dataset__reuse_batch": True, "experiment__num_examples_to_see": 96}

    def words(name: str, **more: Any) -> list[str]:
        return options(tmp_path / name, pipeline_dir, Path(""), **made_up, **more)

    train(words("whole"))
    with pytest.raises(Interrupted):
        train(words("cut"), CrashAfter(7))
    train(words("cut"))
    left, right = (checkpoint_tensors(tmp_path / name, 12) for name in ("whole", "cut"))
    assert all(torch.equal(left[name], right[name]) for name in left)
    seen = losses(tmp_path / "whole")
    assert len(seen) == 12 and seen[-1] < seen[0] and sorted(seen, reverse=True) == seen  # one batch, one draw
