"""Compiled blocks give the losses of plain ones, with one set of graphs per size and none afterwards.

Most of it runs without a C++ compiler (`aot_eager`): how often is compiled, and what, does not depend on the backend.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from diffusers import UNet2DConditionModel
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from sd_training.errors import ConfigError
from sd_training.models.execution import (
    compile_blocks,
    compile_whole,
    graphs_compiled,
    recompute_activations,
    require_compiler,
    without_compiling,
)
from sd_training.models.family import Family
from tests import makers
from tests.unit.models.denoiser_steps import load_tiny, loss_and_gradients, loss_of, saved_bytes

SIZES = [{"height": 16, "width": 16}, {"height": 24, "width": 16}]
ONE_LEVEL = {
    "block_out_channels": [8],
    "down_block_types": ["CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D"],
}


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    torch._dynamo.reset()


def tiny(name: str, root: Path) -> Family:
    """A UNet of one level, as compiling takes seconds for each kind of block."""
    family = load_tiny(name, root / name)
    if name == "stable_diffusion":
        torch.manual_seed(0)
        family.parts["unet"] = UNet2DConditionModel(**{**makers.UNET_PARAMS, **ONE_LEVEL}).train()
    return family


def ten_losses(family: Family, num_sizes: int = 2) -> list[float]:
    optimizer = torch.optim.AdamW(family.denoiser.parameters(), lr=0.01)
    losses = []
    for step in range(10):
        optimizer.zero_grad()
        loss = loss_of(family, **SIZES[step % num_sizes])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def kinds_of_calls(family: Family) -> int:
    """Blocks that differ in class, settings, weights or inputs, over both sizes: each needs a graph of its own."""
    seen: set[Any] = set()

    def remember(block: nn.Module, inputs: tuple[Any, ...]) -> None:
        shapes = tuple(tuple(p.shape) for p in block.parameters())
        scale = repr(getattr(block, "output_scale_factor", None))  # 1 in the middle of a UNet, 1.0 elsewhere
        seen.add((type(block), scale, shapes, *(tuple(x.shape) for x in inputs if isinstance(x, torch.Tensor))))

    hooks = [block.register_forward_pre_hook(remember) for block in family.blocks()]
    for size in SIZES:
        loss_of(family, **size)
    for hook in hooks:
        hook.remove()
    return len(seen)


@pytest.mark.parametrize("name", ["stable_diffusion", "mmdit_rope"])
def test_one_set_of_graphs_per_size(name: str, root: Path) -> None:
    plain, family = tiny(name, root), tiny(name, root)
    keys, kinds, before = list(family.denoiser.state_dict()), kinds_of_calls(plain), graphs_compiled()
    compile_blocks(family.blocks(), num_sizes=2, backend="aot_eager")
    assert ten_losses(family) == pytest.approx(ten_losses(plain), rel=1e-4)
    assert graphs_compiled() - before == kinds
    assert kinds == {"stable_diffusion": 8, "mmdit_rope": 4}[name]
    assert list(family.denoiser.state_dict()) == keys


def test_the_whole_network_is_one_graph_per_size(root: Path) -> None:
    plain, family, before = tiny("mmdit_rope", root), tiny("mmdit_rope", root), graphs_compiled()
    compile_whole(family.denoiser, num_sizes=2, backend="aot_eager")
    assert ten_losses(family) == pytest.approx(ten_losses(plain), rel=1e-4)
    assert graphs_compiled() - before == 2


@pytest.mark.slow
@pytest.mark.parametrize(("name", "count"), [("stable_diffusion", 2), ("mmdit_rope", 1)])
def test_generated_code_gives_the_same_losses(name: str, count: int, root: Path) -> None:
    """One block of each class, because a compiler of C++ takes its time."""
    plain, family = tiny(name, root), tiny(name, root)
    first = {type(block): block for block in reversed(family.blocks())}
    assert len(first) == count
    before = graphs_compiled()
    compile_blocks(list(first.values()), num_sizes=1)
    assert ten_losses(family, num_sizes=1) == pytest.approx(ten_losses(plain, num_sizes=1), rel=1e-4)
    assert graphs_compiled() - before == count


class Small(nn.Module):
    """torch.compile leaves torch's own modules alone."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[:, None] * self.weight


