"""Bytes that one process needs, by strategy: pure arithmetic on counts.

Ψ is the number of trained parameters, N of processes that share them. Where two processes differ by rounding, this is
the larger. Names and formulas follow Rajbhandari et al. 2020 (ZeRO, arXiv:1910.02054, figure 1 and section 3.1).
"""

from dataclasses import dataclass, replace

from sd_training.config.plan import Layout
from sd_training.config.schema import DistributedConfig

FP32_BYTES = 4
DEEPSPEED_BUCKET = 200_000_000
"""Numbers in a bucket of gradients: `reduce_bucket_size` of Lightning's DeepSpeedStrategy."""
DEEPSPEED_REUSE = 1_000_000_000
"""Weights used again within so many numbers stay whole: DeepSpeed's `stage3_max_reuse_distance`."""


@dataclass(frozen=True)
class ModelSize:
    """What is trained and what stands beside it, and what one number of each takes."""

    trained: int
    """Trained parameters, Ψ."""
    in_blocks: int
    """Of these, in the repeated blocks; the rest is the root."""
    block_matrices: int
    """Of these, in tensors that the tensor axis can cut."""
    largest_block: int
    """Parameters of the largest block."""
    frozen: int
    """Frozen parameters; they are whole on every process, in fp32."""
    weight_bytes: int
    """Of one trained weight as it is stored: 4, or 2 with `model.bf16_weights`."""
    compute_bytes: int
    """Of one weight as the forward pass sees it: 2 under mixed precision, else 4."""
    state_bytes: int
    """Of the optimizer's state, per parameter."""
    has_ema: bool


@dataclass(frozen=True)
class Memory:
    """Bytes of one process, by purpose."""

    weights: int
    gradients: int
    optimizer: int
    """State of the optimizer, and DeepSpeed's fp32 weights."""
    frozen: int
    buffers: int = 0
    """Whole weights and gradients that a sharded run gathers for a moment."""
    activations: int = 0
    """What the backward pass needs."""
    encoding: int = 0
    """The autoencoder at work, before there are activations."""
    cpu_ema: int = 0
    cpu_offloaded: int = 0
    """Weights, gradients and optimizer state in CPU memory."""

    @property
    def standing(self) -> int:
        """On the device, without activations."""
        return self.weights + self.gradients + self.optimizer + self.frozen + self.buffers

    @property
    def device(self) -> int:
        """On the device at the worst moment."""
        return self.standing + max(self.activations, self.encoding)

    @property
    def cpu(self) -> int:
        """In CPU memory, without what the loader and the libraries take."""
        return self.cpu_ema + self.cpu_offloaded


def has_weight_copies(layout: Layout) -> bool:
    """Whether autocast makes 2-byte copies of the weights; FSDP2 and DeepSpeed hand it 2-byte weights."""
    return layout.strategy in ("single", "ddp")


def standing_memory(size: ModelSize, layout: Layout, options: DistributedConfig) -> Memory:
    """Everything but activations and encoding."""
    match layout.strategy:
        case "single" | "ddp":
            return _replicated(size, layout)
        case "fsdp" | "hsdp":
            return _fsdp(size, layout, options)
        case _:
            return _deepspeed(size, layout, options)


def _replicated(size: ModelSize, layout: Layout) -> Memory:
    """Everything everywhere, the baseline of ZeRO's figure 1. With `gradient_as_bucket_view` the gradients are views of
    DDP's buckets, so there is no second copy of them. The average is split over the processes."""
    weights = size.weight_bytes * size.trained
    # A run in bf16 keeps the optimizer's state in bf16 too.
    state = size.state_bytes * size.trained * size.weight_bytes // FP32_BYTES
    frozen = FP32_BYTES * size.frozen
    return Memory(weights, weights, state, frozen, cpu_ema=_ema(size, size.trained, layout.mesh.data))


