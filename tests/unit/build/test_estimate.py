"""The estimate of `--dry-run`: formulas worked out by hand; activations on fake tensors against real ones."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from sd_training.build.dry_run import (
    AT_MOST,
    FP32_ON_CUDA,
    ModelSize,
    activation_bytes,
    cuda_autocast,
    encoding_bytes,
    fake_copy,
    meta_networks,
    model_size,
    peak_activations,
    run_family,
    run_memory,
    standing_memory,
)
from sd_training.build.plan import make_plan
from sd_training.config.load import load_config
from sd_training.config.plan import find_layout
from sd_training.config.schema import (
    ConditioningConfig,
    DistributedConfig,
    LoraConfig,
    MeshConfig,
    ModelConfig,
    ObjectiveConfig,
)
from sd_training.models.execution import autocast_weights
from sd_training.models.families import load_family
from sd_training.models.family import Family
from sd_training.models.lora import Int8Linear, attach_adapters, narrow_base, round_base
from tests import makers
from tests.family_makers import PIPELINES, save_pipeline


def test_counts_of_a_model(tmp_path: Path) -> None:
    config = load_config(
        [
            "experiment.log_dir=runs",
            "experiment.name=x",
            "experiment.num_examples_to_see=100_000",
            "dataset.type=WebDataset",
            "dataset.params.path=nowhere",
            "dataset.params.resolution=16",
            f"model.pretrained={save_pipeline('stable_diffusion', tmp_path / 'pipeline')}",
            "model.bf16_weights=true",
            "optimizer.stochastic_rounding=true",
        ]
    )
    networks, family = meta_networks(config)
    assert family is not None
    size = model_size(config, networks, family, "bf16")
    blocks = [list(block.parameters()) for block in family.blocks()]
    assert (size.weight_bytes, size.compute_bytes, size.state_bytes, size.ema_bytes) == (2, 2, 8, 0)
    assert model_size(config, networks, family, "no").compute_bytes == 4
    assert size.trained == sum(p.numel() for p in networks["unet"].parameters())
    assert size.frozen == sum(p.numel() for part in ("vae", "text_encoder") for p in networks[part].parameters())
    narrow = [p for part in ("vae", "text_encoder") for p in autocast_weights(networks[part])]
    assert 0 < size.frozen_narrow == sum(p.numel() for p in narrow) < size.frozen == size.frozen_originals
    assert (fp32 := model_size(config, networks, family, "no")).frozen_narrow == fp32.frozen_originals == 0
    assert size.in_blocks == sum(p.numel() for block in blocks for p in block) < size.trained
    assert size.largest_block == max(sum(p.numel() for p in block) for block in blocks)
    named = [pair for block in family.blocks() for pair in block.named_parameters()]
    matrices = [p for name, p in named if p.ndim == 2 and name.split(".")[0] in ("attn1", "attn2", "ff")]
    assert size.block_matrices == sum(p.numel() for p in matrices) > 0
    memory = run_memory(make_plan(config), networks, family)
    standing = sum(memory[name] for name in ("weights", "gradients", "optimizer", "frozen", "buffers"))
    assert memory["sum without activations"] == standing > memory["weights"]
    assert memory[AT_MOST] == standing + max(memory["activations"], memory["or, before them, encoding"])


def test_frozen_weights_beside_adapters(tmp_path: Path) -> None:
    """Are those that a run has, but for the factors of the weights of 8 bits, and biases that are fp32 beside them."""
    model = ModelConfig(
        pretrained=str(save_pipeline("stable_diffusion", tmp_path / "pipeline")),
        lora=LoraConfig(rank=2, base="int8", text_encoder=True),
    )
    words = ["experiment.log_dir=runs", "experiment.name=x", "experiment.num_examples_to_see=100_000"]
    words += ["dataset.type=WebDataset", "dataset.params.path=nowhere", "dataset.params.resolution=16"]
    config = load_config([*words, f"model.pretrained={model.pretrained}"]).replace(model=model)
    size = model_size(config, *meta_networks(config), "bf16")
    family = load_family(model, ObjectiveConfig(), ConditioningConfig(), seed=0)
    vae = 4 * sum(p.numel() for p in family.vae.parameters()) - 2 * sum(p.numel() for p in autocast_weights(family.vae))
    attach_adapters(family, model.lora, seed=0)
    round_base(family.blocks())
    found = 0
    for network in family.trained_networks(True).values():
        narrow_base(network, torch.bfloat16)
        frozen = [p for name, p in network.named_parameters() if not p.requires_grad and not name.endswith(".scale")]
        found += sum(p.nbytes for p in frozen)
    layers = [layer for layer in family.denoiser.modules() if isinstance(layer, Int8Linear)]
    biases = sum(layer.bias.numel() for layer in layers if layer.bias is not None)
    assert 4 * size.frozen - 2 * size.frozen_narrow - 3 * size.frozen_int8 == vae + found - 2 * biases


# --- Weights, gradients and state ---

# 1,000 parameters, 800 of them in blocks of 200, of which 600 are in matrices; 50 frozen; AdamW.
SIZE = ModelSize(
    trained=1000,
    in_blocks=800,
    block_matrices=600,
    largest_block=200,
    frozen=50,
    weight_bytes=4,
    compute_bytes=2,
    state_bytes=8,
    ema_bytes=4,
)
FP32 = replace(SIZE, compute_bytes=4)
BUCKET = 200_000_000


def memory(strategy: str, processes: int, size: ModelSize = SIZE, **options: bool) -> dict[str, int]:
    distributed = DistributedConfig(strategy=strategy, **options)
    return standing_memory(size, find_layout(distributed, processes, max(processes // 2, 1)), distributed)


def parts(found: dict[str, int]) -> dict[str, int]:
    return {name: count for name, count in found.items() if count}


def test_averages_and_frozen_copies_on_the_device() -> None:
    own = replace(SIZE, is_ema_on_device=True, frozen_narrow=40, frozen_int8=5, frozen_originals=45)
    found = memory("ddp", 2, own)
    assert (found["EMA"], "CPU: EMA" in found) == (2000, False)
    assert (found["frozen"], found["CPU: frozen, of rank 0"]) == (200 - 2 * 40 - 3 * 5, 4 * 45)


def test_one_process_and_copies() -> None:
    whole = {"weights": 4000, "gradients": 4000, "optimizer": 8000, "frozen": 200, "CPU: EMA": 4000}
    assert parts(memory("single", 1)) == whole
    assert parts(memory("single", 1, FP32)) == whole
    assert parts(memory("ddp", 8)) == whole | {"CPU: EMA": 500}
    assert parts(memory("ddp", 3)) == whole | {"CPU: EMA": 4 * 334}
    assert parts(memory("ddp", 8, replace(SIZE, ema_bytes=0))) == {k: v for k, v in whole.items() if k != "CPU: EMA"}


def test_bf16_weights() -> None:
    narrow = replace(SIZE, weight_bytes=2)
    expected = {"weights": 2000, "gradients": 2000, "optimizer": 4000, "frozen": 200, "CPU: EMA": 4000}
    assert parts(memory("single", 1, narrow)) == expected


def test_fsdp_cuts_everything_that_is_trained() -> None:
    shard = {"weights": 1000, "gradients": 1000, "optimizer": 2000, "frozen": 200, "CPU: EMA": 1000}
    # The root's 200 and two blocks of 200 in bf16; a block's gradient in bf16 and in fp32.
    assert parts(memory("fsdp", 4)) == shard | {"buffers": 2 * (200 + 2 * 200) + (2 + 4) * 200}
    assert parts(memory("fsdp", 4, FP32)) == shard | {"buffers": 4 * 600 + 8 * 200}
    kept = memory("fsdp", 4, reshard_after_forward=False)
    assert parts(kept) == shard | {"buffers": 2 * 1000 + 6 * 200}


def test_hsdp_cuts_inside_a_machine_only() -> None:
    assert memory("hsdp", 8) == memory("fsdp", 4)


def test_fsdp_offload() -> None:
    expected = {"frozen": 200, "buffers": 2400, "CPU: EMA": 1000, "CPU: offloaded": 4000}
    assert parts(memory("fsdp", 4, offload_parameters=True)) == expected


def test_the_tensor_axis_cuts_matrices_of_blocks() -> None:
    options = DistributedConfig(mesh=MeshConfig(fsdp=2, tensor=2))
    found = standing_memory(SIZE, find_layout(options, 4, 4), options)
    local = (1000 - 600 // 2) // 2
    shard = {"weights": 4 * local, "gradients": 4 * local, "optimizer": 8 * local, "CPU: EMA": 4 * local}
    assert parts(found) == shard | {"frozen": 200, "buffers": 2 * (200 + 2 * 100) + 6 * 100}


@pytest.mark.parametrize(
    ("stage", "weights", "gradients", "buffers"),
    [
        (1, 2000, 2000, 4 * BUCKET),
        (2, 2000, 500, 4 * BUCKET),
        (3, 500, 500, 2 * BUCKET + 2 * 1000),
    ],
)
def test_deepspeed(stage: int, weights: int, gradients: int, buffers: int) -> None:
    """Figure 1 of the ZeRO paper: 2Ψ + 2Ψ + 12Ψ, cut one after the other."""
    expected = {"weights": weights, "gradients": gradients, "optimizer": 12 * 250, "frozen": 200, "CPU: EMA": 1000}
    assert parts(memory(f"deepspeed_{stage}", 4)) == expected | {"buffers": buffers}


@pytest.mark.parametrize(("stage", "copy"), [(1, 4), (2, 4), (3, 0)])
def test_deepspeed_in_fp32(stage: int, copy: int) -> None:
    found = memory(f"deepspeed_{stage}", 4, FP32)
    assert found["optimizer"] == (8 + copy) * 250
    assert found["weights"] == (1000 if stage == 3 else 4000)


def test_deepspeed_3_does_not_keep_a_large_model_whole() -> None:
    large = replace(SIZE, trained=10**9, largest_block=10**7)
    found = memory("deepspeed_3", 4, large)
    assert found["buffers"] == 2 * (BUCKET + 5 * 10**8 + 10**7)


def test_deepspeed_offload() -> None:
    one = memory("deepspeed_1", 4, offload_optimizer=True)
    assert (one["optimizer"], one["gradients"], one["CPU: offloaded"]) == (0, 2000, 12 * 250 + 4 * 250)
    two = memory("deepspeed_2", 4, offload_optimizer=True)
    assert (two["weights"], two["optimizer"], two["gradients"], two["CPU: offloaded"]) == (
        2000,
        0,
        0,
        12 * 250 + 4 * 250,
    )
    weights = memory("deepspeed_3", 4, offload_parameters=True)
    assert (weights["weights"], weights["optimizer"], weights["CPU: offloaded"]) == (0, 3000, 500)
    both = memory("deepspeed_3", 4, offload_optimizer=True, offload_parameters=True)
    assert (both["weights"], both["optimizer"], both["CPU: offloaded"]) == (0, 0, 4000 + 500)


# --- Activations ---

PICTURE = (16, 32)
SAMPLES = 4
DEFAULTS = ModelConfig()


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
        result = run_family(family, PICTURE, samples, is_text_trained)
    assert result
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("samples", [1, SAMPLES])
def test_every_byte_of_every_family(family: Family, precision: str, samples: int) -> None:
    assert activation_bytes(family, DEFAULTS, PICTURE, samples, precision) == really_saved(family, precision, samples)


def test_trained_text_is_counted(unet_family: Family) -> None:
    found = activation_bytes(unet_family, ModelConfig(train_text_encoder=True), PICTURE, SAMPLES, "bf16")
    assert found == really_saved(unet_family, "bf16", SAMPLES, True)
    assert found > activation_bytes(unet_family, DEFAULTS, PICTURE, SAMPLES, "bf16")


def test_narrow_weights_need_no_copies(unet_family: Family) -> None:
    wide = activation_bytes(unet_family, DEFAULTS, PICTURE, SAMPLES, "bf16")
    narrow = activation_bytes(unet_family, DEFAULTS, PICTURE, SAMPLES, "bf16", is_narrow=True)
    parameters = sum(p.numel() for p in unet_family.denoiser.parameters())
    assert 1.2 * parameters < wide - narrow <= 2 * parameters
    assert next(unet_family.denoiser.parameters()).dtype == torch.float32


def test_cuda_keeps_more_of_norms_than_the_cpu(unet_family: Family) -> None:
    """Per sample: the copies of the weights are the same."""

    def on_cpu(samples: int) -> int:
        with FakeTensorMode(), torch.autocast("cpu", torch.bfloat16):
            fake = unet_family.with_parts({"unet": fake_copy(unet_family.denoiser).train()})
            return peak_activations([fake.denoiser], [], lambda: run_family(fake, PICTURE, samples))

    on_cuda = [activation_bytes(unet_family, DEFAULTS, PICTURE, samples, "bf16") for samples in (2, 3)]
    assert 1.2 < (on_cuda[1] - on_cuda[0]) / (on_cpu(3) - on_cpu(2)) < 2


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
        run_family(family.with_parts({family.denoiser_part: fake_copy(family.denoiser)}), PICTURE, 2)
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


WIDTH, ROWS = 32, 5


def chain(count: int, recompute: Callable[[int], bool] = lambda _: False) -> tuple[nn.ModuleList, Any]:
    """Blocks one after the other, some really recomputed."""
    blocks = nn.ModuleList(Block(WIDTH) for _ in range(count))

    def forward() -> torch.Tensor:
        x = torch.zeros(ROWS, WIDTH)
        for number, block in enumerate(blocks):
            # The call of a recomputed block is packed away, so that it is counted by its input alone.
            x = checkpoint(block, x, use_reentrant=False) if recompute(number) else block(x)
        return x

    return blocks, forward


def tracked(count: int, recompute: Callable[[int], bool]) -> int:
    """Activations after the forward pass, by torch's own tracker."""
    with FakeTensorMode():
        blocks, forward = chain(count, recompute)
        tracker = MemTracker()
        tracker.track_external(blocks)
        with tracker:
            result = forward()
            now = next(iter(tracker.get_tracker_snapshot("current").values()))
    del result
    return int(next(v for k, v in now.items() if getattr(k, "value", "") == "Activation"))


