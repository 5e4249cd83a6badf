"""Runs that train adapters: what they save, that they continue to the bit, and that diffusers draws with the result."""

import csv
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from scripts import cache_latents, compare_checkpoints, generate_examples
from sd_training.build.plan import find_start, make_plan
from sd_training.config.load import load_config
from sd_training.errors import ConfigError
from tests import makers
from tests.family_makers import save_pipeline
from tests.faults.fork_server import shared_server
from tests.integration.commands import fails
from tests.integration.training import (
    checkpoint_tensors,
    losses,
    options,
    train,
    train_in_processes,
    train_until_killed,
)
from tests.offline import refuse_connections

FILE = "pytorch_lora_weights.safetensors"
LORA = {
    "model__lora__rank": 2,
    "model__lora__alpha": 3.0,
    "model__lora__text_encoder": True,
    "model__lora__dropout": 0.1,
    "model__gradient_checkpointing": True,
    "experiment__save_every": 2,
    "experiment__num_examples_to_see": 48,
}


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pipeline("sdxl", tmp_path_factory.mktemp("lora") / "pipeline")


@pytest.fixture(scope="module")
def whole(pipeline: Path, shards_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps of one process, with previews and validation."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    held_out = makers.caption_shards(run_dir.parent / "held_out")
    drawing = {"sampling__every": 3, "sampling__prompts": "[a red picture]", "sampling__num_inference_steps": 1}
    validation = {"validation__path": held_out, "validation__every": 3, "validation__num_samples": 8}
    train(options(run_dir, pipeline, shards_dir, **LORA, **drawing, **validation))
    return run_dir


def export(run_dir: Path) -> dict[str, Tensor]:
    return load_file(run_dir / "current_pipeline" / FILE)


def assert_equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


def test_checkpoints_hold_adapters_alone(whole: Path) -> None:
    tensors = checkpoint_tensors(whole, 6)
    of_weights = {name for name in tensors if name.startswith(("weights:", "ema:"))}
    assert of_weights and all(".lora_" in name for name in of_weights)
    assert len({name for name in of_weights if name.startswith("ema:")}) * 2 == len(of_weights)
    # Behind the penultimate states of the first text encoder nothing is read, so nothing is trained.
    assert not any("text_encoder.encoder.layers.1." in name for name in of_weights)
    trained = sum(t.numel() for name, t in tensors.items() if name.startswith("weights:"))
    base = load_file(whole / "current_pipeline" / "unet" / "diffusion_pytorch_model.safetensors")
    assert trained < 0.1 * sum(tensor.numel() for tensor in base.values())


def test_adapters_are_compared(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The frozen weights, which a checkpoint does not hold, are those that the run began with."""
    compare_checkpoints.main([str(whole / "checkpoints" / "step=6" / name) for name in ("weights", "ema")])
    with (whole / "validation.csv").open(newline="") as stream:
        means = [float(row["loss"]) for row in csv.DictReader(stream) if row["quantile"] == "all"]
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    (mean,) = [words for words in printed if words[0] == "all"]
    assert [float(number) for number in mean[1:3]] == pytest.approx(means[-2:], rel=1e-4)


def test_beside_other_frozen_weights_a_warning_names_them(
    whole: Path, pipeline: Path, shards_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(pipeline, tmp_path / "other")
    for folder, said in ((pipeline, False), (tmp_path / "other", True)):
        caplog.clear()
        argv = options(tmp_path / "new", folder, shards_dir, **LORA, experiment__start_from=whole)
        assert find_start(make_plan(load_config([*argv, "experiment.num_examples_to_see=64"])), None).step == 6
        line = f'were trained beside other frozen weights: model.pretrained was "{pipeline}", now "{folder}"'
        assert (line in caplog.text) == said


def test_a_killed_run_continues_to_the_bit(whole: Path, pipeline: Path, shards_dir: Path, tmp_path: Path) -> None:
    """Merging or not changes nothing else; another rank is refused."""
    argv = options(tmp_path / "cut", pipeline, shards_dir, **LORA, model__lora__merge=False)
    train_until_killed(argv, 1, step=3)
    train(argv)
    assert_equal(checkpoint_tensors(tmp_path / "cut", 6), checkpoint_tensors(whole, 6))
    assert [path.name for path in (tmp_path / "cut" / "current_pipeline").iterdir()] == [FILE]
    assert_equal(export(tmp_path / "cut"), export(whole))
    with pytest.raises(ConfigError, match=r"model\.lora\.rank was 2, now 3"):
        train([*argv, "model.lora.rank=3", "experiment.num_examples_to_see=64"])


def test_two_processes_that_are_killed_continue_to_the_bit(
    whole: Path, pipeline: Path, shards_dir: Path, tmp_path: Path
) -> None:
    """With frozen weights of 8 bits."""
    changes = {**LORA, "system__batch_size": 4, "model__lora__dropout": 0.0, "model__lora__base": "int8"}
    one, two, cut = (options(tmp_path / run, pipeline, shards_dir, **changes) for run in ("one", "two", "cut"))
    train_in_processes(two, 2)
    train_until_killed(cut, 2, step=5)
    assert sorted(path.name for path in (tmp_path / "cut" / "checkpoints").iterdir()) == ["step=2", "step=4"]
    train_in_processes(cut, 2)
    assert_equal(checkpoint_tensors(tmp_path / "cut", 6), checkpoint_tensors(tmp_path / "two", 6))
    assert_equal(export(tmp_path / "cut"), export(tmp_path / "two"))
    run = train([*one, "system.batch_size=8"])
    assert {p.dtype for p in run.module.network.parameters()} == {torch.float32, torch.int8}
    np.testing.assert_allclose(losses(tmp_path / "two"), losses(tmp_path / "one"), rtol=1e-5)


@pytest.fixture(scope="module")
def narrow(shards_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, Any]]:
    """A pipeline, and a run of one process on it whose frozen weights are bf16; with its options."""
    home = tmp_path_factory.mktemp("narrow")
    folder = save_pipeline("stable_diffusion", home / "pipeline")
    changes: dict[str, Any] = {"model__lora__rank": 2, "experiment__num_examples_to_see": 32}
    changes |= {"model__mixed_precision": "bf16", "model__gradient_checkpointing": True}
    train(options(home / "one", folder, shards_dir, **changes))
    return folder, home / "one", changes


@pytest.mark.parametrize(
    ("processes", "own"),
    [
        (4, {"distributed__mesh__data": 2, "distributed__mesh__fsdp": 2, "distributed__encoders": 1}),
        (2, {"distributed__strategy": "fsdp"}),
        (2, {"distributed__strategy": "deepspeed_3"}),
    ],
    ids=["hsdp", "fsdp", "deepspeed_3"],
)
def test_sharded_runs_train_the_same_adapters(
    processes: int, own: dict[str, Any], narrow: tuple[Path, Path, dict[str, Any]], shards_dir: Path, tmp_path: Path
) -> None:
    """Frozen weights lie in pieces, or have another type than the adapters; the export begins from the stored ones."""
    folder, whole, changes = narrow
    own = {**changes, **own, "system__batch_size": 8 // processes}
    train_in_processes(options(tmp_path / "run", folder, shards_dir, **own), processes)
    one, many = export(whole), export(tmp_path / "run")
    for name in one:
        torch.testing.assert_close(many[name], one[name], rtol=0, atol=4e-3)  # as Adam's steps of 1e-3 and bf16 allow
    file = Path("unet", "diffusion_pytorch_model.safetensors")
    base, merged = load_file(folder / file), load_file(tmp_path / "run" / "current_pipeline" / file)
    changed = {name.split(".attn")[-1][2:] for name in base if not torch.equal(base[name], merged[name])}
    assert changed == {"to_q.weight", "to_k.weight", "to_v.weight", "to_out.0.weight"}


def test_a_cache_gives_the_same_adapters(shards_dir: Path, tmp_path: Path) -> None:
    """Of a transformer."""
    folder = save_pipeline("sd3", tmp_path / "pipeline")
    changes = {"model__lora__rank": 2, "experiment__num_examples_to_see": 16, "dataset__params__crop": "center"}
    argv = [options(tmp_path / name, folder, shards_dir, **changes) for name in ("online", "cached")]
    cache_latents.main([*argv[0], f"out={tmp_path / 'cache'}", "dtype=fp32"])
    train(argv[0])
    train([*argv[1], f"dataset.cache.path={tmp_path / 'cache'}"])
    assert losses(tmp_path / "cached") == losses(tmp_path / "online")
    assert_equal(export(tmp_path / "cached"), export(tmp_path / "online"))


def test_merged_adapters_are_not_drawn_with_twice(whole: Path, pipeline: Path, tmp_path: Path) -> None:
    """A copy of their file neither; the pipeline that the run began with takes it."""
    words = ["--prompt", "a red picture", "--out", tmp_path / "out", "--steps", "1", "--height", "16", "--width", "16"]
    copy = shutil.copy(whole / "current_pipeline" / FILE, tmp_path / "copy.safetensors")
    for lora in (whole, f"{copy}:0.5"):
        said = fails(generate_examples.main, "--pipeline", whole, "--lora", lora, *words)
        assert said.startswith("--lora: ") and " would count twice; leave it out, or give the pipeline that " in said
    generate_examples.main([*map(str, ["--pipeline", pipeline, "--lora", whole, *words])])
    assert (tmp_path / "out" / "000000.png").is_file()


def draw(words: list[str]) -> None:
    """In a process of its own: the pipeline that the run began with, the run, and the file of the pictures."""
    refuse_connections()
    import diffusers

    base, run_dir, file = words

    def pictures() -> Iterator[np.ndarray[Any, Any]]:
        for folder, lora in ((run_dir, None), (base, run_dir), (base, None)):
            pipeline = diffusers.DiffusionPipeline.from_pretrained(folder, local_files_only=True)
            pipeline.set_progress_bar_config(disable=True)
            if lora is not None:
                pipeline.load_lora_weights(lora, local_files_only=True)
            generator = torch.Generator().manual_seed(0)
            options: dict[str, Any] = {"height": 16, "width": 16, "num_inference_steps": 3, "guidance_scale": 3.0}
            yield pipeline("a red picture", output_type="np", generator=generator, **options).images[0]

    np.save(file, np.stack([*pictures()]))


def test_diffusers_draws_with_the_merged_weights_and_with_the_file(whole: Path, pipeline: Path, tmp_path: Path) -> None:
    words = [str(pipeline), str(whole / "current_pipeline"), str(tmp_path / "pictures.npy")]
    shared_server().call("tests.integration.test_lora:draw", words, tmp_path / "log")
    merged, loaded, base = np.load(tmp_path / "pictures.npy")
    assert np.abs(merged - loaded).max() < 1e-5 < 1e-3 < np.abs(merged - base).max()
    assert (whole / "samples" / "step_3" / "previews").is_dir()
