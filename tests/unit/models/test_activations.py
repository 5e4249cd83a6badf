"""What a forward pass keeps: fake tensors against real ones, and recomputation against torch's own."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from sd_training.config.objective_schema import ObjectiveConfig
from sd_training.config.schema import ConditioningConfig, ModelConfig
from sd_training.models.activations import (
    OUTSIDE,
    Activations,
    Graph,
    Recorder,
    Saved,
    fake_family,
    family_graph,
    graph_of,
    run_family,
    vae_graph,
)
from sd_training.models.encoding_memory import encoding_bytes_per_sample
from sd_training.models.fake import FP32_ON_CUDA, cuda_autocast
from sd_training.models.families.table import load_family
from sd_training.models.family import Family
from tests import makers
from tests.family_makers import PIPELINES, save_pipeline

SIZE = (16, 32)
SAMPLES = 4


def family_of(name: str, folder: Path) -> Family:
    model = ModelConfig(pretrained=str(save_pipeline(name, folder / name)))
    return load_family(model, ObjectiveConfig(), ConditioningConfig(), seed=0)


@pytest.fixture(scope="module", params=PIPELINES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    return family_of(request.param, tmp_path_factory.mktemp("family"))


@pytest.fixture(scope="module")
def unet_family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return family_of("stable_diffusion", tmp_path_factory.mktemp("family"))


def really_saved(family: Family, precision: str, samples: int, is_text_trained: bool = False) -> int:
    """Bytes that autograd keeps of real tensors; torch alone, without the recorder."""
    networks = list(family.trained_networks(is_text_trained).values())
    own = {t.untyped_storage().data_ptr() for n in networks for t in (*n.train().parameters(), *n.buffers())}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    with cuda_autocast(precision), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run_family(family, SIZE, samples, is_text_trained)
    assert result
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_every_byte_of_every_family(family: Family, precision: str) -> None:
    graph = family_graph(family, SIZE, precision=precision)
    activations = graph.activations()
    assert activations.num_bytes(SAMPLES) == really_saved(family, precision, SAMPLES)
    # A batch of one may be viewed where others are copied.
    assert activations.num_bytes(1) == pytest.approx(really_saved(family, precision, 1), rel=0.03)
    assert graph.num_blocks == len(family.blocks()) > 0


def test_trained_text_is_counted(unet_family: Family) -> None:
    graph = family_graph(unet_family, SIZE, precision="bf16", is_text_trained=True)
    assert graph.activations().num_bytes(SAMPLES) == really_saved(unet_family, "bf16", SAMPLES, True)
    without = family_graph(unet_family, SIZE, precision="bf16").activations().num_bytes(SAMPLES)
    assert graph.activations().num_bytes(SAMPLES) > without


def test_narrow_weights_need_no_copies(unet_family: Family) -> None:
    copies = {
        is_narrow: family_graph(unet_family, SIZE, precision="bf16", has_bf16_weights=is_narrow).activations()
        for is_narrow in (False, True)
    }
    parameters = sum(p.numel() for p in unet_family.denoiser.parameters())
    assert 1.2 * parameters < copies[False].num_bytes(0) <= 2 * parameters
    assert copies[True].num_bytes(0) < 0.05 * parameters  # norms see fp32 copies of theirs
    assert next(unet_family.denoiser.parameters()).dtype == torch.float32


def test_cuda_keeps_more_of_norms_than_the_cpu(unet_family: Family) -> None:
    per_sample = {}
    with FakeTensorMode(), torch.autocast("cpu", torch.bfloat16):
        fake = fake_family(unet_family)
        cpu = graph_of([fake.denoiser.train()], fake.blocks(), lambda n: run_family(fake, SIZE, n))
        per_sample["cpu"] = cpu.activations().num_bytes(1, has_copies=False)
    cuda = family_graph(unet_family, SIZE, precision="bf16")
    per_sample["cuda"] = cuda.activations().num_bytes(1, has_copies=False)
    assert 1.2 < per_sample["cuda"] / per_sample["cpu"] < 2


def fp32_names() -> set[str]:
    """The list in PyTorch's own header."""
    header = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    text = header.read_text(encoding="utf-8").partition("#define AT_FORALL_FP32(")[2]
    return set(re.findall(r"_\((\w+)", text.partition("#define AT_FORALL_DIFFERENT")[0]))


def test_the_fp32_operations_are_those_of_pytorch() -> None:
    assert fp32_names() | {"rms_norm"} >= FP32_ON_CUDA  # which PyTorch 2.11 did not name yet


class Names(TorchFunctionMode):
    """What is called."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found.add(func.__name__.strip("_"))
        return func(*args, **(kwargs or {}))


def test_no_fp32_operation_of_a_family_is_missing(family: Family) -> None:
    names = Names()
    with FakeTensorMode(), names:
        run_family(fake_family(family), SIZE, 2)
    assert "linear" in names.found
    assert names.found & fp32_names() <= FP32_ON_CUDA


# --- Recomputation ---


class Block(nn.Module):
    """Keeps its input, a product and a square."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).sin().square()


WIDTH = 32


