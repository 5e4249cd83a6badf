"""The report of `--dry-run`: a summary, warnings, changed options, and the details of memory and data.

Networks are made without weights; nothing is written but the index of the data.

Memory: weights, gradients and optimizer state follow from formulas of the strategy. Activations are the tensors that
autograd saves while the real network runs on fake tensors, which have shapes, types and storages but no memory. Ψ is
the number of trained parameters. The formulas follow Rajbhandari et al. 2020 (ZeRO, arXiv:1910.02054, figure 1 and
section 3.1); where two processes differ by rounding, the larger one counts.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import yaml
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from sd_training.build.data import ANY_GRID, make_data
from sd_training.build.models import (
    autocast_parts,
    fit_problems,
    idle_parts,
    optimization,
    prediction_warnings,
    vae_precision,
)
from sd_training.build.plan import Plan, Start, check_data, find_start, make_mirror, titled
from sd_training.build.prior import missing_class_images
from sd_training.config.changes import chosen_options
from sd_training.config.data_schema import PriorConfig
from sd_training.config.plan import Layout
from sd_training.config.schema import Config, DistributedConfig, ModelConfig, warmup_length
from sd_training.data.index.report import DatasetReport, cut_captions, report_text
from sd_training.data.order.buckets import level_channels, training_sizes
from sd_training.errors import Checks, ConfigError
from sd_training.models.execution import autocast_weights, narrow_norms
from sd_training.models.families import load_family
from sd_training.models.family import AUTOCAST_DTYPE, Family, blank_batch, latent_grid
from sd_training.models.load import effective_part, load_part
from sd_training.models.lora import attach_adapters, frozen_linear

FP32_BYTES = 4
STATE_BYTES = {"adafactor": 1, "adamw_8bit": 2, "lion": 4, "adamw": 8, "muon": 8, "prodigy": 16}
"""Optimizer → bytes of state per parameter, at most; of adafactor, which keeps rows and columns, of large matrices."""
DEEPSPEED_BUCKET = 200_000_000
"""Numbers in a bucket of gradients: `reduce_bucket_size` of Lightning's DeepSpeedStrategy."""
DEEPSPEED_REUSE = 1_000_000_000
"""Weights used again within so many numbers stay gathered: DeepSpeed's `stage3_max_reuse_distance`."""
DEVICE = torch.device("cpu")
"""Of the fake tensors: PyTorch built for the CPU cannot index fake CUDA tensors."""


# --- The report ---


