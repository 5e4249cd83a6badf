"""Both YAML examples of the sd-training README: fill in the `???`, train, save, resume."""

from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel

from sd_training.data.index.report import report_text
from tests import makers
from tests.integration.training import (
    ROOT,
    CrashAfter,
    Interrupted,
    checkpoint_tensors,
    prepare,
    train,
    train_in_processes,
)


@pytest.fixture(scope="module")
def sd_like_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline with Stable Diffusion's shapes where the YAML fixes them: text width 768, downscale 8, 4 channels."""
    folder = tmp_path_factory.mktemp("sd") / "pipeline"
    tokenizer = makers.tiny_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        StableDiffusionPipeline(
            vae=AutoencoderKL(
                block_out_channels=(8, 8, 8, 8),
                down_block_types=("DownEncoderBlock2D",) * 4,
                up_block_types=("UpDecoderBlock2D",) * 4,
                latent_channels=4,
                norm_num_groups=4,
            ),
            text_encoder=makers.tiny_text_encoder(len(tokenizer), width=768),
            tokenizer=tokenizer,
            unet=UNet2DConditionModel(**{**makers.UNET_PARAMS, "cross_attention_dim": 768}),
            scheduler=DDIMScheduler(beta_schedule="scaled_linear", clip_sample=False, steps_offset=1),
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        ).save_pretrained(folder)
    return folder


def from_scratch(run_dir: Path, model: Path, shards: Path) -> list[str]:
    """The from-scratch example; only numbers of size are lowered, so that a CPU trains it in seconds."""
    parts = ("vae", "text_encoder", "tokenizer", "noise_scheduler_training", "noise_scheduler_inference")
    return [
        f"config={ROOT / 'configs' / 'template_config.yaml'}",
        f"experiment.log_dir={run_dir.parent}",
        f"experiment.name={run_dir.name}",
        "experiment.project=test",
        "experiment.num_examples_to_see=16",
        *(f"model.{part}.pretrained={model}" for part in parts),
        f"dataset.params.path={shards}",
        "model.unet.params.block_out_channels=[32,32,32,32]",
        "system.batch_size=4",
        "system.workers=1",
        "dataset.params.resolution=64",
        "experiment.save_every=2",
    ]


def fine_tuning(run_dir: Path, model: Path, shards: Path) -> list[str]:
    """The fine-tuning example, at its own batch size, accumulation and precision."""
    captions = run_dir.parent / "captions.csv"
    captions.write_text("uid,caption\nu1,a red picture\n")
    return [
        f"config={ROOT / 'configs' / 'finetune_config.yaml'}",
        "experiment.num_examples_to_see=8",
        f"experiment.eval_caption_file={captions}",
        f"model.pretrained={model}",
        f"dataset.params.path={shards}",
        f"experiment.log_dir={run_dir.parent}",
        f"experiment.name={run_dir.name}",
        "experiment.save_every=2",
        "system.workers=1",
        "dataset.params.resolution=64",
        "sampling.num_inference_steps=1",
    ]


@pytest.mark.parametrize("example", [from_scratch, fine_tuning])
def test_example_trains_saves_and_resumes(example, tmp_path: Path, sd_like_dir: Path, shards_dir: Path) -> None:  # type: ignore[no-untyped-def]
    whole, cut = (example(tmp_path / name, sd_like_dir, shards_dir) for name in ("whole", "cut"))
    train(whole)
    with pytest.raises(Interrupted):
        train(cut, CrashAfter(3))
    train(cut)
    left, right = checkpoint_tensors(tmp_path / "whole", 4), checkpoint_tensors(tmp_path / "cut", 4)
    assert left
    assert all(torch.equal(left[name], right[name]) for name in left)
    StableDiffusionPipeline.from_pretrained(tmp_path / "cut" / "current_pipeline", local_files_only=True)


def test_fine_tuning_on_two_processes(tmp_path: Path, sd_like_dir: Path, shards_dir: Path) -> None:
    argv = fine_tuning(tmp_path / "run", sd_like_dir, shards_dir)
    output = train_in_processes(argv, 2)
    assert "gloo is used here" in output
    assert (tmp_path / "run" / "samples" / "step_2" / "eval" / "u1.png").exists()


def test_the_filter_of_the_example_selects(tmp_path: Path, sd_like_dir: Path, shards_dir: Path) -> None:
    run = prepare(from_scratch(tmp_path / "run", sd_like_dir, shards_dir))
    report = run.data.report()
    # makers.caption_samples writes pwatermark i % 10 / 10; 32 samples have 20 at most 0.5.
    assert "20" in report_text(report)
