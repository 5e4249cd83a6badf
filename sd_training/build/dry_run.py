"""What a run would do, without doing it: a summary, what is probably not meant, changed options, then the details."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from sd_training.build.estimate import (
    STATE_BYTES,
    measure,
    memory_table,
    meta_networks,
    run_memory,
    size_text,
    trained_names,
)
from sd_training.build.memory import FP32_BYTES, Memory
from sd_training.build.models import fit_problems, optimization
from sd_training.build.plan import Plan
from sd_training.build.run import ANY_GRID, make_data, zero_options
from sd_training.build.start import Start, data_refusal, find_start, make_mirror
from sd_training.config.changes import chosen_options
from sd_training.config.optimizer_schema import warmup_length
from sd_training.config.plan import counted
from sd_training.config.schema import Config
from sd_training.data.datamodule import TrainingData
from sd_training.data.index.report import CutCaptions, DataReport, cut_captions
from sd_training.data.order.buckets import size_problems, training_sizes
from sd_training.errors import Checks, ConfigError
from sd_training.models.cost import forward_flops, parameter_counts
from sd_training.models.family import Family, downscale_factor, latent_grid
from sd_training.models.load import effective_part
from sd_training.models.schedulers import prediction_warning
from sd_training.parallel.launch import process_group_backend

_PRECISION = {"no": "fp32", "bf16": "bf16 (weights fp32)", "fp16": "fp16 (weights fp32)"}
_RATES_LOOKED_AT = 1_000


@dataclass(frozen=True)
class _Described:
    """Everything that the sections are written from."""

    plan: Plan
    start: Start
    networks: Mapping[str, Any]
    family: Family | None
    counts: Mapping[str, int]
    """Network → parameters."""
    trained: set[str]
    data: TrainingData
    report: DataReport
    cuts: list[CutCaptions]
    held_out: str | None
    memory: Memory

    @property
    def config(self) -> Config:
        return self.plan.config


def describe(plan: Plan) -> str:
    """The report of `--dry-run`; networks are made without weights.

    Raises:
        UserError: model, sizes, data, strategy or run folder cannot be used; problems of all of them together.
    """
    checks = Checks()
    start = checks.run(lambda: _start(plan))
    networks, family = checks.run(lambda: meta_networks(plan.config)) or ({}, None)
    if networks:
        checks.run(lambda: _check_fit(plan.config, networks, family))
    data = make_data(plan, family, latent_grid(networks["vae"]) if networks else ANY_GRID)
    report = checks.run(data.report)
    held_out = checks.run(data.held_out.sentence) if data.held_out is not None else None
    if start is not None and report is not None:
        checks.run(lambda: _check_data_of_checkpoint(start, data))
    text = ""
    if not checks.errors and start is not None and report is not None:
        text = _text(plan, start, networks, family, data, report, held_out)
    if networks:  # last, because a plan tells the blocks how many heads they have left
        checks.run(lambda: _check_layout(plan, family))
    checks.finish()
    return text


def _start(plan: Plan) -> Start:
    """How the run would begin.

    Raises:
        UserError: it would be refused.
    """
    start = find_start(plan, make_mirror(plan))
    if start.refusal is not None:
        raise start.refusal
    return start


def _check_data_of_checkpoint(start: Start, data: TrainingData) -> None:
    if (refusal := data_refusal(start, data)) is not None:
        raise refusal


def _check_fit(config: Config, networks: Mapping[str, Any], family: Family | None) -> None:
    """Sizes and options that this model cannot take."""
    sizes, factor = training_sizes(config.dataset.params).sizes, downscale_factor(networks["vae"])
    problems = fit_problems(config, family) if family else size_problems(factor, sizes)
    if problems:
        raise ConfigError(problems)


def _check_layout(plan: Plan, family: Family | None) -> None:
    """What a real run finds out when it is set up: can these blocks be shared, can DeepSpeed's options be used?"""
    if family is not None:
        family.check_tensor_axis(plan.layout.mesh.tensor)
    if plan.launch.processes > 1:
        process_group_backend(plan.config.distributed, plan.launch.accelerator)
    if plan.layout.strategy.startswith("deepspeed"):
        zero_options(plan)


def _text(
    plan: Plan,
    start: Start,
    networks: dict[str, Any],
    family: Family | None,
    data: TrainingData,
    report: DataReport,
    held_out: str | None,
) -> str:
    config = plan.config
    workload = measure(config, networks, family, plan.precision)
    described = _Described(
        plan,
        start,
        networks,
        family,
        parameter_counts(networks),
        trained_names(config, family),
        data,
        report,
        cut_captions(data.datasets(), data.tokenizers, config.experiment.seed),
        held_out,
        run_memory(workload, config, plan.layout),
    )
    warnings = _warnings(described)
    changed = [f"  {key}={_short(value)}" for key, value in chosen_options(config).items()]
    sections = [
        _summary(described),
        *(["probably not meant:\n" + "\n".join(f"  - {warning}" for warning in warnings)] if warnings else []),
        "\n".join(["options that are not at their defaults (docs/config.md has all of them):", *changed]),
        *([described.start.changes()] if described.start.changed else []),
        _parameters(described),
        *([_flops(family, training_sizes(config.dataset.params).sizes)] if family else []),
        memory_table(described.memory, config, plan.layout, workload.picture),
        "\n".join([report.text(), *(f"  {cut.sentence()}" for cut in described.cuts)]),
        *([held_out] if held_out else []),
    ]
    return "\n\n".join(sections)


