"""Memory by strategy, worked out by hand for a model of round numbers."""

from dataclasses import asdict, replace

import pytest

from sd_training.build.memory import Memory, ModelSize, has_weight_copies, standing_memory
from sd_training.config.plan import Layout, Mesh, find_layout
from sd_training.config.schema import DistributedConfig, MeshConfig

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
    has_ema=True,
)
FP32 = replace(SIZE, compute_bytes=4)
BUCKET = 200_000_000


def memory(strategy: str, processes: int, size: ModelSize = SIZE, **options: bool) -> Memory:
    distributed = DistributedConfig(strategy=strategy, **options)
    return standing_memory(size, find_layout(distributed, processes, max(processes // 2, 1)), distributed)


def parts(found: Memory) -> dict[str, int]:
    return {name: count for name, count in asdict(found).items() if count}


def test_one_process_and_copies() -> None:
    whole = {"weights": 4000, "gradients": 4000, "optimizer": 8000, "frozen": 200, "cpu_ema": 4000}
    assert parts(memory("single", 1)) == whole
    assert parts(memory("single", 1, FP32)) == whole
    assert parts(memory("ddp", 8)) == whole | {"cpu_ema": 500}
    assert parts(memory("ddp", 3)) == whole | {"cpu_ema": 4 * 334}
    assert parts(memory("ddp", 8, replace(SIZE, has_ema=False))) == {k: v for k, v in whole.items() if k != "cpu_ema"}


def test_bf16_weights() -> None:
    narrow = replace(SIZE, weight_bytes=2)
    expected = {"weights": 2000, "gradients": 2000, "optimizer": 4000, "frozen": 200, "cpu_ema": 4000}
    assert parts(memory("single", 1, narrow)) == expected


def test_fsdp_cuts_everything_that_is_trained() -> None:
    shard = {"weights": 1000, "gradients": 1000, "optimizer": 2000, "frozen": 200, "cpu_ema": 1000}
    # The root's 200 and two blocks of 200 in bf16; a block's gradient in bf16 and in fp32.
    assert parts(memory("fsdp", 4)) == shard | {"buffers": 2 * (200 + 2 * 200) + (2 + 4) * 200}
    assert parts(memory("fsdp", 4, FP32)) == shard | {"buffers": 4 * 600 + 8 * 200}
    kept = memory("fsdp", 4, reshard_after_forward=False)
    assert parts(kept) == shard | {"buffers": 2 * 1000 + 6 * 200}


def test_hsdp_cuts_inside_a_machine_only() -> None:
    assert memory("hsdp", 8) == memory("fsdp", 4)


def test_fsdp_offload() -> None:
    expected = {"frozen": 200, "buffers": 2400, "cpu_ema": 1000, "cpu_offloaded": 4000}
    assert parts(memory("fsdp", 4, offload_parameters=True)) == expected


def test_the_tensor_axis_cuts_matrices_of_blocks() -> None:
    options = DistributedConfig(mesh=MeshConfig(fsdp=2, tensor=2))
    found = standing_memory(SIZE, find_layout(options, 4, 4), options)
    local = (1000 - 600 // 2) // 2
    shard = {"weights": 4 * local, "gradients": 4 * local, "optimizer": 8 * local, "cpu_ema": 4 * local}
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
    expected = {"weights": weights, "gradients": gradients, "optimizer": 12 * 250, "frozen": 200, "cpu_ema": 1000}
    assert parts(memory(f"deepspeed_{stage}", 4)) == expected | {"buffers": buffers}


@pytest.mark.parametrize(("stage", "copy"), [(1, 4), (2, 4), (3, 0)])
def test_deepspeed_in_fp32(stage: int, copy: int) -> None:
    found = memory(f"deepspeed_{stage}", 4, FP32)
    assert found.optimizer == (8 + copy) * 250
    assert found.weights == (1000 if stage == 3 else 4000)


def test_deepspeed_3_does_not_keep_a_large_model_whole() -> None:
    large = replace(SIZE, trained=10**9, largest_block=10**7)
    found = memory("deepspeed_3", 4, large)
    assert found.buffers == 2 * (BUCKET + 5 * 10**8 + 10**7)


def test_deepspeed_offload() -> None:
    one = memory("deepspeed_1", 4, offload_optimizer=True)
    assert (one.optimizer, one.gradients, one.cpu_offloaded) == (0, 2000, 12 * 250 + 4 * 250)
    two = memory("deepspeed_2", 4, offload_optimizer=True)
    assert (two.weights, two.optimizer, two.gradients, two.cpu_offloaded) == (2000, 0, 0, 12 * 250 + 4 * 250)
    weights = memory("deepspeed_3", 4, offload_parameters=True)
    assert (weights.weights, weights.optimizer, weights.cpu_offloaded) == (0, 3000, 500)
    both = memory("deepspeed_3", 4, offload_optimizer=True, offload_parameters=True)
    assert (both.weights, both.optimizer, both.cpu_offloaded) == (0, 0, 4000 + 500)


def test_totals() -> None:
    found = Memory(1, 20, 300, 4000, buffers=50000, activations=600000, encoding=700000, cpu_ema=8, cpu_offloaded=90)
    assert (found.standing, found.device, found.cpu) == (54321, 754321, 98)
    assert replace(found, encoding=5).device == 654321


def test_who_copies_weights() -> None:
    kinds = ("single", "ddp", "fsdp", "hsdp", "deepspeed_1", "deepspeed_2", "deepspeed_3")
    assert [kind for kind in kinds if has_weight_copies(Layout(kind, Mesh(1, 1, 1)))] == ["single", "ddp"]
