"""The report of `--dry-run`: a summary, warnings, changed options, and the details of memory and data.

Networks are made without weights; nothing is written but the index of the data.
"""

from collections.abc import Sequence
from typing import Any

import yaml

from sd_training.build.estimate import (
    FP32_BYTES,
    STATE_BYTES,
    Memory,
    forward_flops,
    largest_picture,
    memory_table,
    meta_networks,
    parameter_counts,
    run_memory,
    size_text,
    trained_names,
)
from sd_training.build.models import fit_problems, optimization
from sd_training.build.plan import Plan
from sd_training.build.run import ANY_GRID, make_data
from sd_training.build.start import Start, check_data, find_start, make_mirror
from sd_training.config.changes import chosen_options
from sd_training.config.plan import counted
from sd_training.config.schema import Config, warmup_length
from sd_training.data.index.report import DataReport, cut_captions
from sd_training.data.order.buckets import size_problems, training_sizes
from sd_training.errors import Checks, ConfigError
from sd_training.models.family import Family, latent_grid
from sd_training.models.load import effective_part
from sd_training.models.schedulers import prediction_warning
from sd_training.parallel.launch import process_group_backend

_PRECISION = {"no": "fp32", "bf16": "bf16 (weights fp32)", "fp16": "fp16 (weights fp32)"}


def describe(plan: Plan) -> str:
    """The report.

    Raises:
        UserError: model, sizes, data, strategy or run folder cannot be used; problems of all of them together.
    """
    config, checks = plan.config, Checks()
    start = checks.run(lambda: find_start(plan, make_mirror(plan)))
    networks, family = checks.run(lambda: meta_networks(config)) or ({}, None)
    if networks:
        sizes, factor = training_sizes(config.dataset.params).sizes, latent_grid(networks["vae"]).downscale
        problems = fit_problems(config, family) if family else size_problems(factor, sizes)
        checks.errors += [ConfigError(problems)] if problems else []
    data = make_data(plan, family, latent_grid(networks["vae"]) if networks else ANY_GRID)
    report = checks.run(data.report)
    held_out = checks.run(data.held_out.sentence) if data.held_out is not None else None
    if start is not None and report is not None:
        checks.run(lambda: check_data(start, data))
    text = ""
    if not checks.errors and start is not None and report is not None:
        cuts = cut_captions(data.datasets(), data.tokenizers, config.experiment.seed)
        warnings = [warning for dataset in report.datasets for warning in dataset.warnings()]
        warnings += [f"captions: {cut.sentence()}" for cut in cuts if cut.is_much()]
        if family is not None:
            warning = prediction_warning(config.model, family.denoiser_part, family.schedulers.prediction_type)
            warnings += [warning] if warning is not None else []
        memory = run_memory(config, networks, family, plan.layout, plan.precision)
        sections = [
            _summary(plan, start, parameter_counts(networks), family, report, memory),
            _list("probably not meant:", [f"- {warning}" for warning in warnings]),
            _list("options that are not at their defaults (docs/config.md has all of them):", _chosen(config)),
            start.changes(),
            memory_table(memory, config, plan.layout),
            "\n".join([report.text(), *(f"  {cut.sentence()}" for cut in cuts)]),
            held_out,
        ]
        text = "\n\n".join(section for section in sections if section)
    if family is not None:  # last, because a tensor-parallel plan changes the number of heads in the blocks
        tensor = plan.layout.mesh.tensor
        checks.run(lambda: [family.tensor_plan(block, tensor) for block in family.blocks() if tensor > 1])
    if plan.launch.processes > 1:
        checks.run(lambda: process_group_backend(config.distributed, plan.launch.accelerator))
    checks.finish()
    return text


def _list(title: str, lines: Sequence[str]) -> str:
    return "\n".join([title, *(f"  {line}" for line in lines)]) if lines else ""


def _chosen(config: Config) -> list[str]:
    """Options as they may be written on the command line."""
    lines = []
    for key, value in chosen_options(config).items():
        text: str = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10**6)
        lines.append(f"{key}={text.strip().removesuffix('...').strip()}")
    return lines


