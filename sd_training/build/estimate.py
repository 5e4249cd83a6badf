"""Memory and compute of a run, estimated before it starts, for `--dry-run`.

Weights, gradients and optimizer state follow from formulas of the strategy. Activations are the tensors that autograd
saves while the real network runs on fake tensors, which have shapes, types and storages but no memory. Ψ is the number
of trained parameters. The formulas follow Rajbhandari et al. 2020 (ZeRO, arXiv:1910.02054, figure 1 and section 3.1);
where two processes differ by rounding, the larger one counts.
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

from sd_training.build.models import vae_precision
from sd_training.config.plan import Layout
from sd_training.config.schema import Config, DistributedConfig, ModelConfig
from sd_training.data.order.buckets import training_sizes
from sd_training.errors import ConfigError
from sd_training.models.families.table import load_family
from sd_training.models.family import Family, latent_grid
from sd_training.models.load import effective_part, load_part
from sd_training.types import Conditioning, NoisedBatch

FP32_BYTES = 4
STATE_BYTES = {
    "adamw": 8,
    "adafactor": 1,
    "adamw_8bit": 2,
    "lion": 4,
    "prodigy": 16,
    "schedule_free_adamw": 8,
    "muon": 8,
}
"""Optimizer → bytes of state per parameter, at most; of adafactor, which keeps rows and columns, of large matrices."""
DEEPSPEED_BUCKET = 200_000_000
"""Numbers in a bucket of gradients: `reduce_bucket_size` of Lightning's DeepSpeedStrategy."""
DEEPSPEED_REUSE = 1_000_000_000
"""Weights used again within so many numbers stay gathered: DeepSpeed's `stage3_max_reuse_distance`."""
DEVICE = torch.device("cpu")
"""Of the fake tensors: PyTorch built for the CPU cannot index fake CUDA tensors."""


@dataclass(frozen=True)
class ModelSize:
    """Numbers of parameters, and bytes per parameter."""

    trained: int
    """Ψ."""
    in_blocks: int
    """Of these, in the repeated blocks; the rest is the root."""
    block_matrices: int
    """Of these, in matrices that the tensor axis shards."""
    largest_block: int
    frozen: int
    """Frozen parameters: replicated on every process, in fp32."""
    weight_bytes: int
    """Of one trained weight as it is stored: 4, or 2 with `model.bf16_weights`."""
    compute_bytes: int
    """Of one weight in the forward pass: 2 under mixed precision, else 4."""
    state_bytes: int
    """Of the optimizer's state, per parameter."""
    ema_bytes: int
    """Of the EMA, per parameter: fp32 in CPU memory, whatever the weights are; 0 without one."""


@dataclass(frozen=True)
class Memory:
    """Bytes of one process, by purpose."""

    weights: int
    gradients: int
    optimizer: int
    """State of the optimizer, and DeepSpeed's fp32 weights."""
    frozen: int
    buffers: int = 0
    """Weights and gradients that a sharded run gathers temporarily."""
    activations: int = 0
    encoding: int = 0
    """Of the frozen autoencoder, which runs before there are activations."""
    cpu_ema: int = 0
    cpu_offloaded: int = 0
    """Weights, gradients and optimizer state in CPU memory."""

    @property
    def standing(self) -> int:
        """On the device, without activations."""
        return self.weights + self.gradients + self.optimizer + self.frozen + self.buffers

    @property
    def device(self) -> int:
        """On the device at the peak."""
        return self.standing + max(self.activations, self.encoding)


def meta_networks(config: Config) -> tuple[dict[str, Any], Family | None]:
    """Networks on the meta device by part name, and their family; an autoencoder that is trained has none.

    Raises:
        ConfigError: parts cannot be made or do not fit together.
    """
    if config.model.train == "vae":
        return {"vae": load_part("vae", effective_part(config.model, "vae"), seed=0, meta=True)}, None
    family = load_family(config.model, config.objective, config.conditioning, seed=0, meta=True)
    return family.networks(), family


