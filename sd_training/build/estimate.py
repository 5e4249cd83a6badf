"""What the memory of a run depends on, measured once on networks without weights; then the memory of any way to run."""

from dataclasses import dataclass, replace
from typing import Any

from sd_training.build.memory import Memory, ModelSize, has_weight_copies, standing_memory
from sd_training.build.models import vae_precision
from sd_training.config.plan import Layout
from sd_training.config.schema import Config
from sd_training.data.order.buckets import training_sizes
from sd_training.errors import ConfigError
from sd_training.models.activations import Graph, family_graph, vae_graph
from sd_training.models.cost import parameter_counts
from sd_training.models.encoding_memory import encoding_bytes_per_sample
from sd_training.models.families.table import load_family
from sd_training.models.family import Family
from sd_training.models.load import load_network

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


@dataclass(frozen=True)
class Workload:
    """One training step of one model at its largest picture."""

    size: ModelSize
    graph: Graph
    encoding_bytes: int
    """Of the frozen autoencoder at work, per picture."""
    picture: tuple[int, int]
    """Height and width of the largest bucket [pixels]."""


def meta_networks(config: Config) -> tuple[dict[str, Any], Family | None]:
    """Networks without weights by part name, and their family; an autoencoder that is trained has none.

    Raises:
        ConfigError: parts cannot be made or do not fit together.
    """
    if config.model.train == "vae":
        return {"vae": load_network(config.model, "vae", seed=0, meta=True)}, None
    family = load_family(config.model, config.objective, config.conditioning, seed=0, meta=True)
    return family.networks(), family


def trained_names(config: Config, family: Family | None) -> set[str]:
    """Names of the networks that are trained."""
    return set(family.trained_networks(config.model.train_text_encoder)) if family else {"vae"}


def measure(config: Config, networks: dict[str, Any], family: Family | None, precision: str) -> Workload:
    """Counts of `meta_networks`; takes seconds.

    Args:
        precision: no, bf16 or fp16.
    """
    picture = max(training_sizes(config.dataset.params).sizes, key=lambda size: size[0] * size[1])
    size = model_size(config, networks, family, precision)
    if family is None:
        return Workload(size, vae_graph(networks["vae"], picture, precision=precision), 0, picture)
    graph = family_graph(
        family,
        picture,
        precision=precision,
        is_text_trained=config.model.train_text_encoder,
        has_bf16_weights=config.model.bf16_weights,
    )
    at_once = _tile(family.vae, picture) if config.model.vae_tiling else picture
    encoding = encoding_bytes_per_sample(family.vae, at_once, vae_precision(config.model, precision))
    return Workload(size, graph, encoding, picture)


def _tile(vae: Any, picture: tuple[int, int]) -> tuple[int, int]:
    """Tiles are encoded one after the other."""
    side = int(vae.tile_sample_min_size)
    return min(side, picture[0]), min(side, picture[1])


def model_size(config: Config, networks: dict[str, Any], family: Family | None, precision: str) -> ModelSize:
    """Parameters by what becomes of them."""
    counts, trained = parameter_counts(networks), trained_names(config, family)
    blocks = [list(block.parameters()) for block in family.blocks()] if family else []
    return ModelSize(
        trained=sum(counts[name] for name in trained),
        in_blocks=sum(p.numel() for block in blocks for p in block),
        block_matrices=_shared_matrices(family) if family else 0,
        largest_block=max((sum(p.numel() for p in block) for block in blocks), default=0),
        frozen=sum(count for name, count in counts.items() if name not in trained),
        weight_bytes=2 if config.model.bf16_weights else 4,
        compute_bytes=4 if precision == "no" else 2,
        state_bytes=STATE_BYTES[config.optimizer.name],
        has_ema=config.model.use_ema,
    )


def _shared_matrices(family: Family) -> int:
    """Elements of the matrices that the family's plan deals out over the tensor axis; 0 without a plan."""
    try:
        # A plan for one process leaves the blocks as they are.
        plans = [(block, family.tensor_plan(block, 1)) for block in family.blocks()]
    except ConfigError:
        return 0
    shared = [block.get_submodule(name).parameters(recurse=False) for block, plan in plans for name in plan]
    return sum(p.numel() for parameters in shared for p in parameters if p.ndim == 2)


def run_memory(workload: Workload, config: Config, layout: Layout) -> Memory:
    """Bytes of one process; batch, recomputation and strategy are those of `config`."""
    model, samples = config.model, config.system.batch_size
    activations = workload.graph.activations(model.gradient_checkpointing, model.gradient_checkpointing_every)
    return replace(
        standing_memory(workload.size, layout, config.distributed),
        activations=activations.num_bytes(samples, has_copies=has_weight_copies(layout)),
        encoding=workload.encoding_bytes * (1 if model.vae_slicing else samples),
    )


def size_text(num_bytes: int) -> str:
    """Bytes for a person."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**28 else f"{num_bytes / 2**20:.2f} MiB"


def memory_table(memory: Memory, config: Config, layout: Layout, picture: tuple[int, int]) -> str:
    """The section of `--dry-run`."""
    optimizer, (height, width) = config.optimizer.name, picture
    parts = {
        "weights": memory.weights,
        "gradients": memory.gradients,
        optimizer: memory.optimizer,
        "frozen": memory.frozen,
        **({"buffers": memory.buffers} if memory.buffers else {}),
    }
    standing = " + ".join(f"{name} {size_text(count)}" for name, count in parts.items())
    rows = {
        "without activations": memory.standing,
        "activations": memory.activations,
        **({"or, before them, encoding": memory.encoding} if memory.encoding else {}),
        "device, at most": memory.device,
        **({"CPU: EMA": memory.cpu_ema} if memory.cpu_ema else {}),
        **({"CPU: offloaded": memory.cpu_offloaded} if memory.cpu_offloaded else {}),
    }
    return "\n".join(
        [
            f"device memory per process, without activations: {size_text(memory.standing)} = {standing}",
            f"memory per process with {layout.strategy}, batch_size {config.system.batch_size} at {height} × {width} "
            "pixels on a GPU; an estimate, see docs/memory.md",
            *(f"  {name:<26}{size_text(count):>12}" for name, count in rows.items()),
        ]
    )
