"""What a run would do, without doing it: resolved config, batch arithmetic, parameters, memory, saves, data."""

from collections.abc import Sequence
from typing import Any

from sd_training.build.models import optimization
from sd_training.build.plan import Plan
from sd_training.build.run import make_data
from sd_training.config.dump import resolved_yaml
from sd_training.config.schema import Config
from sd_training.data.sizes import training_sizes
from sd_training.errors import ConfigError
from sd_training.models.cost import forward_flops, parameter_counts
from sd_training.models.families import load_family
from sd_training.models.family import Family, downscale_factor, latent_grid, size_problems
from sd_training.models.load import load_network
from sd_training.optim.lr_plot import plot_lr

_FP32_BYTES = 4
_STATE_BYTES = {
    "adamw": 8,
    "adafactor": 1,
    "adamw_8bit": 2,
    "lion": 4,
    "prodigy": 16,
    "schedule_free_adamw": 8,
    "muon": 8,
}
"""Optimizer → bytes of state per parameter, at most; of adafactor, which keeps rows and columns, of large matrices."""


def describe(plan: Plan) -> str:
    """The report of `--dry-run`; networks are made without weights.

    Raises:
        ConfigError: parts cannot be made or do not fit together.
        DataError: the data set cannot be used.
    """
    config = plan.config
    networks, family = _networks(plan)
    sizes, factor = training_sizes(config.dataset.params).sizes, downscale_factor(networks["vae"])
    problems = family.size_problems(sizes) if family else size_problems(factor, sizes)
    if problems:
        raise ConfigError(problems)
    counts = parameter_counts(networks)
    data = make_data(plan, family, latent_grid(networks["vae"]))
    trained = _trained(family, config)
    sections = [
        resolved_yaml(config).rstrip(),
        plan.batch.sentence(),
        _parameters(counts, trained),
        *([_flops(family, sizes)] if family else []),
        _memory(counts, trained, config),
        _saves(plan, counts, trained),
        _learning_rate(plan),
        data.report().text(),
    ]
    return "\n\n".join(sections)


def _networks(plan: Plan) -> tuple[dict[str, Any], Family | None]:
    """Networks on the meta device by part name, and their family."""
    config = plan.config
    if config.model.train == "vae":
        vae = load_network(config.model, "vae", seed=0, meta=True)
        return {"vae": vae}, None
    family = load_family(config.model, config.objective, config.conditioning, seed=0, meta=True)
    return family.networks(), family


def _parameters(counts: dict[str, int], trained: set[str]) -> str:
    lines = [
        f"{name}: {count:,} parameters ({count / 1e6:.1f} M), {'trained' if name in trained else 'frozen'}"
        for name, count in counts.items()
    ]
    return "\n".join(lines)


def _trained(family: Family | None, config: Config) -> set[str]:
    """Names of the networks that are trained."""
    if family is None:
        return {"vae"}
    return set(family.trained_networks(config.model.train_text_encoder))


def _flops(family: Family, sizes: Sequence[tuple[int, int]]) -> str:
    """Of the largest picture."""
    height, width = max(sizes, key=lambda size: size[0] * size[1])
    place, flops = f"{family.denoiser_part} at {height} × {width} pixels", forward_flops(family, height, width)
    return f"forward pass of the {place}: {flops / 1e9:,.1f} GFLOP per image"


def _learning_rate(plan: Plan) -> str:
    """Writes the curve beside where the run will be."""
    own = optimization(plan)
    path = plan.run_dir.parent / f"{plan.run_dir.name}.learning_rate.png"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        plot_lr(own.schedule, own.learning_rate, plan.batch.num_steps, path)
    except OSError as error:
        return f"experiment.log_dir: the learning rate cannot be drawn to {path}: {error.strerror}"
    return f"learning rate over {plan.batch.num_steps:,} steps: {path}"


def _bytes(counts: dict[str, int], trained: set[str], config: Config) -> tuple[int, int, int]:
    """Of the trained weights, of the optimizer's state, and of the frozen weights."""
    count, narrow = sum(counts[part] for part in trained), 2 if config.model.bf16_weights else 1
    frozen = (sum(counts.values()) - count) * _FP32_BYTES
    return count * _FP32_BYTES // narrow, count * _STATE_BYTES[config.optimizer.name] // narrow, frozen


def _ema_bytes(counts: dict[str, int], trained: set[str]) -> int:
    """The average is fp32, whatever the weights are."""
    return sum(counts[part] for part in trained) * _FP32_BYTES


def _memory(counts: dict[str, int], trained: set[str], config: Config) -> str:
    """fp32 weights, gradients and optimizer state of the trained part, fp32 weights of the frozen ones."""
    weights, state, frozen = _bytes(counts, trained, config)
    name = config.optimizer.name
    lines = [
        f"device memory per process, without activations: {_size(2 * weights + state + frozen)} = weights "
        f"{_size(weights)} + gradients {_size(weights)} + {name} {_size(state)} + frozen {_size(frozen)}",
        "activations come on top; they grow with batch_size and resolution, and gradient_checkpointing lowers them",
    ]
    if config.model.use_ema:
        lines.append(f"CPU memory of the first process for the EMA: {_size(_ema_bytes(counts, trained))}")
    return "\n".join(lines)


def _saves(plan: Plan, counts: dict[str, int], trained: set[str]) -> str:
    """Checkpoints and disk."""
    config = plan.config
    weights, state, frozen = _bytes(counts, trained, config)
    checkpoint = weights + state + (_ema_bytes(counts, trained) if config.model.use_ema else 0)
    pipeline = weights + frozen
    saves = -(-plan.batch.num_steps // config.experiment.save_every)
    kept = 1 if config.experiment.save_only_most_recent else saves
    # One more of each exists while a new one is written, before the oldest is deleted.
    disk = checkpoint * (min(config.checkpoint.keep, saves) + 1) + pipeline * (kept + 1)
    return (
        f"{saves:,} saves into {plan.run_dir}: checkpoint {_size(checkpoint)} (newest {config.checkpoint.keep} kept), "
        f"pipeline {_size(pipeline)} ({kept:,} kept); disk at most {_size(disk)}"
    )


def _size(num_bytes: int) -> str:
    """Bytes for a person."""
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**28 else f"{num_bytes / 2**20:.2f} MiB"
