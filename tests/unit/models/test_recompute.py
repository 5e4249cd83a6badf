"""Recomputation changes memory and nothing else."""

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from sd_training.models.execution import is_kept, recompute_activations
from sd_training.models.family import Family
from tests.family_makers import PIPELINES
from tests.unit.models.denoiser_steps import activation_bytes, load_tiny, loss_and_gradients, loss_of

MODES = {"whole": False, "selective": True}


def assert_same(family: Family, plain: Family) -> None:
    (loss, gradients), (expected_loss, expected) = loss_and_gradients(family), loss_and_gradients(plain)
    assert torch.equal(loss, expected_loss)
    assert gradients.keys() == expected.keys()
    assert all(torch.equal(gradients[name], expected[name]) for name in expected)
    assert any(gradient.any() for gradient in gradients.values())


@pytest.mark.parametrize("name", PIPELINES)
def test_same_losses_and_gradients_with_less_memory(name: str, root: Path) -> None:
    plain = load_tiny(name, root / name)
    taken = {"none": activation_bytes(plain)}
    for mode, is_selective in MODES.items():
        family = load_tiny(name, root / name)
        keys, classes = list(family.denoiser.state_dict()), [type(m) for m in family.denoiser.modules()]
        recompute_activations(family.blocks(), is_selective=is_selective)
        assert_same(family, plain)
        taken[mode] = activation_bytes(family)
        assert list(family.denoiser.state_dict()) == keys
        assert [type(m) for m in family.denoiser.modules()] == classes
    assert taken["whole"] < taken["selective"] < taken["none"], taken


def test_every_second_block_is_between_all_and_none(root: Path) -> None:
    taken = []
    for every in (1, 2, 100):
        family = load_tiny("stable_diffusion", root / "stable_diffusion")
        blocks = family.blocks()
        recompute_activations(blocks, every=every)
        assert ["forward" in vars(block) for block in blocks] == [i % every == 0 for i in range(len(blocks))]
        taken.append(activation_bytes(family))
    plain = activation_bytes(load_tiny("stable_diffusion", root / "stable_diffusion"))
    assert taken[0] < taken[1] < taken[2] < plain


class Counted(nn.Module):
    """A block that counts its calls and drops half of what it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout, self.calls = nn.Linear(64, 64), nn.Dropout(0.5), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.dropout(self.linear(x).relu())


@pytest.mark.parametrize("is_selective", MODES.values(), ids=MODES)
def test_dropout_is_drawn_again_alike(is_selective: bool) -> None:
    results, plain = [], Counted()
    recomputed = copy.deepcopy(plain)
    recompute_activations([recomputed], is_selective=is_selective)
    for block in (plain, recomputed):
        torch.manual_seed(3)
        x = torch.ones(4, 64, requires_grad=True)
        block(x).square().sum().backward()
        results.append((x.grad, block.linear.weight.grad, torch.rand(3)))
    assert (plain.calls, recomputed.calls) == (1, 2)  # forward, and once more in the backward pass
    assert all(torch.equal(first, second) for first, second in zip(*results, strict=True))


@pytest.mark.parametrize("is_selective", MODES.values(), ids=MODES)
def test_without_autograd_it_is_the_plain_block(is_selective: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("sd_training.models.execution.checkpoint")
    block = Counted()
    recompute_activations([block], is_selective=is_selective)
    with torch.no_grad():
        assert block(torch.ones(1, 64)).grad_fn is None
    with torch.inference_mode():
        block(torch.ones(1, 64))
    assert block.calls == 2


def test_a_copy_runs_its_own_weights() -> None:
    block = Counted().eval()
    recompute_activations([block])
    twin = copy.deepcopy(block)
    with torch.no_grad():
        twin.linear.weight.zero_()
        twin.linear.bias.zero_()
    assert not twin(torch.ones(1, 64)).any()
    assert block(torch.ones(1, 64)).any()


def test_what_selective_keeps() -> None:
    aten = torch.ops.aten
    for operation in (aten.mm.default, aten.addmm.default, aten.convolution.default):
        assert is_kept(operation)
    for kernel in ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu"):
        assert is_kept(getattr(aten, f"_scaled_dot_product_{kernel}").default)
    assert is_kept(aten._flash_attention_forward.default)
    assert is_kept("xformers_flash.flash_fwd.default")
    assert is_kept("xformers.efficient_attention_forward_cutlass.default")
    for operation in (aten.bmm.default, aten.silu.default, aten.native_layer_norm.default, aten.mul.Tensor):
        assert not is_kept(operation)
    assert not is_kept("xformers_flash.flash_bwd.default")


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("is_selective", MODES.values(), ids=MODES)
@pytest.mark.parametrize("name", ["stable_diffusion", "mmdit_rope"])
def test_under_ddp(name: str, is_selective: bool, root: Path) -> None:
    plain, family = (load_tiny(name, root / name) for _ in range(2))
    recompute_activations(family.blocks(), is_selective=is_selective)
    expected = loss_and_gradients(plain)[1]
    denoiser = family.denoiser
    wrapped = DistributedDataParallel(denoiser, gradient_as_bucket_view=True, static_graph=True)
    for _ in range(2):  # a static graph is learned in the first step
        denoiser.zero_grad()
        family.parts[family.denoiser_part] = wrapped
        loss = loss_with_config(family, denoiser)
        loss.backward()
    for parameter_name, parameter in denoiser.named_parameters():
        assert torch.equal(parameter.grad, expected[parameter_name]), parameter_name


def loss_with_config(family: Family, denoiser: nn.Module) -> torch.Tensor:
    """`loss_of` of a wrapped denoiser, whose settings families read."""
    family.denoiser.config = denoiser.config
    return loss_of(family)


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("is_selective", MODES.values(), ids=MODES)
@pytest.mark.parametrize("name", ["stable_diffusion", "mmdit_rope"])
def test_under_fsdp(name: str, is_selective: bool, root: Path) -> None:
    plain, family = (load_tiny(name, root / name) for _ in range(2))
    recompute_activations(family.blocks(), is_selective=is_selective)
    mesh = dist.init_device_mesh("cpu", (1,))
    for each in (plain, family):
        for block in [*each.blocks(), each.denoiser]:
            fully_shard(block, mesh=mesh)
    assert_same(family, plain)
