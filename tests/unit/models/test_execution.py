"""Compilation, memory format and recomputation of real networks."""

import copy
import filecmp
import os
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from diffusers import UNet2DConditionModel
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from sd_training.errors import ConfigError
from sd_training.models.execution import (
    compile_blocks,
    keep_compiled_code,
    recompute_activations,
    require_compiler,
    wants_channels_last,
)
from sd_training.models.family import Family, latent_grid
from tests import makers
from tests.family_makers import PIPELINES
from tests.unit.models.denoiser_steps import activation_bytes, load_tiny, loss_and_gradients, loss_of, saved_bytes

SIZES = [{"height": 16, "width": 16}, {"height": 24, "width": 16}]
ONE_LEVEL = {
    "block_out_channels": [8],
    "down_block_types": ["CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D"],
}


@pytest.fixture(autouse=True)
def nothing_compiled() -> None:
    torch._dynamo.reset()


def graphs_compiled() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


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


def test_one_set_of_graphs_per_size(root: Path) -> None:
    plain, family = (tiny("stable_diffusion", root) for _ in range(2))
    keys, kinds, before = list(family.denoiser.state_dict()), kinds_of_calls(plain), graphs_compiled()
    compile_blocks(family.blocks(), num_sizes=2, backend="aot_eager")
    assert ten_losses(family) == pytest.approx(ten_losses(plain), rel=1e-4)
    assert graphs_compiled() - before == kinds == 8
    assert list(family.denoiser.state_dict()) == keys


def test_the_whole_network_is_one_graph_per_size(root: Path) -> None:
    plain, family, before = tiny("mmdit_rope", root), tiny("mmdit_rope", root), graphs_compiled()
    compile_blocks([family.denoiser], num_sizes=2, backend="eager")
    assert ten_losses(family) == pytest.approx(ten_losses(plain), rel=1e-4)
    assert graphs_compiled() - before == 2


def compile_counts() -> tuple[int, int]:
    """Graphs, and places where a graph breaks."""
    return graphs_compiled(), sum(torch._dynamo.utils.counters["graph_break"].values())


@pytest.mark.parametrize("which", ["full", "blocks"])
@pytest.mark.parametrize("name", [name for name in PIPELINES if name != "z_image"])  # which is not compiled
def test_graphs_breaks_and_recompilations_under_autocast(name: str, which: str, root: Path) -> None:
    """A graph that breaks, or is made again in a later step, would be slow in silence."""
    family, counted = load_tiny(name, root / name), [compile_counts()]
    compile_blocks([family.denoiser] if which == "full" else family.blocks(), num_sizes=1, backend="eager")
    for _ in range(3):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(family)
        loss.backward()
        counted.append(compile_counts())
    (before, breaks), *after = counted
    graphs = 1 if which == "full" else after[0][0] - before
    assert after == [(before + graphs, breaks)] * 3 and 1 <= graphs <= len(family.blocks())


@pytest.mark.parametrize("name", ["stable_diffusion", "sd3", "sana", "qwen_image", "flux2"])
def test_the_encoder_of_the_autoencoder_is_one_graph(name: str, root: Path) -> None:
    family = load_tiny(name, root / name)
    family.vae.requires_grad_(False).eval()
    pixels, (before, breaks) = torch.rand(4, 3, 16, 16) * 2 - 1, compile_counts()
    noise = torch.randn(4, *latent_grid(family.vae).shape(16, 16))
    expected = family.draw_latents(family.moments(pixels, "bf16"), noise)
    compile_blocks([family.vae.encoder], num_sizes=1, backend="eager")
    for _ in range(2):
        torch.testing.assert_close(family.draw_latents(family.moments(pixels, "bf16"), noise), expected)
        assert compile_counts() == (before + 1, breaks)
    chunks = family.draw_latents(family.moments(pixels, "fp32", 2), noise)
    torch.testing.assert_close(chunks, family.draw_latents(family.moments(pixels, "fp32"), noise))


def test_the_budget_of_a_graph(root: Path) -> None:
    sizes = []
    for budget in (0.0, 1.0):
        torch._dynamo.reset()
        plain, family = tiny("mmdit_rope", root), tiny("mmdit_rope", root)
        compile_blocks(family.blocks()[:1], num_sizes=1, backend="aot_eager_decomp_partition", budget=budget)
        sizes.append(saved_bytes(family))
        assert loss_of(family).item() == pytest.approx(loss_of(plain).item(), rel=1e-4)
    assert sizes[0] < sizes[1]


def test_code_is_kept_where_nobody_else_may_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "TORCHINDUCTOR_CACHE_DIR"
    monkeypatch.setenv(name, "chosen by the user")
    keep_compiled_code(tmp_path / "run" / "compiled")
    assert os.environ[name] == "chosen by the user" and not (tmp_path / "run").exists()
    monkeypatch.delenv(name)
    keep_compiled_code(folder := tmp_path / "run" / "compiled")
    assert os.environ.pop(name) == str(folder) and folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match=r"trainer.compile: .*compiled holds code that is run, but others may write"):
        keep_compiled_code(folder)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"trainer.compile: .*compiled cannot be made: Not a directory"):
        keep_compiled_code(tmp_path / "file" / "compiled")
    assert name not in os.environ


