"""What a run would do, without doing it: resolved config, batch arithmetic, parameters, memory, saves, data."""

from typing import Any

from torch import nn

from sd_training.build.plan import Plan
from sd_training.build.run import make_data
from sd_training.config.dump import resolved_yaml
from sd_training.data.sizes import training_sizes
from sd_training.errors import ConfigError
from sd_training.models.load import load_network
from sd_training.models.stable_diffusion import (
    StableDiffusionParts,
    check_sizes,
    latent_grid,
    load_stable_diffusion,
)

_FP32_BYTES = 4


def describe(plan: Plan) -> str:
    """The report of `--dry-run`; networks are made without weights.

    Raises:
        ConfigError: parts cannot be made or do not fit together.
        DataError: the data set cannot be used.
    """
    config = plan.config
    networks, parts = _networks(plan)
    problems = check_sizes(networks["vae"], training_sizes(config.dataset.params).sizes)
    if problems:
        raise ConfigError(problems)
    counts = {name: sum(p.numel() for p in network.parameters()) for name, network in networks.items()}
    data = make_data(plan, parts, latent_grid(networks["vae"]))
    sections = [
        resolved_yaml(config).rstrip(),
        plan.batch.sentence(),
        _parameters(counts, config.model.train),
        _memory(counts, config.model.train, config.model.use_ema),
        _saves(plan, counts),
        data.report().text(),
    ]
    return "\n\n".join(sections)


def _networks(plan: Plan) -> tuple[dict[str, Any], StableDiffusionParts | None]:
    """Networks on the meta device by part name, and the parts."""
    config = plan.config
    if config.model.train == "vae":
        vae = load_network(config.model, "vae", seed=0, meta=True)
        return {"vae": vae}, None
    parts = load_stable_diffusion(config.model, config.objective, seed=0, meta=True)
    networks: dict[str, nn.Module] = {"unet": parts.unet, "vae": parts.vae, "text_encoder": parts.text_encoder}
    return networks, parts


def _parameters(counts: dict[str, int], trained: str) -> str:
    lines = [
        f"{name}: {count:,} parameters ({count / 1e6:.1f} M), {'trained' if name == trained else 'frozen'}"
        for name, count in counts.items()
    ]
    return "\n".join(lines)


def _memory(counts: dict[str, int], trained: str, has_ema: bool) -> str:
    """fp32 weights, gradients and two AdamW averages of the trained part, fp32 weights of the frozen ones."""
    weights = counts[trained] * _FP32_BYTES
    frozen = sum(count for name, count in counts.items() if name != trained) * _FP32_BYTES
    lines = [
        f"device memory per process, without activations: {_size(4 * weights + frozen)} = weights {_size(weights)} + "
        f"gradients {_size(weights)} + AdamW {_size(2 * weights)} + frozen {_size(frozen)}",
        "activations come on top; they grow with batch_size and resolution, and gradient_checkpointing lowers them",
    ]
    if has_ema:
        lines.append(f"CPU memory of the first process for the EMA: {_size(weights)}")
    return "\n".join(lines)


def _saves(plan: Plan, counts: dict[str, int]) -> str:
    """Checkpoints and disk."""
    config = plan.config
    # Weights and two AdamW averages, and the EMA where it is kept.
    checkpoint = counts[config.model.train] * _FP32_BYTES * (4 if config.model.use_ema else 3)
    pipeline = sum(counts.values()) * _FP32_BYTES
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