def parameter_counts(networks: Mapping[str, nn.Module]) -> dict[str, int]:
    """Network → parameters."""
    return {name: sum(p.numel() for p in network.parameters()) for name, network in networks.items()}


def trained_names(config: Config, family: Family | None) -> set[str]:
    """Names of the networks that are trained."""
    return set(family.trained_networks(config.model.train_text_encoder)) if family else {"vae"}


def largest_picture(config: Config) -> tuple[int, int]:
    """Height and width of the largest bucket [pixels]."""
    return max(training_sizes(config.dataset.params).sizes, key=lambda size: size[0] * size[1])


def run_memory(
    config: Config, networks: Mapping[str, Any], family: Family | None, layout: Layout, precision: str
) -> Memory:
    """Bytes of one process in a step at the largest picture; takes seconds.

    Args:
        networks, family: as `meta_networks` gives them.
        precision: no, bf16 or fp16.
    """
    model, samples, picture = config.model, config.system.batch_size, largest_picture(config)
    standing = standing_memory(model_size(config, networks, family, precision), layout, config.distributed)
    if family is None:
        return replace(standing, activations=vae_activations(networks["vae"], model, picture, samples, precision))
    # FSDP2 and DeepSpeed pass 2-byte weights to autocast, which then makes no copies of them.
    is_narrow = model.bf16_weights or (layout.strategy not in ("single", "ddp") and precision != "no")
    side = int(family.vae.tile_sample_min_size) if model.vae_tiling else max(picture)  # tiles are encoded one by one
    encoded, at_once = (min(side, picture[0]), min(side, picture[1])), 1 if model.vae_slicing else samples
    return replace(
        standing,
        activations=family_activations(family, model, picture, samples, precision, is_narrow),
        encoding=encoding_bytes(family.vae, encoded, at_once, vae_precision(model, precision)),
    )


def model_size(config: Config, networks: Mapping[str, Any], family: Family | None, precision: str) -> ModelSize:
    """Counts of the networks of a run."""
    counts, trained = parameter_counts(networks), trained_names(config, family)
    blocks = [sum(p.numel() for p in block.parameters()) for block in (family.blocks() if family else [])]
    return ModelSize(
        trained=sum(counts[name] for name in trained),
        in_blocks=sum(blocks),
        block_matrices=_tensor_parallel_elements(family) if family else 0,
        largest_block=max(blocks, default=0),
        frozen=sum(count for name, count in counts.items() if name not in trained),
        weight_bytes=2 if config.model.bf16_weights else 4,
        compute_bytes=4 if precision == "no" else 2,
        state_bytes=STATE_BYTES[config.optimizer.name],
        ema_bytes=FP32_BYTES * config.model.use_ema,
    )


def _tensor_parallel_elements(family: Family) -> int:
    try:
        plans = [(block, family.tensor_plan(block, 1)) for block in family.blocks()]  # 1 changes nothing in the blocks
    except ConfigError:
        return 0
    layers = (block.get_submodule(name) for block, plan in plans for name in plan)
    return sum(p.numel() for layer in layers for p in layer.parameters(recurse=False) if p.ndim == 2)