def test_many_sizes_do_not_reach_the_limit() -> None:
    """torch.compile alone stops at eight graphs."""
    blocks, before = [Small(2), Small(3)], graphs_compiled()
    compile_blocks(blocks, num_sizes=10, backend="aot_eager")
    for _ in range(2):
        for length in range(2, 12):
            for block in blocks:
                block(torch.ones(length)).sum().backward()
    assert graphs_compiled() - before == 20


def test_pictures_make_no_graphs(root: Path) -> None:
    family = tiny("mmdit_rope", root)
    compile_blocks(family.blocks(), num_sizes=1, backend="aot_eager")
    loss_and_gradients(family)
    compiled = graphs_compiled()
    family.denoiser.eval()
    with torch.no_grad(), without_compiling():
        loss_of(family, batch=3, height=24)
    family.denoiser.train()
    loss_and_gradients(family)
    assert graphs_compiled() == compiled
    loss_of(family, batch=3)
    assert graphs_compiled() > compiled  # what it would have been


@pytest.mark.parametrize("is_selective", [False, True])
def test_with_recomputation(is_selective: bool, root: Path) -> None:
    plain, compiled, family = (tiny("mmdit_rope", root) for _ in range(3))
    recompute_activations(family.blocks(), is_selective=is_selective)
    for each in (compiled, family):
        compile_blocks(each.blocks(), num_sizes=1, backend="aot_eager")
    assert saved_bytes(family) < saved_bytes(compiled)
    assert ten_losses(family, num_sizes=1) == pytest.approx(ten_losses(plain, num_sizes=1), rel=1e-4)


@pytest.mark.usefixtures("process_group")
def test_under_ddp(root: Path) -> None:
    plain, family = tiny("mmdit_rope", root), tiny("mmdit_rope", root)
    compile_blocks(family.blocks(), num_sizes=1, backend="aot_eager")
    denoiser, before = family.denoiser, graphs_compiled()
    wrapped = DistributedDataParallel(denoiser, gradient_as_bucket_view=True, static_graph=True)
    wrapped.config = denoiser.config
    family.parts[family.denoiser_part] = wrapped
    assert ten_losses(family, num_sizes=1) == pytest.approx(ten_losses(plain, num_sizes=1), rel=1e-4)
    assert graphs_compiled() - before == 2


@pytest.mark.usefixtures("process_group")
def test_under_fsdp_with_recomputation(root: Path) -> None:
    plain, family = tiny("mmdit_rope", root), tiny("mmdit_rope", root)
    blocks, before = family.blocks(), graphs_compiled()
    recompute_activations(blocks, is_selective=True)
    compile_blocks(blocks, num_sizes=1, backend="aot_eager")
    mesh = dist.init_device_mesh("cpu", (1,))
    for block in [*blocks, family.denoiser]:
        fully_shard(block, mesh=mesh)
    assert ten_losses(family, num_sizes=1) == pytest.approx(ten_losses(plain, num_sizes=1), rel=1e-4)
    assert graphs_compiled() > before


def test_a_copy_is_not_compiled_and_has_its_own_weights(root: Path) -> None:
    family = tiny("mmdit_rope", root)
    compile_blocks(family.blocks(), num_sizes=1, backend="aot_eager")
    loss = loss_of(family)
    family.parts["transformer"] = copy.deepcopy(family.denoiser)
    assert torch.equal(loss_of(family), loss)
    with torch.no_grad():
        family.blocks()[0].image.out.weight.zero_()
    assert not torch.equal(loss_of(family), loss)


def test_a_missing_compiler_is_said_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    require_compiler("cpu")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match=r"trainer.compile: needs a C\+\+ compiler, but CXX=no-such-compiler is"):
        require_compiler("cpu")
    monkeypatch.delenv("CXX")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"none of g\+\+, clang\+\+, c\+\+ is found; install one .*compile=false"):
        require_compiler("cpu")
    with pytest.raises(ConfigError, match="needs a C compiler, but none of gcc, clang, cc is found"):
        require_compiler("cuda")


def test_missing_headers_of_python_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": str(tmp_path)})
    with pytest.raises(ConfigError, match=r"trainer.compile: needs the headers of Python, but .*Python.h does not"):
        require_compiler("cpu")
