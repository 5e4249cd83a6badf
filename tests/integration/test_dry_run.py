"""What `--dry-run` says: its figures are those of the data, the model and the options."""

from pathlib import Path

import pytest
from diffusers import UNet2DConditionModel
from transformers import AutoTokenizer

from sd_training.build.dry_run import describe
from sd_training.build.plan import make_plan
from sd_training.config.load import load_config
from sd_training.errors import CheckpointError, ConfigError
from tests import makers
from tests.integration.training import options, train


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Twelve pictures of 80 × 80 to 245 × 300 pixels; the last three captions are long."""
    folder = tmp_path / "data"
    folder.mkdir()
    for number in range(12):
        makers.picture(number, width=80 + 20 * number, height=80 + 15 * number).save(folder / f"{number:02d}.png")
        (folder / f"{number:02d}.txt").write_text("a red picture " * (1 if number < 9 else 20))
    return folder


def row(text: str, name: str) -> str:
    """A line of the summary."""
    summary = text.partition("\n\n")[0].splitlines()
    return next(line.split(maxsplit=len(name.split()))[-1] for line in summary if line.startswith(f"  {name} "))


def test_the_facts_of_a_run_on_a_small_folder(pipeline_dir: Path, folder: Path, tmp_path: Path) -> None:
    argv = options(tmp_path / "runs" / "first", pipeline_dir, folder, dataset__type="ImageFolder")
    argv += ["dataset.params.resolution=160", "system.batch_size=4", "experiment.num_examples_to_see=4810"]
    argv += ["objective.prediction_type=v_prediction", "lr_scheduler.scheduler=linear", "experiment.save_every=500"]
    text = describe(make_plan(load_config(argv)))

    unet = sum(p.numel() for p in UNet2DConditionModel.from_pretrained(pipeline_dir / "unet").parameters())
    assert row(text, "model") == f"stable_diffusion, from {pipeline_dir}"
    assert row(text, "trains") == f"unet ({unet:,} parameters)"
    assert row(text, "predicts") == "v_prediction"
    assert row(text, "data") == f"12 of 12 samples in 1 folder ({folder})"
    assert row(text, "at") == "160 × 160 pixels"
    assert row(text, "length").endswith("= 4 images per optimizer step; 4,810 images = 1,202 steps")
    assert "  each sample 400.67 times\n" in text  # 1,202 steps of 4 over 12 samples
    assert row(text, "optimizer").startswith("adamw, learning rate 0.000333 at the first step, 0.001 at step 3, 8.3")
    assert row(text, "runs on") in {f"{kind}, 1 process, fp32, strategy single" for kind in ("cpu", "cuda", "mps")}
    assert row(text, "memory").startswith("at most ")
    assert row(text, "run folder") == str(tmp_path / "runs" / "first")
    assert row(text, "begins").startswith("a new run: ")

    tokenizer = AutoTokenizer.from_pretrained(pipeline_dir / "tokenizer")
    cut = f"text_encoder: 3 of 12 captions looked at (25.0%) have more than its {tokenizer.model_max_length} tokens"
    # Height decides up to 155 of the 160 pixels, and the sixth picture is the last that is too small.
    enlarged = "6 images (50.0%)"
    assert f"  enlarged to the size they are trained at: {enlarged}\n" in text
    assert f"{cut} and are cut off" in text
    doubts = text.partition("probably not meant:\n")[2].partition("\n\n")[0].splitlines()
    assert [line.split(":")[0] for line in doubts] == [
        "  - dataset.params.resolution",
        "  - the length of the run",
        "  - captions",
        "  - objective.prediction_type",
    ]
    assert "the run trains v_prediction, but the weights of model.pretrained answer epsilon" in doubts[-1]

    changed = text.partition("(docs/config.md has all of them):\n")[2].partition("\n\n")[0]
    assert "  lr_scheduler.scheduler=linear\n" in changed and "beta2" not in text
    again = describe(make_plan(load_config([line.strip().replace("'", "") for line in changed.splitlines()])))
    assert again == text  # the options are enough to repeat the run
    assert not (tmp_path / "runs").exists()


def test_a_run_as_it_was_meant_raises_no_doubts(pipeline_dir: Path, shards_dir: Path, tmp_path: Path) -> None:
    text = describe(make_plan(load_config(options(tmp_path / "run", pipeline_dir, shards_dir))))
    assert "probably not meant" not in text
    assert row(text, "data") == f"32 of 32 samples in 2 shards ({shards_dir / '000.tar'})"


def test_a_dry_run_says_whether_and_where_the_run_goes_on(pipeline_dir: Path, shards_dir: Path, tmp_path: Path) -> None:
    argv = options(tmp_path / "run", pipeline_dir, shards_dir, experiment__num_examples_to_see=16)
    train(argv)
    text = describe(make_plan(load_config([*argv, "experiment.num_examples_to_see=64", "optimizer.params.beta1=0.8"])))
    checkpoint = tmp_path / "run" / "checkpoints" / "step=2"
    assert row(text, "begins") == f"resumes from {checkpoint}, after 2 of 8 optimizer steps"
    assert "  optimizer.params.beta1: 0.9 -> 0.8\n" in text
    wrong = ["experiment.requeue=false", "dataset.params.filters.original_width='>=9999'"]
    with pytest.raises(ConfigError) as error:
        describe(make_plan(load_config([*argv, *wrong])))
    named = [line.partition(": ")[0] for line in error.value.problems]
    assert named[:2] == ["experiment.requeue", "dataset.params.path"]
    with pytest.raises(CheckpointError, match=r"dataset\.params\.resolution"):
        describe(make_plan(load_config([*argv, "dataset.params.resolution=32"])))
