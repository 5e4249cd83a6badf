"""Whole runs with recomputation, compilation, channels last and sliced encoding."""

import functools
from pathlib import Path

import pytest
import torch
from diffusers import DiffusionPipeline

import sd_training.models.families.mmdit  # noqa: F401 - makes its class known to diffusers
from sd_training.build import models as network
from sd_training.build.dry_run import describe
from sd_training.build.plan import make_plan
from sd_training.build.run import build_run
from sd_training.config.load import load_config
from sd_training.errors import ConfigError
from tests.family_makers import save_pipeline
from tests.integration.training import (
    CrashAfter,
    Interrupted,
    checkpoint_tensors,
    losses,
    metrics,
    options,
    prepare,
    train,
)


@pytest.fixture(scope="module")
def mmdit_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pipeline("mmdit_rope", tmp_path_factory.mktemp("mmdit") / "pipeline")


@pytest.fixture
def quick_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiles without generating C++, which takes minutes."""
    torch._dynamo.reset()
    monkeypatch.setattr(network, "compile_blocks", functools.partial(network.compile_blocks, backend="aot_eager"))


def test_xformers_is_refused_where_it_cannot_run(mmdit_dir: Path, shards_dir: Path, tmp_path: Path) -> None:
    argv = options(tmp_path / "run", mmdit_dir, shards_dir, model__xformers=True)
    for start in (build_run, describe):
        with pytest.raises(ConfigError, match=r"model.xformers: true, but MMDiTRope has no attention"):
            start(make_plan(load_config(argv)))


def test_float8_is_refused_where_it_cannot_run(
    mmdit_dir: Path, pipeline_dir: Path, shards_dir: Path, tmp_path: Path
) -> None:
    changes = {"model__float8": "rowwise", "model__mixed_precision": "bf16"}
    argv = options(tmp_path / "unet", pipeline_dir, shards_dir, **changes)
    with pytest.raises(ConfigError, match=r"model.float8: is for the blocks of a transformer, and stable_diff"):
        describe(make_plan(load_config(argv)))
    argv = options(tmp_path / "cpu", mmdit_dir, shards_dir, **changes)
    with pytest.raises(ConfigError, match=r"model.float8: needs a CUDA GPU, and this run is on cpu"):
        prepare(argv)


def test_kernels_and_chunks_change_nothing_but_rounding(pipeline_dir: Path, shards_dir: Path, tmp_path: Path) -> None:
    train(options(tmp_path / "plain", pipeline_dir, shards_dir))
    changes = {"model__attention": "math", "model__vae_batch": 3, "trainer__matmul_precision": "high"}
    run = options(tmp_path / "run", pipeline_dir, shards_dir, trainer__cudnn_benchmark=True, **changes)
    try:
        train(run)
        assert torch.get_float32_matmul_precision() == "high" and torch.backends.cudnn.benchmark
        assert not torch.backends.cuda.flash_sdp_enabled()
    finally:
        prepare(options(tmp_path / "next", pipeline_dir, shards_dir))  # which also sets what the next test stands on
    assert torch.get_float32_matmul_precision() == "highest" and not torch.backends.cudnn.benchmark
    assert torch.backends.cuda.flash_sdp_enabled()
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "plain"), rel=1e-4)


@pytest.mark.usefixtures("quick_backend")
def test_a_compiled_run_draws_and_saves(mmdit_dir: Path, shards_dir: Path, tmp_path: Path) -> None:
    previews = {"sampling__every": 2, "sampling__prompts": '["a red picture","b","c"]', "sampling__batch_size": 3}
    changes = {"sampling__num_inference_steps": 2, "experiment__num_examples_to_see": 32, **previews}
    train(options(tmp_path / "plain", mmdit_dir, shards_dir, **changes))
    compiled = {"trainer__compile": True, "model__gradient_checkpointing": True, "trainer__activation_budget": 0.5}
    train(options(tmp_path / "run", mmdit_dir, shards_dir, **changes, **compiled))
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "plain"), rel=1e-4)
    DiffusionPipeline.from_pretrained(tmp_path / "run/current_pipeline", local_files_only=True, low_cpu_mem_usage=False)
    assert (tmp_path / "run/samples/step_4/previews_grid.png").is_file()
    assert checkpoint_tensors(tmp_path / "run", 4).keys() == checkpoint_tensors(tmp_path / "plain", 4).keys()


def test_without_a_compiler_the_run_does_not_start(
    pipeline_dir: Path, shards_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match=r"trainer.compile: needs a compiler"):
        prepare(options(tmp_path / "run", pipeline_dir, shards_dir, trainer__compile=True))


def test_channels_last_and_recomputation_resume_exactly(pipeline_dir: Path, shards_dir: Path, tmp_path: Path) -> None:
    changes = {"trainer__channels_last": True, "model__gradient_checkpointing": True, "model__vae_slicing": True}
    changes |= {"experiment__num_examples_to_see": 32, "experiment__save_every": 2}
    whole, cut = (options(tmp_path / name, pipeline_dir, shards_dir, **changes) for name in ("whole", "cut"))
    run = train(whole)
    laid_out = [p for p in run.module.network.parameters() if p.dim() == 4 and p.shape[2] > 1]
    assert laid_out and all(p.is_contiguous(memory_format=torch.channels_last) for p in laid_out)
    with pytest.raises(Interrupted):
        train(cut, CrashAfter(3))
    train(cut)
    first, second = (checkpoint_tensors(tmp_path / name, 4) for name in ("whole", "cut"))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    train(options(tmp_path / "plain", pipeline_dir, shards_dir, experiment__num_examples_to_see=32))
    assert losses(tmp_path / "whole") == pytest.approx(losses(tmp_path / "plain"), rel=1e-4)
    assert len(metrics(tmp_path / "whole")) == 4


def test_channels_last_is_refused_where_weights_are_cut(pipeline_dir: Path, shards_dir: Path, tmp_path: Path) -> None:
    argv = options(tmp_path / "run", pipeline_dir, shards_dir, distributed__strategy="fsdp")
    load_config(argv)
    with pytest.raises(ConfigError, match=r"trainer.channels_last: true, but fsdp shards contiguous weights only"):
        load_config([*argv, "trainer.channels_last=true"])
