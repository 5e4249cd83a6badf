"""Layer norms that keep activations in bf16, under autocast as it is on CUDA."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from sd_training.build.dry_run import activation_bytes, cuda_autocast
from sd_training.config.schema import ModelConfig
from sd_training.models.execution import narrow_norms
from sd_training.models.family import Family
from tests.unit.models.census import CAST, per_picture
from tests.unit.models.denoiser_steps import load_tiny, loss_and_gradients

EPS = torch.finfo(torch.bfloat16).eps


def types_and_gradient(family: Family, precision: str) -> tuple[set[torch.dtype], Tensor]:
    """Types of what layer norms give, and the gradient of all weights as one vector."""
    found, norms = set[torch.dtype](), [m for m in family.denoiser.modules() if type(m) is nn.LayerNorm]
    hooks = [norm.register_forward_hook(lambda _, given, result: found.add(result.dtype)) for norm in norms]
    with cuda_autocast(precision):
        gradients = loss_and_gradients(family)[1]
    for hook in hooks:
        hook.remove()
    return found, torch.cat([gradient.flatten() for gradient in gradients.values()])


@pytest.mark.parametrize("name", ["stable_diffusion", "sd3", "mmdit_rope"])
def test_what_flows_is_narrow_and_about_as_exact(name: str, root: Path) -> None:
    family = load_tiny(name, root / name)
    keys, (types, exact) = [*family.denoiser.state_dict()], types_and_gradient(family, "no")
    assert types == {torch.float32}
    types, wide = types_and_gradient(family, "bf16")
    assert types == {torch.float32}
    options = (ModelConfig(bf16_norms=is_narrow) for is_narrow in (False, True))
    more, less = (activation_bytes(family, option, (16, 16), 8, "bf16") for option in options)
    assert less < more
    narrow_norms(family.denoiser)
    types, narrow = types_and_gradient(family, "bf16")
    assert types == {torch.bfloat16} and [*family.denoiser.state_dict()] == keys
    assert torch.equal(types_and_gradient(family, "no")[1], exact)
    assert (narrow - exact).norm() < (wide - exact).norm() + EPS * exact.norm()


def test_statistics_are_fp32() -> None:
    """Rounded to bf16, a mean of 100 deviations would be off by up to 0.25 of a deviation."""
    norm = nn.LayerNorm(64)
    with torch.no_grad():
        norm.weight.uniform_(0.5, 2)
        norm.bias.uniform_(-1, 1)
    narrow_norms(norm)
    x = (100 + torch.randn(4, 64)).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        result = norm(x)
    exact = nn.functional.layer_norm(x.double(), [64])
    scaled, bias = exact * norm.weight.double(), norm.bias.double()
    assert result.dtype == torch.bfloat16
    # Weight, bias and result are rounded once, to half of EPS.
    assert ((result - scaled - bias).abs() <= EPS * (scaled.abs() + bias.abs())).all()
    result.float().square().sum().backward()
    assert norm.weight.grad is not None and norm.weight.grad.dtype == torch.float32
    # Why group norms stay: this is also torch's function on CUDA.
    picture, ones = x.view(4, 64, 1, 1), torch.ones(64, dtype=x.dtype)
    assert torch.native_group_norm(picture, ones, ones, 4, 64, 1, 8, 1e-5)[1].dtype == torch.bfloat16


def test_fewer_bytes_are_moved_and_kept() -> None:
    """Of two blocks of the published width; docs/memory.md has the whole networks."""
    (wide, wide_kept), (narrow, narrow_kept) = (
        per_picture("sd3", is_narrow=is_narrow, num_layers=2) for is_narrow in (False, True)
    )
    assert sum(narrow.values()) < 0.75 * sum(wide.values()) and narrow_kept < 0.9 * wide_kept
    assert narrow[CAST] < 0.8 * wide[CAST]