@pytest.mark.slow
def test_generated_code_gives_the_same_losses(root: Path) -> None:
    """One feed-forward network: a compiler of C++ takes a second for each kernel, and a block has 26."""

    def part(family: Family) -> list[nn.Module]:
        return [family.blocks()[0].image.mlp]

    plain, family, before = tiny("mmdit_rope", root), tiny("mmdit_rope", root), graphs_compiled()
    compile_blocks(part(family), num_sizes=1)
    assert ten_losses(family, num_sizes=1) == pytest.approx(ten_losses(plain, num_sizes=1), rel=1e-4)
    assert graphs_compiled() - before == 1
    torch._dynamo.reset()  # as in a new process: what was generated is found in the folder
    found = "autograd_cache_hit"
    before = torch._dynamo.utils.counters["aot_autograd"][found]
    again = tiny("mmdit_rope", root)
    compile_blocks(part(again), num_sizes=1)
    loss_and_gradients(again)
    assert torch._dynamo.utils.counters["aot_autograd"][found] == before + 1


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
    compile_blocks(blocks, num_sizes=10, backend="eager")
    for _ in range(2):
        for length in range(2, 12):
            for block in blocks:
                block(torch.ones(length)).sum().backward()
    assert graphs_compiled() - before == 20


def test_pictures_make_no_graphs(root: Path) -> None:
    family = tiny("mmdit_rope", root)
    compile_blocks(family.blocks(), num_sizes=1, backend="eager")
    loss_and_gradients(family)
    compiled = graphs_compiled()
    family.denoiser.eval()
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        loss_of(family, batch=3, height=24)
    family.denoiser.train()
    loss_and_gradients(family)
    assert graphs_compiled() == compiled
    loss_of(family, batch=3)
    assert graphs_compiled() > compiled  # what it would have been


def test_with_recomputation(root: Path) -> None:
    plain, compiled, family = (tiny("mmdit_rope", root) for _ in range(3))
    recompute_activations(family.blocks())
    for each in (compiled, family):
        compile_blocks(each.blocks(), num_sizes=1, backend="aot_eager")
    assert saved_bytes(family) < saved_bytes(compiled)
    assert ten_losses(family, num_sizes=1) == pytest.approx(ten_losses(plain, num_sizes=1), rel=1e-4)


@pytest.mark.usefixtures("process_group")
def test_compiled_under_ddp(root: Path) -> None:
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
    recompute_activations(blocks)
    compile_blocks(blocks, num_sizes=1, backend="aot_eager")
    mesh = dist.init_device_mesh("cpu", (1,))
    for block in [*blocks, family.denoiser]:
        fully_shard(block, mesh=mesh)
    assert ten_losses(family, num_sizes=1) == pytest.approx(ten_losses(plain, num_sizes=1), rel=1e-4)
    assert graphs_compiled() > before


def test_a_copy_is_not_compiled_and_has_its_own_weights(root: Path) -> None:
    family = tiny("mmdit_rope", root)
    compile_blocks(family.blocks(), num_sizes=1, backend="eager")
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
    with pytest.raises(ConfigError, match=r"trainer.compile: needs a compiler \(CXX, no-such-compiler;"):
        require_compiler("cpu")
    monkeypatch.delenv("CXX")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"\(CXX, g\+\+ or clang\+\+ or c\+\+; .*compile=off"):
        require_compiler("cpu")
    with pytest.raises(ConfigError, match=r"a compiler .CC, gcc or clang or cc; "):
        require_compiler("cuda")
    with pytest.raises(ConfigError, match=r"compile_mode: reduce-overhead is CUDA graphs, and this run is on cpu"):
        require_compiler("cpu", "reduce-overhead")


@pytest.mark.parametrize("accelerator", ["cpu", "cuda"])
def test_missing_headers_of_python_are_said_with_the_remedy(
    accelerator: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / name))
    monkeypatch.setenv("CC", sys.executable)
    monkeypatch.setenv("CXX", sys.executable)
    with pytest.raises(ConfigError, match=r"trainer.compile: needs the header files of Python in .*python3-dev"):
        require_compiler(accelerator)


def is_channels_last(tensor: Tensor) -> bool:
    return tensor.is_contiguous(memory_format=torch.channels_last)


def test_auto_is_cuda_and_on_a_cpu_what_is_frozen() -> None:
    assert wants_channels_last("auto", "cuda") and wants_channels_last(True, "cpu")
    assert not wants_channels_last("auto", "cpu") and not wants_channels_last(False, "cuda")
    assert wants_channels_last("auto", "cpu", is_frozen=True)
    assert not wants_channels_last(False, "cpu", is_frozen=True)