def standing_memory(size: ModelSize, layout: Layout, options: DistributedConfig) -> Memory:
    """Everything but activations and encoding.

    Stages as in ZeRO's figure 1: 0 (one process, DDP) shards nothing, 1 the optimizer's state, 2 the gradients as well,
    3 (also FSDP) the weights as well; before that the tensor axis shards matrices of blocks (Shoeybi et al. 2019,
    arXiv:1909.08053, section 3). With `gradient_as_bucket_view` DDP's buckets are the gradients. bf16 weights have bf16
    state. DeepSpeed's weights and gradients have the type of the forward pass, and it keeps fp32 weights beside them,
    in stages 1 and 2 also of an fp32 run (deepspeed/runtime/zero/stage_1_and_2.py and stage3.py, 0.19). With an
    offloaded optimizer the gradients of its shard are on the CPU in fp32 (Ren et al. 2021, arXiv:2101.06840, section
    3).
    """
    is_zero, mesh = layout.strategy.startswith("deepspeed"), layout.mesh
    stage = int(layout.strategy[-1]) if is_zero else 3 if layout.strategy in ("fsdp", "hsdp") else 0
    local = size.trained - size.block_matrices + _shard(size.block_matrices, mesh.tensor)
    shard = _shard(local, mesh.data if is_zero or stage == 0 else mesh.fsdp)
    stored = size.compute_bytes if is_zero else size.weight_bytes
    state = size.state_bytes * size.weight_bytes // FP32_BYTES
    state += FP32_BYTES * (is_zero and (stored < FP32_BYTES or stage < 3))
    block = _shard(size.largest_block, mesh.tensor)
    if is_zero and stage < 3:  # one bucket of gradients is filled while another is reduced (`overlap_comm`)
        buffers = size.compute_bytes * 2 * DEEPSPEED_BUCKET
    elif is_zero:  # one bucket; gathered weights that are used again soon (half of the distance), and the current block
        kept = min(size.trained, DEEPSPEED_REUSE // 2 + size.largest_block)
        buffers = size.compute_bytes * (DEEPSPEED_BUCKET + kept)
    else:  # the root and two blocks (Zhao et al. 2023, arXiv:2304.11277, section 3.3.2), the gradient of one as it was
        # computed and in fp32 to be reduced
        kept = size.trained - size.in_blocks + 2 * block if options.reshard_after_forward else local
        buffers = size.compute_bytes * kept + (size.compute_bytes + FP32_BYTES) * block
    memory = Memory(
        weights=stored * (shard if stage == 3 else local),
        gradients=stored * (shard if stage >= 2 else local),
        optimizer=state * (shard if stage else local),
        frozen=FP32_BYTES * size.frozen,
        buffers=buffers if stage else 0,
        cpu_ema=size.ema_bytes * shard,
    )
    if options.offload_parameters and not is_zero:
        moved = memory.weights + memory.gradients + memory.optimizer
        return replace(memory, weights=0, gradients=0, optimizer=0, cpu_offloaded=moved)
    if options.offload_optimizer:
        moved = memory.optimizer + FP32_BYTES * shard
        memory = replace(memory, optimizer=0, gradients=0 if stage >= 2 else memory.gradients, cpu_offloaded=moved)
    if options.offload_parameters:
        memory = replace(memory, weights=0, cpu_offloaded=memory.cpu_offloaded + memory.weights)
    return memory


def _shard(count: int, shards: int) -> int:
    return -(-count // shards)


def family_activations(
    family: Family, model: ModelConfig, size: tuple[int, int], samples: int, precision: str, is_narrow: bool = False
) -> int:
    """`peak_activations` of a family's training step, without its loss.

    Args:
        family: with or without weights; it is not changed.
        model: options of recomputation and of what is trained.
        size: height and width [pixels].
        samples: micro-batch.
        precision: no, bf16 or fp16.
        is_narrow: the trained weights have 2 bytes.
    """
    with FakeTensorMode(), cuda_autocast(precision):
        trained = {n: fake_copy(net).train() for n, net in family.trained_networks(model.train_text_encoder).items()}
        for parameter in (p for network in trained.values() for p in network.parameters() if is_narrow):
            parameter.data = parameter.data.to(torch.bfloat16)
        fake = family.with_parts(trained)
        forward = partial(run_family, fake, size, samples, model.train_text_encoder)
        copy_bytes = 0 if is_narrow or precision == "no" else 2
        return peak_activations([*trained.values()], fake.blocks(), forward, model, copy_bytes)


def vae_activations(vae: Any, model: ModelConfig, size: tuple[int, int], samples: int, precision: str) -> int:
    """`peak_activations` of a training step of an autoencoder, without its loss."""
    with FakeTensorMode(), cuda_autocast(precision):
        fake = fake_copy(vae).train()
        encoder, decoder = fake.encoder, fake.decoder
        blocks = [*encoder.down_blocks, encoder.mid_block, decoder.mid_block, *decoder.up_blocks]  # as diffusers has it

        def forward() -> object:
            posterior = fake.encode(torch.zeros(samples, fake.config.in_channels, *size, device=DEVICE)).latent_dist
            return fake.decode(posterior.mean + posterior.std)

        return peak_activations([fake], blocks, forward, model, 0 if precision == "no" else 2)


def run_family(family: Family, size: tuple[int, int], samples: int, is_text_trained: bool = False) -> list[Any]:
    """A forward pass of what is trained, on blank input on `DEVICE`."""
    results: list[Any] = []
    noised, conditioning = _blank_batch(family, *size, samples, DEVICE)
    if is_text_trained:
        for encoder in family.text_encoders().values():
            length = encoder.config.max_position_embeddings
            results.append(encoder(torch.zeros(samples, length, dtype=torch.long, device=DEVICE)))
        conditioning.states = [states.requires_grad_() for states in conditioning.states]
    return [*results, family.predict(family.denoiser, noised, conditioning)]


def peak_activations(
    networks: Sequence[nn.Module],
    blocks: Sequence[nn.Module],
    forward: Callable[[], object],
    model: ModelConfig,
    copy_bytes: int = 0,
) -> int:
    """Bytes of activations at the peak; the networks' own parameters do not count.

    A recomputed block keeps its inputs only (Chen et al. 2016, arXiv:1604.06174). The peak
    is the end of the forward pass, when autocast still caches its copies of all weights, or the backward pass of one
    recomputed block, when everything that this block saves exists again.

    Args:
        networks: whose forward pass is counted.
        blocks: the repeated blocks.
        forward: runs the forward pass.
        model: `gradient_checkpointing`.
        copy_bytes: of autocast's copy of a weight.
    """
    recomputed = range(len(blocks) if model.gradient_checkpointing else 0)
    own = {t.untyped_storage()._cdata for n in networks for t in (*n.parameters(), *n.buffers())}
    storages: dict[int, torch.UntypedStorage] = {}  # held, so that no address is used twice
    inputs: set[int] = set()
    saved: dict[int | None, set[int]] = defaultdict(set)  # by the recomputed block that saves it; None: outside
    current: int | None = None

    def add(keys: set[int], values: Any) -> None:
        for tensor in (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)):
            storage = tensor.untyped_storage()
            if storage._cdata not in own:
                storages[storage._cdata] = storage
                keys.add(storage._cdata)

    def enter(number: int, _: nn.Module, args: Any, kwargs: Any) -> None:
        nonlocal current
        add(inputs, (args, kwargs))
        current = number

    def leave(*_: Any) -> None:
        nonlocal current
        current = None

    def save(tensor: Tensor) -> Tensor:
        add(saved[current], tensor)
        return tensor

    with ExitStack() as stack:
        for number in recomputed:
            stack.callback(blocks[number].register_forward_pre_hook(partial(enter, number), with_kwargs=True).remove)
            stack.callback(blocks[number].register_forward_hook(leave).remove)
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor))
        forward()
    kept = inputs | saved[None]
    alive = [sum(storages[key].nbytes() for key in kept | saved[number]) for number in (None, *recomputed)]
    copied = (p.numel() for number in recomputed for p in blocks[number].parameters() if p.ndim > 1)
    return max(alive[0] + copy_bytes * sum(copied), *alive)