def _summary(
    plan: Plan, start: Start, counts: dict[str, int], family: Family | None, report: DataReport, memory: Memory
) -> str:
    config, launch, trained = plan.config, plan.launch, trained_names(plan.config, family)
    part = effective_part(config.model, family.denoiser_part if family else "vae")
    machines = f" on {counted(launch.num_nodes, 'machine')}" if launch.num_nodes > 1 else ""
    sizes = training_sizes(config.dataset.params).sizes
    (first, last), several = (min(sizes), max(sizes)), f"{len(sizes):,} sizes from " if len(sizes) > 1 else ""
    texts = {name: f"{name} ({count:,} parameters)" for name, count in counts.items()}
    rows: dict[str, Any] = {
        "model": f"{family.name if family else 'autoencoder'}, "
        + (f"from {part.pretrained}" if part.pretrained else "random weights"),
        "trains": ", ".join(text for name, text in texts.items() if name in trained),
        "keeps frozen": ", ".join(text for name, text in texts.items() if name not in trained),
        "predicts": family and family.schedulers.prediction_type,
        "computes": family and f"{forward_flops(family, *largest_picture(config)) / 1e9:,.1f} GFLOP per image, forward",
        "data": "; ".join(f"{d.num_selected:,} of {d.place} ({d.location})" for d in report.datasets),
        "at": several
        + " to ".join(dict.fromkeys(f"{height} × {width}" for height, width in (first, last)))
        + " pixels",
        "length": plan.batch.sentence(),
        "": "; ".join(f"each sample {d.epochs:,.2f} times" for d in report.datasets),
        "optimizer": f"{config.optimizer.name}, {_learning_rate(plan)}",
        "runs on": f"{launch.accelerator}, {counted(launch.processes, 'process', 'processes')}{machines}, "
        f"{_PRECISION[plan.precision]}, strategy {plan.layout.strategy}",
        "memory": f"at most {size_text(memory.device)} of the device per process (an estimate)",
        "disk": _disk(plan, counts, trained),
        "run folder": plan.run_dir,
        "begins": start.sentence(),
    }
    width = max(map(len, rows))
    return "\n".join(["this run", *(f"  {name:<{width}}  {text}" for name, text in rows.items() if text)])


def _learning_rate(plan: Plan) -> str:
    """At the first step, after the warm-up, and at the last."""
    own, last = optimization(plan), plan.batch.num_steps - 1
    top = max(0, min(warmup_length(plan.config.lr_scheduler.params, plan.batch.global_batch) - 1, last))
    first, peak, end = (own.learning_rate * own.schedule(step) for step in (0, top, last))
    return f"learning rate {first:.3g} at the first step, {peak:.3g} at step {top + 1:,}, {end:.3g} at the last"


def _disk(plan: Plan, counts: dict[str, int], trained: set[str]) -> str:
    """Checkpoints and pipelines; one more of each exists while a new one is written."""
    config = plan.config
    count, narrow = sum(counts[part] for part in trained), 2 if config.model.bf16_weights else 1
    weights, state = count * FP32_BYTES // narrow, count * STATE_BYTES[config.optimizer.name] // narrow
    checkpoint = weights + state + (count * FP32_BYTES if config.model.use_ema else 0)  # the EMA is always fp32
    pipeline = weights + (sum(counts.values()) - count) * FP32_BYTES
    saves = -(-plan.batch.num_steps // config.experiment.save_every)
    kept = 1 if config.experiment.save_only_most_recent else saves
    total = checkpoint * (min(config.checkpoint.keep, saves) + 1) + pipeline * (kept + 1)
    return (
        f"at most {size_text(total)} for {counted(saves, 'save')}: checkpoint {size_text(checkpoint)} (newest "
        f"{config.checkpoint.keep} kept), pipeline {size_text(pipeline)} ({kept:,} kept)"
    )
