"""Blocks that compute in float8, here emulated on the CPU, and what such a run is refused for."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from sd_training.build.models import copy_with_weights
from sd_training.errors import ConfigError
from sd_training.models.execution import compile_blocks, recompute_activations, require_float8, use_float8
from tests.unit.models.denoiser_steps import load_tiny, loss_and_gradients

EPS = torch.finfo(torch.float8_e4m3fn).eps
CHOSEN = {
    "sd3": "21 of 25",
    "pixart": "20 of 20",
    "flux": "17 of 20",
    "mmdit_rope": "19 of 25",
}
"""Of the tiny networks; the others are modulations of the adaptive norms."""


@pytest.mark.parametrize("name", CHOSEN)
def test_weights_stay_and_losses_stay_close(name: str, root: Path) -> None:
    pytest.importorskip("torchao")
    plain, family = load_tiny(name, root / name), load_tiny(name, root / name)
    own, state = dict(family.denoiser.named_parameters()), [*family.denoiser.state_dict()]
    found = use_float8(family.blocks(), "rowwise", is_emulated=True)
    assert found == f"{CHOSEN[name]} linear layers in the blocks compute in float8 (rowwise)"
    now = dict(family.denoiser.named_parameters())
    assert [*now] == [*own] and all(now[key] is own[key] for key in own)  # what optimizer, average and saves work on
    assert [*family.denoiser.state_dict()] == state
    exported = copy_with_weights(family.denoiser, own)
    assert {type(m) for m in exported.modules() if isinstance(m, nn.Linear)} == {nn.Linear}
    (loss, gradients), (_, others) = loss_and_gradients(family), loss_and_gradients(plain)
    whole, other = (torch.cat([g.flatten() for g in found.values()]) for found in (gradients, others))
    assert gradients.keys() == others.keys() and loss.isfinite()
    assert 0 < torch.linalg.vector_norm(whole - other) < EPS * torch.linalg.vector_norm(other)


@pytest.mark.usefixtures("process_group")
def test_compiled_recomputed_and_sharded(root: Path) -> None:
    pytest.importorskip("torchao")
    plain, family = (load_tiny("mmdit_rope", root / "mmdit_rope") for _ in range(2))
    for each in (plain, family):
        use_float8(each.blocks(), "tensorwise", is_emulated=True)
    recompute_activations(blocks := family.blocks())
    breaks = torch._dynamo.utils.counters["graph_break"]
    before = sum(breaks.values())
    compile_blocks(blocks, num_sizes=1, backend="eager")
    mesh = dist.init_device_mesh("cpu", (1,))
    for block in [*blocks, family.denoiser]:
        fully_shard(block, mesh=mesh)
    (loss, gradients), (expected, others) = loss_and_gradients(family), loss_and_gradients(plain)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient.full_tensor(), others[name], rtol=1e-3, atol=1e-6)
    assert sum(breaks.values()) == before


def test_what_a_machine_must_have(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"model.float8: needs a CUDA GPU, and this run is on cpu"):
        require_float8("cpu")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    with pytest.raises(ConfigError, match=r"needs compute capability 8.9 or more, but A100 has 8.0"):
        require_float8("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr("sd_training.models.execution.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs the package torchao; pip install torchao"):
        require_float8("cuda")


def test_layers_of_other_sizes_are_refused() -> None:
    pytest.importorskip("torchao")
    with pytest.raises(ConfigError, match=r"model.float8: no linear layer of the blocks has sizes that are multiples"):
        use_float8([nn.Sequential(nn.Linear(16, 8), nn.Linear(24, 16))], "tensorwise")
