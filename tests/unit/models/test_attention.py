"""Attention kernels: what each family asks for, what torch chooses for it, and what the option does."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sd_training.errors import ConfigError
from sd_training.models.attention import (
    attention_calls,
    choose_attention,
    chosen_kernel,
    log,
    set_attention,
    use_fast_attention,
    xformers_problems,
)
from sd_training.models.family import Family
from tests.family_makers import PIPELINES
from tests.unit.models.denoiser_steps import load_tiny, loss_of

CPU = torch.device("cpu")
CALLS = {
    "stable_diffusion": {"heads of 2, no mask": 6, "heads of 4, no mask": 2},
    "sdxl": {"heads of 2, no mask": 6, "heads of 4, no mask": 2},
    "sd3": {"heads of 8, no mask": 2},
    "sd3_without_t5": {"heads of 8, no mask": 2},
    "pixart": {"heads of 8, no mask": 2, "heads of 8, a mask": 2},
    "flux": {"heads of 16, no mask": 2},
    "mmdit_rope": {"heads of 8, a mask": 2},
    "sana": {"heads of 8, a mask": 2},
    "qwen_image": {"heads of 16, a mask": 2},
    "flux2": {"heads of 16, no mask": 2},
    "z_image": {"heads of 16, no mask": 1, "heads of 16, a mask": 2},
}
"""Per forward pass of the tiny networks."""


@pytest.fixture(autouse=True)
def torchs_choice() -> Iterator[None]:
    yield
    set_attention("auto")


def counts(family: Family, precision: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for call, count in attention_calls(family, (16, 16), precision).items():
        found[str(call)] = found.get(str(call), 0) + count
    return found


class Kernels(TorchDispatchMode):
    """Counts calls of torch's fused attention on the CPU."""

    fused = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.fused += func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", PIPELINES)
def test_what_each_family_asks_for_and_runs(name: str, root: Path) -> None:
    """Types, widths of heads and masks decide which kernels are eligible on a GPU."""
    family, expected = load_tiny(name, root / name), CALLS[name]
    for precision, dtype in {"no": "float32", "bf16": "bfloat16", "fp16": "float16"}.items():
        assert counts(family, precision) == {f"{dtype}, {call}": count for call, count in expected.items()}
    assert all(p.device == CPU for p in family.denoiser.parameters())
    losses = []
    for option, kernel in {"auto": "flash", "flash": "flash", "math": "math"}.items():
        set_attention(option)
        assert {chosen_kernel(call, CPU) for call in attention_calls(family, (16, 16), "no")} == {kernel}
        with Kernels() as kernels:
            losses.append(loss_of(family).item())
        assert kernels.fused == (sum(expected.values()) if kernel == "flash" else 0)
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-4)


def test_no_mask_where_no_encoder_uses_one(root: Path) -> None:
    family = load_tiny("mmdit_rope", root / "mmdit_rope")
    stored = {name: own.replace(use_mask=False).model_dump() for name, own in family.options.items()}
    without = type(family)(family.parts, family.schedulers, {"text_options": stored})
    assert counts(without, "bf16") == {"bfloat16, heads of 8, no mask": 2}


def test_the_log_says_which_kernels_run(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    family = load_tiny("pixart", root / "pixart")
    with caplog.at_level(logging.INFO, log.name):
        choose_attention(family, "math", [(16, 16), (8, 8)], "bf16", CPU)
    assert [record.getMessage() for record in caplog.records if record.name == log.name] == [
        "attention of PixArtTransformer2DModel on cpu, calls per forward pass: "
        "2 × math (bfloat16, heads of 8, no mask), 2 × math (bfloat16, heads of 8, a mask)"
    ]


@pytest.mark.parametrize("option", ["cudnn", "efficient"])
def test_a_kernel_of_another_device_is_refused(option: str, root: Path) -> None:
    family = load_tiny("flux", root / "flux")
    with pytest.raises(ConfigError, match=rf"model.attention: {option} can run no attention of Flux.* on cpu, .*auto"):
        choose_attention(family, option, [(16, 16)], "bf16", CPU)
    assert {chosen_kernel(call, CPU) for call in attention_calls(family, (16, 16), "bf16")} == {"flash"}


def test_xformers_needs_cuda(root: Path) -> None:
    family = load_tiny("flux", root / "flux")
    with pytest.raises(ConfigError, match=r"model.attention: xformers cannot run here .there is no CUDA device.; use"):
        choose_attention(family, "xformers", [(16, 16)], "bf16", CPU)


def denoiser(family: str) -> torch.nn.Module:
    parts = PIPELINES[family]().components
    return parts["unet"] if "unet" in parts else parts["transformer"]


@pytest.mark.parametrize("family", PIPELINES)
def test_a_network_without_the_hook_is_refused(family: str) -> None:
    problems = xformers_problems(denoiser(family))
    if family == "mmdit_rope":
        [problem] = problems
        assert problem.startswith("model.xformers: true, but MMDiTRope has no attention")
        assert problem.endswith("set model.xformers=false")
    else:
        assert problems == []


def test_the_log_says_what_runs(caplog: pytest.LogCaptureFixture) -> None:
    unet = denoiser("stable_diffusion")
    with caplog.at_level(logging.INFO, log.name):
        use_fast_attention(unet, torch.device("cpu"))
        assert caplog.messages == [
            "model.xformers: UNet2DConditionModel runs on PyTorch's fused attention instead (there is no CUDA device)"
        ]
        if not torch.cuda.is_available():  # a device that is not there, as a broken installation of xformers
            use_fast_attention(unet, torch.device("cuda"))
            assert "fused attention instead (" in caplog.messages[1]
            assert "no CUDA device" not in caplog.messages[1]