def _short(value: Any) -> str:
    """A value as it may stand on the command line."""
    return (
        str(yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10**6))
        .removesuffix("...\n")
        .strip()
    )


def _summary(described: _Described) -> str:
    plan, config, counts = described.plan, described.config, described.counts
    frozen = [name for name in counts if name not in described.trained]
    launch, layout = plan.launch, plan.layout
    machines = f" on {counted(launch.num_nodes, 'machine')}" if launch.num_nodes > 1 else ""
    rows = {
        "model": _model(described),
        "trains": ", ".join(f"{name} ({_millions(counts[name])})" for name in counts if name in described.trained),
        "keeps frozen": ", ".join(f"{name} ({_millions(counts[name])})" for name in frozen),
        "predicts": str(described.family.schedulers.prediction_type) if described.family else "",
        "data": "; ".join(f"{d.num_selected:,} of {d.place} ({d.location})" for d in described.report.datasets),
        "at": _sizes(config),
        "length": plan.batch.sentence(),
        "": "; ".join(f"each sample {d.epochs:,.2f} times" for d in described.report.datasets),
        "optimizer": f"{config.optimizer.name}, {_learning_rate(plan)}",
        "runs on": f"{launch.accelerator}, {counted(launch.processes, 'process', 'processes')}{machines}, "
        f"{_PRECISION[plan.precision]}, strategy {layout.strategy}",
        "memory": f"at most {size_text(described.memory.device)} of the device per process (an estimate)",
        "disk": _saves(described),
        "run folder": str(plan.run_dir),
        "begins": described.start.sentence(),
    }
    width = max(map(len, rows))
    return "\n".join(["this run", *(f"  {name:<{width}}  {text}" for name, text in rows.items() if text)])


def _model(described: _Described) -> str:
    """Family, and where the trained weights come from."""
    model, family = described.config.model, described.family
    part = effective_part(model, family.denoiser_part if family else "vae")
    name = family.name if family else "autoencoder"
    return f"{name}, {'random weights' if part.pretrained is None else f'from {part.pretrained}'}"


def _millions(count: int) -> str:
    return f"{count / 1e6:,.1f} M parameters" if count >= 50_000 else f"{count:,} parameters"


def _sizes(config: Config) -> str:
    sizes = training_sizes(config.dataset.params).sizes
    if len(sizes) == 1:
        return "{} × {} pixels".format(*sizes[0])
    first, last = min(sizes), max(sizes)
    return f"{len(sizes):,} sizes from {first[0]} × {first[1]} to {last[0]} × {last[1]} pixels (height × width)"


def _warnings(described: _Described) -> list[str]:
    """What is allowed but probably not meant; what follows from the options alone is logged when they are read."""
    found = [warning for dataset in described.report.datasets for warning in dataset.warnings()]
    found += [f"captions: {cut.sentence()}" for cut in described.cuts if cut.is_much()]
    if (family := described.family) is not None:
        prediction = family.schedulers.prediction_type
        warning = prediction_warning(described.config.model, family.denoiser_part, prediction)
        found += [warning] if warning is not None else []
    return found


def _parameters(described: _Described) -> str:
    lines = [
        f"{name}: {count:,} parameters ({count / 1e6:.1f} M), {'trained' if name in described.trained else 'frozen'}"
        for name, count in described.counts.items()
    ]
    return "\n".join(lines)


def _flops(family: Family, sizes: Sequence[tuple[int, int]]) -> str:
    """Of the largest picture."""
    height, width = max(sizes, key=lambda size: size[0] * size[1])
    place, flops = f"{family.denoiser_part} at {height} × {width} pixels", forward_flops(family, height, width)
    return f"forward pass of the {place}: {flops / 1e9:,.1f} GFLOP per image"


def _learning_rate(plan: Plan) -> str:
    """First, highest and last learning rate of the run."""
    own, last = optimization(plan), plan.batch.num_steps - 1
    warmup = warmup_length(plan.config.lr_scheduler.params, plan.batch.global_batch)
    steps = {round(number * last / _RATES_LOOKED_AT) for number in range(_RATES_LOOKED_AT + 1)}
    steps |= {max(0, min(warmup - 1, last))}
    rates = {step: own.learning_rate * own.schedule(step) for step in sorted(steps)}
    top = max(rates, key=lambda step: rates[step])
    return (
        f"learning rate {rates[0]:.3g} at the first step, {rates[top]:.3g} at step {top + 1:,}, "
        f"{rates[last]:.3g} at the last"
    )


def _saves(described: _Described) -> str:
    """Checkpoints and disk."""
    config, counts, trained = described.config, described.counts, described.trained
    count, narrow = sum(counts[part] for part in trained), 2 if config.model.bf16_weights else 1
    weights, state = count * FP32_BYTES // narrow, count * STATE_BYTES[config.optimizer.name] // narrow
    average = count * FP32_BYTES if config.model.use_ema else 0  # fp32, whatever the weights are
    checkpoint = weights + state + average
    pipeline = weights + (sum(counts.values()) - count) * FP32_BYTES
    saves = -(-described.plan.batch.num_steps // config.experiment.save_every)
    kept = 1 if config.experiment.save_only_most_recent else saves
    # One more of each exists while a new one is written, before the oldest is deleted.
    disk = checkpoint * (min(config.checkpoint.keep, saves) + 1) + pipeline * (kept + 1)
    return (
        f"at most {size_text(disk)} for {counted(saves, 'save')}: checkpoint {size_text(checkpoint)} (newest "
        f"{config.checkpoint.keep} kept), pipeline {size_text(pipeline)} ({kept:,} kept)"
    )