TENSOR = 4 * WIDTH * ROWS
"""Bytes of one tensor."""


def peak(count: int, recompute: Any = False, precision: str = "no") -> int:
    blocks, forward = chain(count)
    with cuda_autocast(precision):
        found = peak_activations([blocks], list(blocks) if recompute else [], forward, 0 if precision == "no" else 2)
    return found


def test_recomputed_blocks_keep_their_input() -> None:
    """Each block saves its input, the product (for sin) and the sine (for square); four blocks, twelve tensors at most.

    The input of a recomputed block stays, and during its backward pass its two others exist.
    """
    assert peak(4) == 12 * TENSOR
    assert peak(4, True) == 6 * TENSOR
    # The last result is alive, but the backward pass does not need it.
    assert tracked(4, lambda _: True) - TENSOR == 4 * TENSOR


def test_copies_of_recomputed_weights_live_until_the_forward_pass_ends() -> None:
    copies = 2 * sum(p.numel() for p in chain(3)[0].parameters() if p.ndim > 1)
    inputs = TENSOR + 2 * TENSOR // 2  # the first one is fp32
    assert peak(3, True, precision="bf16") == inputs + copies


def test_recomputation_needs_less(unet_family: Family) -> None:
    plain, recomputed = (
        activation_bytes(unet_family, ModelConfig(gradient_checkpointing=on), PICTURE, 8, "no") for on in (False, True)
    )
    assert recomputed < plain


# --- The autoencoder ---


@pytest.mark.parametrize(("precision", "samples"), [("fp32", 1), ("fp32", 3), ("bf16", 3)])
def test_encoding_needs_what_torch_counts(precision: str, samples: int) -> None:
    vae, size = makers.tiny_vae(), (64, 96)
    with FakeTensorMode(), cuda_autocast(precision), torch.no_grad():
        fake = fake_copy(vae).eval()
        tracker = MemTracker()
        tracker.track_external(fake)
        with tracker:
            fake.encode(torch.zeros(samples, 3, *size))
        own = sum(t.untyped_storage().nbytes() for t in (*fake.parameters(), *fake.buffers()))
    counted = int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]) - own
    assert encoding_bytes(vae, size, samples, precision) == pytest.approx(counted, rel=0.01)