def _fsdp(size: ModelSize, layout: Layout, options: DistributedConfig) -> Memory:
    """Weights, gradients and state are cut over the fsdp axis, Pos+g+p of ZeRO's figure 1; matrices of blocks over the
    tensor axis before that (Shoeybi et al. 2019, arXiv:1909.08053, section 3)."""
    share, tensor = layout.mesh.fsdp, layout.mesh.tensor
    cut = size.block_matrices - _part(size.block_matrices, tensor)
    local = size.trained - cut
    weights, state = FP32_BYTES * _part(local, share), size.state_bytes * _part(local, share)
    whole = Memory(
        weights,
        weights,
        state,
        FP32_BYTES * size.frozen,
        buffers=_fsdp_buffers(size, local, tensor, options.reshard_after_forward),
        cpu_ema=_ema(size, local, share),
    )
    if not options.offload_parameters:
        return whole
    return replace(whole, weights=0, gradients=0, optimizer=0, cpu_offloaded=2 * weights + state)


def _fsdp_buffers(size: ModelSize, local: int, tensor: int, reshard: bool) -> int:
    """The root's weights stay gathered; of the blocks, the one at work and the next (Zhao et al. 2023,
    arXiv:2304.11277, section 3.3.2), and the gradient of one, as it was computed and in fp32 to be reduced."""
    root, block = size.trained - size.in_blocks, _part(size.largest_block, tensor)
    gathered = size.compute_bytes * (root + 2 * block if reshard else local)
    return gathered + (size.compute_bytes + FP32_BYTES) * block


def _deepspeed(size: ModelSize, layout: Layout, options: DistributedConfig) -> Memory:
    """ZeRO's figure 1: Pos cuts the optimizer's state and the fp32 weights, Pos+g the gradients, Pos+g+p the weights.

    Weights and gradients have the type of the forward pass. An fp32 run keeps a second copy of the weights too, but in
    stage 3 (deepspeed/runtime/zero/stage_1_and_2.py and stage3.py, 0.19).
    """
    stage, share = int(layout.strategy[-1]), layout.mesh.data
    narrow, part = size.compute_bytes, _part(size.trained, share)
    has_master = narrow < FP32_BYTES or stage < 3
    memory = Memory(
        weights=narrow * (part if stage == 3 else size.trained),
        gradients=narrow * (part if stage >= 2 else size.trained),
        optimizer=(size.state_bytes + FP32_BYTES * has_master) * part,
        frozen=FP32_BYTES * size.frozen,
        buffers=_deepspeed_buffers(size, stage),
        cpu_ema=_ema(size, size.trained, share),
    )
    return _offloaded(memory, stage, part, options)


def _deepspeed_buffers(size: ModelSize, stage: int) -> int:
    """Stages 1 and 2 fill one bucket of gradients while another is reduced (`overlap_comm`); stage 3 has one, and keeps
    weights whole that the backward pass soon uses again: the last half of the reuse distance, and the block at work."""
    if stage < 3:
        return 2 * size.compute_bytes * DEEPSPEED_BUCKET
    whole = min(size.trained, DEEPSPEED_REUSE // 2 + size.largest_block)
    return size.compute_bytes * (DEEPSPEED_BUCKET + whole)


def _offloaded(memory: Memory, stage: int, part: int, options: DistributedConfig) -> Memory:
    """With the optimizer, the gradients of its part go to the CPU, in fp32 (Ren et al. 2021, ZeRO-Offload,
    arXiv:2101.06840, section 3); from stage 2 on the device keeps no others."""
    if options.offload_optimizer:
        moved = memory.optimizer + FP32_BYTES * part
        memory = replace(memory, optimizer=0, gradients=0 if stage >= 2 else memory.gradients, cpu_offloaded=moved)
    if options.offload_parameters:
        memory = replace(memory, weights=0, cpu_offloaded=memory.cpu_offloaded + memory.weights)
    return memory


def _ema(size: ModelSize, local: int, share: int) -> int:
    """The average is fp32 in CPU memory, whatever the weights are."""
    return FP32_BYTES * _part(local, share) if size.has_ema else 0


def _part(count: int, share: int) -> int:
    """The largest share."""
    return -(-count // share)
