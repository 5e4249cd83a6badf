"""What a run would do, without doing it: resolved config, batch arithmetic, parameters, memory, saves, data."""

from collections.abc import Sequence
from typing import Any

from sd_training.build.estimate import (
    STATE_BYTES,
    measure,
    memory_table,
    meta_networks,
    run_memory,
    size_text,
    trained_names,
)
from sd_training.build.memory import FP32_BYTES
from sd_training.build.models import attention_problems, optimization
from sd_training.build.plan import Plan
from sd_training.build.run import make_data
from sd_training.build.strategy import zero_options
from sd_training.config.dump import resolved_yaml
from sd_training.config.schema import Config
from sd_training.data.sizes import size_problems, training_sizes
from sd_training.distributed.launch import process_group_backend
from sd_training.errors import ConfigError
from sd_training.models.cost import forward_flops, parameter_counts
from sd_training.models.family import Family, downscale_factor, latent_grid
from sd_training.optim.lr_plot import plot_lr


def describe(plan: Plan) -> str:
    """The report of `--dry-run`; networks are made without weights.

    Raises:
        ConfigError: parts cannot be made or do not fit together.
        DataError: the data set cannot be used.
    """
    config = plan.config
    networks, family = meta_networks(plan.config)
    sizes, factor = training_sizes(config.dataset.params).sizes, downscale_factor(networks["vae"])
    problems = family.size_problems(sizes) if family else size_problems(factor, sizes)
    problems += attention_problems(config.model, family) if family else []
    if problems:
        raise ConfigError(problems)
    counts = parameter_counts(networks)
    data = make_data(plan, family, latent_grid(networks["vae"]))
    trained = trained_names(config, family)
    sections = [
        resolved_yaml(config).rstrip(),
        plan.batch.sentence(),
        _parameters(counts, trained),
        *([_flops(family, sizes)] if family else []),
        _memory(plan, networks, family),
        _saves(plan, counts, trained),
        _learning_rate(plan),
        data.report().text(),
        *([data.held_out.sentence()] if data.held_out else []),
    ]
    _check_layout(plan, family)
    return "\n\n".join(sections)


def _check_layout(plan: Plan, family: Family | None) -> None:
    """What a real run finds out when it is set up: can these blocks be shared, can DeepSpeed's options be used? Last,
    because a plan tells the blocks how many heads they have left."""
    if family is not None:
        family.check_tensor_axis(plan.layout.mesh.tensor)
    if plan.launch.processes > 1:
        process_group_backend(plan.config.distributed, plan.launch.accelerator)
    if plan.layout.strategy.startswith("deepspeed"):
        zero_options(plan)


def _parameters(counts: dict[str, int], trained: set[str]) -> str:
    lines = [
        f"{name}: {count:,} parameters ({count / 1e6:.1f} M), {'trained' if name in trained else 'frozen'}"
        for name, count in counts.items()
    ]
    return "\n".join(lines)


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
    frozen = (sum(counts.values()) - count) * FP32_BYTES
    return count * FP32_BYTES // narrow, count * STATE_BYTES[config.optimizer.name] // narrow, frozen


def _ema_bytes(counts: dict[str, int], trained: set[str]) -> int:
    """The average is fp32, whatever the weights are."""
    return sum(counts[part] for part in trained) * FP32_BYTES


def _memory(plan: Plan, networks: dict[str, Any], family: Family | None) -> str:
    """Per process, for the strategy of the run."""
    config, layout = plan.config, plan.layout
    workload = measure(config, networks, family, plan.precision)
    return memory_table(run_memory(workload, config, layout), config, layout, workload.picture)


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
        f"{saves:,} saves into {plan.run_dir}: checkpoint {size_text(checkpoint)} (newest {config.checkpoint.keep} "
        f"kept), pipeline {size_text(pipeline)} ({kept:,} kept); disk at most {size_text(disk)}"
    )