def chain(count: int, recompute: Callable[[int], bool] = lambda _: False) -> tuple[nn.ModuleList, Any]:
    """Blocks one after the other, some really recomputed."""
    blocks = nn.ModuleList(Block(WIDTH) for _ in range(count))

    def forward(samples: int) -> torch.Tensor:
        x = torch.zeros(samples, WIDTH)
        for number, block in enumerate(blocks):
            # The call of a recomputed block is packed away, so that it is counted by its input alone.
            x = checkpoint(block, x, use_reentrant=False) if recompute(number) else block(x)
        return x

    return blocks, forward


def tracked(count: int, recompute: Callable[[int], bool], samples: int) -> int:
    """Activations after the forward pass, by torch's own tracker."""
    with FakeTensorMode():
        blocks, forward = chain(count, recompute)
        tracker = MemTracker()
        tracker.track_external(blocks)
        with tracker:
            result = forward(samples)
            now = next(iter(tracker.get_tracker_snapshot("current").values()))
    del result
    return int(next(v for k, v in now.items() if getattr(k, "value", "") == "Activation"))


ROW = 4 * WIDTH
"""Bytes of one sample of one tensor."""


@pytest.mark.parametrize(("every", "kept"), [(1, 4), (2, 8), (3, 8)])
def test_recomputed_blocks_keep_their_input(every: int, kept: int) -> None:
    """Each block saves its input, the product (for sin) and the sine (for square); four blocks, twelve rows at most.

    Recomputed is every n-th, from the first: of these the input stays, and one at work has its two others again.
    """
    blocks, forward = chain(4)
    graph = graph_of([blocks], list(blocks), forward)
    assert graph.activations().num_bytes(5) == 12 * 5 * ROW
    assert graph.activations(True, every).num_bytes(5) == (kept + 2) * 5 * ROW
    after_forward = graph.activations(True, every).moments[0]
    assert after_forward == (0, kept * ROW)
    # The last result is alive, but nobody needs it for the backward pass.
    assert after_forward[1] * 5 == tracked(4, lambda number: number % every == 0, 5) - 5 * ROW


def test_selective_keeps_products() -> None:
    blocks, forward = chain(3)
    graph = graph_of([blocks], list(blocks), forward)
    assert graph.activations("selective").moments == ((0, 6 * ROW), *[(0, 7 * ROW)] * 3)


def test_the_worst_moment_has_all_copies_or_the_largest_block() -> None:
    """Copies of weights are alive until the forward pass ends, recomputed or not."""
    only = frozenset()
    graph = Graph(
        (
            Saved(0, 10, frozenset({OUTSIDE}), only, only),
            Saved(100, 0, frozenset({0}), only, only),
            Saved(0, 7, frozenset({0}), only, only),
            Saved(40, 3, frozenset({1}), only, only),
            Saved(0, 2, only, frozenset({1}), only),
            Saved(5000, 5000, only, only, frozenset({1})),
        ),
        num_blocks=2,
    )
    assert graph.activations().moments == ((140, 20),)
    assert sorted(graph.activations(True).moments) == [(40, 15), (100, 19), (140, 12)]
    assert graph.activations(True).num_bytes(1) == 152
    assert graph.activations(True).num_bytes(100) == 2000
    assert graph.activations(True).num_bytes(100, has_copies=False) == 1900


def test_copies_count_once() -> None:
    activations = Activations(((100, 1), (0, 5)))
    assert activations.num_bytes(10) == 110
    assert activations.num_bytes(30) == 150
    assert activations.num_bytes(10, has_copies=False) == 50


@pytest.mark.parametrize("recompute", ["selective", True])
def test_recomputation_needs_less(unet_family: Family, recompute: Any) -> None:
    graph = family_graph(unet_family, SIZE, precision="no")
    assert graph.activations(recompute).num_bytes(8) < graph.activations().num_bytes(8)
    assert graph.activations(True).num_bytes(8) <= graph.activations(True, 2).num_bytes(8)


def test_hooks_are_gone_afterwards(unet_family: Family) -> None:
    recorder = Recorder([unet_family.denoiser], unet_family.blocks())
    with recorder.recording():
        pass
    assert not any(block._forward_hooks or block._forward_pre_hooks for block in unet_family.blocks())


# --- The autoencoder ---


def test_a_trained_autoencoder() -> None:
    vae = makers.tiny_vae()
    graph = vae_graph(vae, SIZE, precision="no")
    assert graph.num_blocks == 2 * len(vae.config.block_out_channels) + 2
    kept: dict[int, int] = {}
    own = {p.untyped_storage().data_ptr() for p in vae.parameters()}
    alive = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        alive.append(tensor)
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        posterior = vae.train().encode(torch.zeros(3, 3, *SIZE)).latent_dist
        answer = vae.decode(posterior.mean + posterior.std).sample
    assert answer.requires_grad
    assert graph.activations().num_bytes(3) == sum(size for place, size in kept.items() if place not in own)


def test_encoding_grows_with_the_picture() -> None:
    vae = makers.tiny_vae()
    small, large = (encoding_bytes_per_sample(vae, size, "fp32") for size in ((16, 16), (32, 32)))
    assert 3.5 * small < large < 4.5 * small
    # At the worst moment of the first, widest block at least its input and its result are there: 8 channels.
    assert small > 2 * 8 * 16 * 16 * 4
    assert encoding_bytes_per_sample(vae, (32, 32), "bf16") < large