_FP32_NAMES = (
    "layer_norm group_norm rms_norm pow rsqrt reciprocal exp log softplus softmax log_softmax sum cumsum prod "
    "linalg_vector_norm upsample_nearest2d upsample_bilinear2d upsample_bicubic2d"
)
FP32_ON_CUDA = frozenset(_FP32_NAMES.split())
"""Functions that autocast runs in fp32 on CUDA and not on the CPU (AT_FORALL_FP32 in ATen/autocast_mode.h), as far as
denoisers and autoencoders call them."""


class _CudaAutocast(TorchFunctionMode):
    """Casts the inputs of `FP32_ON_CUDA`; otherwise a UNet's norms would be counted at half their size."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__.strip("_") in FP32_ON_CUDA:
            args, kwargs = tree_map(_widened, args), tree_map(_widened, kwargs or {})
        return func(*args, **(kwargs or {}))


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype == torch.bfloat16 else value


@contextmanager
def cuda_autocast(precision: str) -> Iterator[None]:
    """Autocast on `DEVICE` that keeps what autocast on CUDA would keep; fp16 takes the bytes of bf16."""
    if precision in ("no", "fp32"):
        yield
        return
    with _CudaAutocast(), torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        yield


def fake_copy(network: Any) -> Any:
    """The network with fake tensors; to be called under FakeTensorMode."""
    fakes: dict[int, Any] = {id(b): torch.empty(b.shape, dtype=b.dtype, device=DEVICE) for b in network.buffers()}
    for own in network.parameters():
        tensor = torch.empty(own.shape, dtype=own.dtype, device=DEVICE)
        fakes[id(own)] = nn.Parameter(tensor, requires_grad=own.requires_grad)
    return copy.deepcopy(network, fakes)  # deepcopy takes what it finds in the memo


def encoding_bytes(vae: Any, size: tuple[int, int], samples: int, precision: str) -> int:
    """Peak while the frozen autoencoder encodes pictures, without its weights: beside the pictures, four tensors of the
    first block, which has the whole height and width; autocast makes two of them narrow."""
    channels, width = vae.config.block_out_channels[0], 16 if precision == "fp32" else 12
    return samples * size[0] * size[1] * (width * channels + FP32_BYTES * vae.config.in_channels)


def forward_flops(family: Family, height: int, width: int) -> int:
    """FLOPs of the denoiser's forward pass for one picture [pixels]; a multiply-add counts as two.

    Args:
        family: on the meta device.
    """
    noised, conditioning = _blank_batch(family, height, width, 1, torch.device("meta"))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        family.predict(family.denoiser, noised, conditioning)
    return int(counter.get_total_flops())


def _blank_batch(
    family: Family, height: int, width: int, count: int, device: torch.device
) -> tuple[NoisedBatch, Conditioning]:
    """Inputs of the denoiser of the right shapes for `count` pictures."""
    latents = torch.zeros(count, *latent_grid(family.vae).shape(height, width), device=device)
    per_sample = torch.zeros(count, device=device)
    noised = NoisedBatch(latents, per_sample, latents, per_sample, per_sample, per_sample)
    return noised, family.blank_conditioning(count, device)


def size_text(num_bytes: int) -> str:
    """`1.50 GiB`."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**28 else f"{num_bytes / 2**20:.2f} MiB"


def memory_table(memory: Memory, config: Config, layout: Layout) -> str:
    """The section of `--dry-run`."""
    height, width = largest_picture(config)
    title = (
        f"memory per process with {layout.strategy}, batch_size {config.system.batch_size} at {height} × {width} "
        "pixels on a GPU; an estimate, see docs/memory.md"
    )
    rows = {
        "weights": memory.weights,
        "gradients": memory.gradients,
        config.optimizer.name: memory.optimizer,
        "frozen": memory.frozen,
        "buffers": memory.buffers,
        "sum without activations": memory.standing,
        "activations": memory.activations,
        "or, before them, encoding": memory.encoding,
        "device, at most": memory.device,
        "CPU: EMA": memory.cpu_ema,
        "CPU: offloaded": memory.cpu_offloaded,
    }
    return "\n".join([title, *(f"  {name:<26}{size_text(count):>12}" for name, count in rows.items() if count)])
