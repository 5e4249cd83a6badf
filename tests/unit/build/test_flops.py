"""FLOPs of a picture against those that a real step executes, and peaks of devices."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from diffusers import DiffusionPipeline
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from sd_training.build.flops import PictureFlops, peak_tflops
from sd_training.build.models import build_model
from sd_training.build.plan import make_plan
from sd_training.config.load import load_config
from sd_training.models.family import TEXT_PARTS
from tests.family_makers import PIPELINES
from tests.integration.training import Interrupted, options, train

BATCH = 2


class CountForward(pl.Callback):
    """Counts what the training step does before its backward pass, and ends the run."""

    def __init__(self) -> None:
        self.counter = FlopCounterMode(display=False)
        self.in_network = 0

    def on_train_batch_start(self, *_: Any) -> None:
        self.counter.__enter__()

    def on_before_backward(self, trainer: pl.Trainer, pl_module: Any, loss: torch.Tensor) -> None:
        self.counter.__exit__(None, None, None)
        parts = self.counter.get_flop_counts()
        self.in_network = sum(parts[type(pl_module.network).__name__].values())
        raise Interrupted


@pytest.mark.parametrize(("name", "make"), PIPELINES.items(), ids=[*PIPELINES])
def test_a_picture_costs_what_a_step_executes(
    name: str, make: Callable[[], DiffusionPipeline], tmp_path: Path, shards_dir: Path
) -> None:
    make().save_pretrained(tmp_path / "pipeline")
    changes = {"model__use_ema": False, "system__batch_size": BATCH, "dataset__params__resolution": 32}
    argv, counted = options(tmp_path / "run", tmp_path / "pipeline", shards_dir, **changes), CountForward()
    with pytest.raises(Interrupted), sdpa_kernel(SDPBackend.MATH):  # the CPU's own kernel is not counted
        train(argv, counted)
    executed = counted.counter.get_total_flops() + 2 * counted.in_network
    trained = build_model(make_plan(load_config(argv)))
    side = 32 // trained.latent_grid.downscale
    picture = PictureFlops(trained)(side, side)
    if not trained.family.has_fixed_text:  # captions are counted at their full length
        assert picture is not None and picture * BATCH > executed
        return
    assert picture is not None and picture * BATCH == executed
    cached = PictureFlops(trained, ("vae", *TEXT_PARTS))(side, side)
    assert cached is not None and cached * BATCH == 3 * counted.in_network


def test_adapters_count_twice_in_text_encoders_too(tmp_path: Path, pipeline_dir: Path, shards_dir: Path) -> None:
    texts = list[float]()
    for is_adapted in (False, True):
        changes = {"model__lora__rank": 2, "model__lora__text_encoder": is_adapted}
        trained = build_model(make_plan(load_config(options(tmp_path / "run", pipeline_dir, shards_dir, **changes))))
        whole, without = (PictureFlops(trained, cached)(8, 8) for cached in ((), TEXT_PARTS))
        assert whole is not None and without is not None
        texts.append(whole - without)
    assert texts[1] == 2 * texts[0] > 0


@pytest.mark.parametrize(
    ("device", "precision", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312.0),
        ("NVIDIA A100-SXM4-80GB", "no", 19.5),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.5),
        ("NVIDIA H100 PCIe", "fp16", 756.0),
        ("NVIDIA L4", "bf16", 121.0),
        ("NVIDIA A10G", "bf16", None),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
    ],
)
def test_the_peak_of_a_device_by_its_name(device: str, precision: str, peak: float | None) -> None:
    assert peak_tflops(device, precision) == peak


def test_tf32_has_a_peak_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert peak_tflops("NVIDIA H200", "no") == 494.7