def describe(plan: Plan) -> str:
    """The report.

    Raises:
        UserError: model, sizes, data, strategy or run folder cannot be used; problems of all of them together.
    """
    config, checks = plan.config, Checks()
    start = checks.run(lambda: find_start(plan, make_mirror(plan)))
    networks, family = checks.run(lambda: meta_networks(config)) or ({}, None)
    grid = latent_grid(networks["vae"]) if networks else ANY_GRID
    if problems := fit_problems(config, family, grid) if networks else []:
        checks.errors.append(ConfigError(problems))
    to_draw = checks.run(lambda: missing_class_images(config, start.changed if start else ())) or []
    own = plan
    if to_draw:  # half of each micro-batch is then of class images
        half = {name: getattr(plan.batch, name) // 2 for name in ("micro_batch", "num_examples")}
        bare = config.replace(dataset=config.dataset.replace(prior=PriorConfig()))
        own = replace(plan, config=bare, batch=replace(plan.batch, **half))
    data = make_data(own, family, grid)
    reports = checks.run(data.report)
    held_out = checks.run(data.held_out.sentence) if data.held_out is not None else None
    if start is not None and reports is not None and not to_draw:  # the data of the run includes them
        checks.run(lambda: check_data(start, data))
    if family is not None:
        checks.run(lambda: idle_parts(config))
    text = ""
    if not checks.errors and start is not None and reports is not None:
        cuts = cut_captions(data.datasets, data.tokenizers, config.experiment.seed)
        warnings = [warning for dataset in reports for warning in dataset.warnings()]
        warnings += [f"captions: {sentence}" for sentence, is_much in cuts if is_much]
        warnings += prediction_warnings(config.model, family) if family else []
        memory = run_memory(plan, networks, family)
        chosen = [f"{key}={_as_word(value)}" for key, value in chosen_options(config).items()]
        sections = [
            _summary(plan, start, networks, family, reports, memory),
            titled("probably not meant:", [f"- {warning}" for warning in warnings]),
            titled("options that are not at their defaults (docs/config.md has all of them):", chosen),
            start.changes(),
            titled(
                f"memory per process with {plan.layout.strategy}, batch_size {config.system.batch_size} at "
                f"{_size(largest_picture(config))} pixels on a GPU; an estimate, see docs/memory.md",
                [f"{name:<26}{size_text(count):>12}" for name, count in memory.items() if count],
            ),
            "\n".join([report_text(reports), *(f"  {sentence}" for sentence, _ in cuts)]),
            held_out,
            f"dataset.prior: {len(to_draw)} class images are drawn first; they are not counted here" if to_draw else "",
        ]
        text = "\n\n".join(section for section in sections if section)
    if family is not None:  # last, because a tensor-parallel plan changes the number of heads in the blocks
        tensor = plan.layout.mesh.tensor
        checks.run(lambda: [family.tensor_plan(block, tensor) for block in family.blocks() if tensor > 1])
    checks.finish()
    return text


def _as_word(value: Any) -> str:
    """A value as it is given on the command line."""
    return yaml.safe_dump([value], default_flow_style=True, allow_unicode=True, width=10**6)[1:-2]


def _size(size: tuple[int, int]) -> str:
    return f"{size[0]} × {size[1]}"


def size_text(num_bytes: int) -> str:
    """`1.50 GiB`."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**28 else f"{num_bytes / 2**20:.2f} MiB"


def _summary(
    plan: Plan,
    start: Start,
    networks: Mapping[str, nn.Module],
    family: Family | None,
    reports: Sequence[DatasetReport],
    memory: Mapping[str, int],
) -> str:
    config, counts, trained = plan.config, parameter_counts(networks), trained_names(plan.config, family)
    part = effective_part(config.model, family.denoiser_part if family else "vae")
    sizes = training_sizes(config.dataset.params).sizes
    texts = {name: f"{name} ({count:,} parameters)" for name, count in counts.items()}
    if config.model.lora.rank:
        texts |= {name: f"adapters of {name} ({_num_trained(networks[name]):,} parameters)" for name in trained}
    own, last = optimization(plan), plan.batch.num_steps - 1
    top = max(0, min(warmup_length(config.lr_scheduler.params, plan.batch.global_batch) - 1, last))
    first, peak, end = (own.learning_rate * own.schedule(step) for step in (0, top, last))
    rows: dict[str, Any] = {
        "model": f"{family.name if family else 'autoencoder'}, "
        + (f"from {part.pretrained}" if part.pretrained else "random weights"),
        "trains": ", ".join(text for name, text in texts.items() if name in trained),
        "keeps frozen": ", ".join(text for name, text in texts.items() if name not in trained),
        "predicts": family and family.schedulers.objective.prediction_type,
        "data": "; ".join(f"{d.num_selected:,} of {d.place} ({d.location})" for d in reports),
        "at": (f"{len(sizes):,} sizes from " if len(sizes) > 1 else "")
        + " to ".join(dict.fromkeys(map(_size, (min(sizes), max(sizes)))))
        + " pixels",
        "length": plan.batch.sentence(),
        "": "; ".join(f"each sample {d.epochs:,.2f} times" for d in reports),
        "optimizer": f"{config.optimizer.name}, learning rate {first:.3g} at the first step, {peak:.3g} at step "
        f"{top + 1:,}, {end:.3g} at the last",
        "runs on": plan.device_sentence(),
        "memory": f"at most {size_text(memory[AT_MOST])} of the device per process (an estimate)"
        + ("" if family else ", without activations"),
        "run folder": plan.run_dir,
        "begins": start.sentence(),
    }
    width = max(map(len, rows))
    return titled("this run", [f"{name:<{width}}  {text}" for name, text in rows.items() if text])


# --- Networks ---


def meta_networks(config: Config) -> tuple[dict[str, Any], Family | None]:
    """Networks on the meta device by part name, and their family; an autoencoder that is trained has none.

    Raises:
        ConfigError: parts cannot be made or do not fit together.
    """
    if config.model.train == "vae":
        return {"vae": load_part("vae", effective_part(config.model, "vae"), seed=0, meta=True)}, None
    family = load_family(config.model, config.objective, config.conditioning, seed=0, meta=True)
    if config.model.lora.rank:
        attach_adapters(family, config.model.lora, seed=0)
    return family.networks(), family


def parameter_counts(networks: Mapping[str, nn.Module]) -> dict[str, int]:
    """Network → parameters."""
    return {name: sum(p.numel() for p in network.parameters()) for name, network in networks.items()}


def _num_trained(network: nn.Module) -> int:
    """Parameters that are not frozen beside adapters."""
    return sum(p.numel() for p in network.parameters() if p.requires_grad)


def trained_names(config: Config, family: Family | None) -> set[str]:
    """Names of the networks that are trained."""
    return set(family.trained_networks(config.model.trains_text)) if family else {"vae"}


def largest_picture(config: Config) -> tuple[int, int]:
    """Height and width of the largest bucket [pixels]."""
    return max(training_sizes(config.dataset.params).sizes, key=lambda size: size[0] * size[1])


# --- Memory ---

AT_MOST = "device, at most"


def run_memory(plan: Plan, networks: Mapping[str, Any], family: Family | None) -> dict[str, int]:
    """Bytes of one process in a step at the largest picture, by purpose; takes seconds.

    Args:
        networks, family: as `meta_networks` gives them.
    """
    config, layout, precision = plan.config, plan.layout, plan.precision
    model, samples, picture = config.model, config.system.batch_size, largest_picture(config)
    memory = standing_memory(model_size(config, networks, family, precision), layout, config.distributed)
    standing = sum(count for name, count in memory.items() if not name.startswith("CPU"))
    activations = encoding = 0
    if family is not None:  # the activations of an autoencoder that is trained are not estimated
        # FSDP2, DeepSpeed and LoRA pass 2-byte weights to autocast, which then makes no copies of them.
        has_narrow = layout.strategy not in ("single", "ddp") or model.lora.rank > 0
        is_narrow = model.bf16_weights or (has_narrow and precision != "no")
        activations = activation_bytes(family, model, picture, samples, precision, is_narrow)
        # Tiles are encoded one by one.
        side = family.tile_side if model.vae_tiling else max(picture)
        encoded = min(side, picture[0]), min(side, picture[1])
        at_once = 1 if model.vae_slicing else min(model.vae_batch or samples, samples)
        if "vae" not in idle_parts(config):
            encoding = encoding_bytes(family.vae, encoded, at_once, vae_precision(model, precision))
    return {
        **memory,
        "sum without activations": standing,
        "activations": activations,
        "or, before them, encoding": encoding,
        AT_MOST: standing + max(activations, encoding),
    }


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
    """Frozen parameters: replicated on the device of every process."""
    weight_bytes: int
    """Of one trained weight as it is stored: 4, or 2 with `model.bf16_weights`."""
    compute_bytes: int
    """Of one weight in the forward pass: 2 under mixed precision, else 4."""
    state_bytes: int
    """Of the optimizer's state, per parameter."""
    ema_bytes: int
    """Of the averages, per parameter: fp32, whatever the weights are; 0 without one."""
    is_ema_on_device: bool = False
    """Not with `ema.device=auto`, which asks the device."""
    frozen_narrow: int = 0
    """Of the frozen parameters, those of 2 bytes."""
    frozen_int8: int = 0
    """And those of 1 byte."""
    frozen_originals: int = 0
    """Of all frozen parameters, those that rank 0 keeps in CPU memory in fp32 as well."""
    idle_bytes: int = 0
    """Of frozen networks that stay in the CPU memory of every process."""


def model_size(config: Config, networks: Mapping[str, Any], family: Family | None, precision: str) -> ModelSize:
    """Counts of the networks of a run."""
    counts, trained = parameter_counts(networks), trained_names(config, family)
    all_blocks = family.blocks() if family else []
    blocks = [_num_trained(block) for block in all_blocks]
    own = {name: _num_trained(networks[name]) for name in trained}
    bases = {name: networks[name] for name in trained if own[name] < counts[name]}
    layers: list[nn.Module] = []
    with suppress(ConfigError):  # a family without a plan; 1 changes nothing in the blocks
        layers = [block.get_submodule(n) for block in all_blocks if family for n in family.tensor_plan(block, 1)]
    copied = autocast_parts(config.model, precision, family) if family else []
    narrow = {name: sum(p.numel() for p in autocast_weights(networks[name])) for name in copied}
    if AUTOCAST_DTYPE[precision] is not None:
        narrow |= {n: sum(p.numel() for p in autocast_weights(b) if not p.requires_grad) for n, b in bases.items()}
    int8 = 0
    if family and config.model.lora.base == "int8":
        int8 = sum(layer.weight.numel() for *_, layer in frozen_linear(all_blocks))
        narrow = {name: count - int8 * (name == family.denoiser_part) for name, count in narrow.items()}
    idle = [name for name in idle_parts(config) if name in counts and name not in trained] if family else []
    return ModelSize(
        trained=sum(own.values()),
        in_blocks=sum(blocks),
        block_matrices=sum(p.numel() for layer in layers for p in layer.parameters(recurse=False) if p.ndim == 2),
        largest_block=max(blocks, default=0),
        frozen=sum(count - own.get(name, 0) for name, count in counts.items() if name not in idle),
        weight_bytes=2 if config.model.bf16_weights else 4,
        compute_bytes=4 if precision == "no" else 2,
        state_bytes=STATE_BYTES[config.optimizer.name],
        ema_bytes=FP32_BYTES * (1 + len(config.ema.sigma_rels)) * config.model.use_ema,
        is_ema_on_device=config.ema.device == "cuda",
        frozen_narrow=sum(count for name, count in narrow.items() if name not in idle),
        frozen_int8=int8,
        frozen_originals=sum(counts[name] for name in copied),
        idle_bytes=sum(FP32_BYTES * counts[name] - 2 * narrow.get(name, 0) for name in idle),
    )


def standing_memory(size: ModelSize, layout: Layout, options: DistributedConfig) -> dict[str, int]:
    """Everything but activations and encoding [bytes of one process].

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
    local = size.trained - size.block_matrices + -(-size.block_matrices // mesh.tensor)
    shard = -(-local // (mesh.data if is_zero or stage == 0 else mesh.fsdp))
    stored = size.compute_bytes if is_zero else size.weight_bytes
    state = size.state_bytes * size.weight_bytes // FP32_BYTES
    state += FP32_BYTES * (is_zero and (stored < FP32_BYTES or stage < 3))
    block = -(-size.largest_block // mesh.tensor)
    if is_zero and stage < 3:  # one bucket of gradients is filled while another is reduced (`overlap_comm`)
        buffers = size.compute_bytes * 2 * DEEPSPEED_BUCKET
    elif is_zero:  # one bucket; gathered weights that are used again soon (half of the distance), and the current block
        kept = min(size.trained, DEEPSPEED_REUSE // 2 + size.largest_block)
        buffers = size.compute_bytes * (DEEPSPEED_BUCKET + kept)
    else:  # the root and two blocks (Zhao et al. 2023, arXiv:2304.11277, section 3.3.2), the gradient of one as it was
        # computed and in fp32 to be reduced
        kept = size.trained - size.in_blocks + 2 * block if options.reshard_after_forward else local
        buffers = size.compute_bytes * kept + (size.compute_bytes + FP32_BYTES) * block
    memory = {
        "weights": stored * (shard if stage == 3 else local),
        "gradients": stored * (shard if stage >= 2 else local),
        "optimizer": state * (shard if stage else local),  # with DeepSpeed's fp32 weights
        "frozen": FP32_BYTES * size.frozen - 2 * size.frozen_narrow - 3 * size.frozen_int8,
        "buffers": buffers if stage else 0,  # that a sharded run gathers temporarily
        "EMA" if size.is_ema_on_device else "CPU: EMA": size.ema_bytes * shard,
        "CPU: frozen, of rank 0": FP32_BYTES * size.frozen_originals,
        "CPU: frozen, idle": size.idle_bytes,
        "CPU: offloaded": 0,
    }
    moved: list[str] = []
    if options.offload_parameters:
        moved = ["weights"] if is_zero else ["weights", "gradients", "optimizer"]
    if options.offload_optimizer:  # of DeepSpeed
        moved.append("optimizer")
        memory["CPU: offloaded"] = FP32_BYTES * shard
        memory["gradients"] *= stage < 2
    for name in moved:
        memory["CPU: offloaded"] += memory[name]
        memory[name] = 0
    return memory


def activation_bytes(
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
        trained = {n: fake_copy(net).train() for n, net in family.trained_networks(model.trains_text).items()}
        for parameter in (p for network in trained.values() for p in network.parameters() if is_narrow):
            parameter.data = parameter.data.to(torch.bfloat16)
        fake = family.with_parts(trained)
        if model.bf16_norms:
            narrow_norms(fake.denoiser)
        forward = partial(run_family, fake, size, samples, model.trains_text)
        copy_bytes = 0 if is_narrow or precision == "no" else 2
        recomputed = fake.blocks() if model.gradient_checkpointing else []
        return peak_activations([*trained.values()], recomputed, forward, copy_bytes)


def run_family(family: Family, size: tuple[int, int], samples: int, is_text_trained: bool = False) -> list[Any]:
    """A forward pass of what is trained, on blank input on `DEVICE`."""
    results: list[Any] = []
    noised, conditioning = blank_batch(family, *size, samples, DEVICE)
    if is_text_trained:
        for encoder in family.text_encoders().values():
            length = encoder.config.max_position_embeddings
            results.append(encoder(torch.zeros(samples, length, dtype=torch.long, device=DEVICE)))
        conditioning.states = [states.requires_grad_() for states in conditioning.states]
    return [*results, family.predict(family.denoiser, noised, conditioning)]


def peak_activations(
    networks: Sequence[nn.Module], recomputed: Sequence[Any], forward: Callable[[], object], copy_bytes: int = 0
) -> int:
    """Bytes of activations at the peak; the networks' own parameters do not count.

    A recomputed block keeps its inputs only (Chen et al. 2016, arXiv:1604.06174). The peak
    is the end of the forward pass, when autocast still caches its copies of all weights, or the backward pass of one
    recomputed block, when everything that this block saves exists again.

    Args:
        networks: whose forward pass is counted.
        recomputed: blocks in them; their forward methods are replaced.
        forward: runs the forward pass.
        copy_bytes: of autocast's copy of a weight.
    """
    own = {t.untyped_storage()._cdata for n in networks for t in (*n.parameters(), *n.buffers())}
    storages: dict[int, torch.UntypedStorage] = {}  # held, so that no address is used twice
    kept: set[int] = set()

    def keep(keys: set[int], values: Any) -> Any:
        for tensor in (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)):
            storage = tensor.untyped_storage()
            if storage._cdata not in own:
                storages[storage._cdata] = storage
                keys.add(storage._cdata)
        return values

    def run(forward: Callable[..., object], keys: set[int], *args: Any, **kwargs: Any) -> object:
        keep(kept, (args, kwargs))
        with torch.autograd.graph.saved_tensors_hooks(partial(keep, keys), lambda tensor: tensor):
            return forward(*args, **kwargs)

    inside: list[set[int]] = [set() for _ in recomputed]
    for block, keys in zip(recomputed, inside, strict=True):
        block.forward = partial(run, block.forward, keys)
    run(forward, kept)
    alive = [sum(storages[key].nbytes() for key in kept | keys) for keys in (set[int](), *inside)]
    copied = sum(p.numel() for block in recomputed for p in block.parameters() if p.ndim > 1)
    return max(alive[0] + copy_bytes * copied, *alive)


def encoding_bytes(vae: Any, size: tuple[int, int], samples: int, precision: str) -> int:
    """Peak while the frozen autoencoder encodes pictures, without its weights: beside the pictures, four tensors of the
    first block, which has the whole height and width; autocast makes two of them narrow."""
    channels, width = level_channels(vae.config)[0], 16 if precision == "fp32" else 12
    return samples * size[0] * size[1] * (width * channels + FP32_BYTES * vae.config.get("in_channels", 3))


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
        if func.__name__.strip("_") in FP32_ON_CUDA and torch.is_autocast_enabled(DEVICE.type):
            args, kwargs = tree_map(_widened, (args, kwargs or {}))
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
    loose = (v for module in network.modules() for v in vars(module).values() if isinstance(v, Tensor))
    fakes |= {id(value): torch.empty(value.shape, dtype=value.dtype, device=DEVICE) for value in loose}
    for own in network.parameters():
        tensor = torch.empty(own.shape, dtype=own.dtype, device=DEVICE)
        fakes[id(own)] = nn.Parameter(tensor, requires_grad=own.requires_grad)
    return copy.deepcopy(network, fakes)  # deepcopy takes what it finds in the memo