def test_convolutions_of_a_unet_work_in_channels_last(tmp_path: Path) -> None:
    plain, family = (load_tiny("stable_diffusion", tmp_path / "pipeline") for _ in range(2))
    family.denoiser.to(memory_format=torch.channels_last)
    inner, layouts = [m for m in family.denoiser.modules() if type(m).__name__ == "ResnetBlock2D"], []
    for block in inner:
        for conv in (block.conv1, block.conv2):
            conv.register_forward_hook(lambda _, given, out: layouts.append(is_channels_last(given[0])))
            conv.register_forward_hook(lambda _, given, out: layouts.append(is_channels_last(out)))
    (loss, gradients), (expected_loss, expected) = loss_and_gradients(family), loss_and_gradients(plain)
    assert len(layouts) == 4 * len(inner) and all(layouts)
    torch.testing.assert_close(loss, expected_loss)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-6)


@torch.no_grad()
def test_convolutions_of_the_autoencoder_work_in_channels_last() -> None:
    vae, pixels, layouts = makers.tiny_vae().eval(), torch.randn(2, 3, 16, 16), []
    expected = vae.encode(pixels).latent_dist.mean
    vae.to(memory_format=torch.channels_last)
    for block in vae.encoder.modules():
        if type(block).__name__ == "ResnetBlock2D":
            block.conv2.register_forward_hook(lambda _, given, out: layouts.append(is_channels_last(given[0])))
    torch.testing.assert_close(vae.encode(pixels).latent_dist.mean, expected, rtol=1e-4, atol=1e-5)
    assert layouts and all(layouts)


@pytest.mark.parametrize("part", ["unet", "vae"])
def test_exports_are_the_same_files(part: str, tmp_path: Path) -> None:
    network = getattr(makers.tiny_pipeline(), part)
    network.save_pretrained(tmp_path / "plain")
    network.to(memory_format=torch.channels_last)
    assert any(is_channels_last(p) and not p.is_contiguous() for p in nn.Module.parameters(network))
    network.save_pretrained(tmp_path / "channels_last")
    names = [path.name for path in (tmp_path / "plain").iterdir()]
    assert "diffusion_pytorch_model.safetensors" in names
    assert filecmp.cmpfiles(tmp_path / "plain", tmp_path / "channels_last", names, shallow=False)[0] == names


def assert_same(family: Family, plain: Family) -> None:
    (loss, gradients), (expected_loss, expected) = loss_and_gradients(family), loss_and_gradients(plain)
    assert torch.equal(loss, expected_loss)
    assert gradients.keys() == expected.keys()
    assert all(torch.equal(gradients[name], expected[name]) for name in expected)
    assert any(gradient.any() for gradient in gradients.values())


@pytest.mark.parametrize("name", PIPELINES)
def test_same_losses_and_gradients_with_less_memory(name: str, root: Path) -> None:
    plain = load_tiny(name, root / name)
    family = load_tiny(name, root / name)
    keys, classes = list(family.denoiser.state_dict()), [type(m) for m in family.denoiser.modules()]
    recompute_activations(family.blocks())
    assert_same(family, plain)
    assert list(family.denoiser.state_dict()) == keys
    assert [type(m) for m in family.denoiser.modules()] == classes
    assert activation_bytes(family) < activation_bytes(plain)


class Counted(nn.Module):
    """A block that counts its calls and drops half of what it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout, self.calls = nn.Linear(64, 64), nn.Dropout(0.5), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.dropout(self.linear(x).relu())


def test_dropout_is_drawn_again_alike() -> None:
    results, plain = [], Counted()
    recomputed = copy.deepcopy(plain)
    recompute_activations([recomputed])
    for block in (plain, recomputed):
        torch.manual_seed(3)
        x = torch.ones(4, 64, requires_grad=True)
        block(x).square().sum().backward()
        results.append((x.grad, block.linear.weight.grad, torch.rand(3)))
    assert (plain.calls, recomputed.calls) == (1, 2)  # forward, and once more in the backward pass
    assert all(torch.equal(first, second) for first, second in zip(*results, strict=True))


def test_without_autograd_it_is_the_plain_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("sd_training.models.execution.checkpoint")
    block = Counted()
    recompute_activations([block])
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


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("name", ["stable_diffusion", "mmdit_rope"])
def test_recomputed_under_ddp(name: str, root: Path) -> None:
    plain, family = (load_tiny(name, root / name) for _ in range(2))
    recompute_activations(family.blocks())
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
@pytest.mark.parametrize("name", ["stable_diffusion", "mmdit_rope"])
def test_under_fsdp(name: str, root: Path) -> None:
    plain, family = (load_tiny(name, root / name) for _ in range(2))
    recompute_activations(family.blocks())
    mesh = dist.init_device_mesh("cpu", (1,))
    for each in (plain, family):
        for block in [*each.blocks(), each.denoiser]:
            fully_shard(block, mesh=mesh)
    assert_same(family, plain)
