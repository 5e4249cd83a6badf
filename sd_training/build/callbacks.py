"""The callbacks of a run."""

import math
from dataclasses import asdict
from pathlib import Path
from textwrap import indent
from typing import Any

import pytorch_lightning as pl
import torch

from sd_training.build.models import Trained
from sd_training.build.plan import Plan
from sd_training.build.start import Start
from sd_training.callbacks.base import TrainingTimer
from sd_training.callbacks.ema import Ema
from sd_training.callbacks.metrics import COLUMNS as METRICS
from sd_training.callbacks.metrics import MetricRows, Metrics
from sd_training.callbacks.numerics import NumericGuard, ReplicaDigest
from sd_training.callbacks.preemption import Preemption
from sd_training.callbacks.previews import PictureJob, Pictures
from sd_training.callbacks.progress import ProgressBar
from sd_training.callbacks.run_record import RunRecord
from sd_training.callbacks.runtime import GarbageCollection, Heartbeat
from sd_training.callbacks.save import ConsistencyMark, Save
from sd_training.callbacks.validation import COLUMNS, Validation
from sd_training.checkpoint.mirror import Mirror
from sd_training.checkpoint.run_lock import RunLock
from sd_training.config.changes import resolved_yaml
from sd_training.config.plan import counted
from sd_training.data.datamodule import TrainingData
from sd_training.export.pictures import read_captions
from sd_training.log import get_logger
from sd_training.models.load import load_weights
from sd_training.watchdog import HangWatch

log = get_logger(__name__)


def build_callbacks(
    plan: Plan,
    start: Start,
    trained: Trained,
    data: TrainingData,
    preemption: Preemption,
    run_lock: RunLock,
    watch: HangWatch,
    mirror: Mirror | None = None,
) -> list[pl.Callback]:
    """In the order they act after an optimizer step: stop, average, guard, log, measure, draw, save, copy, show."""
    config, batch, run_dir, run_state = plan.config, plan.batch, plan.run_dir, preemption.state
    timer = TrainingTimer(watch)
    ema = _ema(plan, trained) if config.model.use_ema else None
    # Something beside the saves may take so long before the hang watch or another process gives up.
    mirror_limit_s = 0.8 * min(config.watch.save_s or math.inf, config.watch.collective_timeout_s)

    def run_metadata() -> dict[str, Any]:
        """For run.json and for incidents, from which `scripts/replay_step.py` finds samples and draws of a step again;
        asked once the data is open."""
        return {
            "world_size": batch.processes,
            "global_batch": batch.global_batch,
            "batch_plan": asdict(batch),
            "strategy": plan.layout.strategy,
            "precision": plan.precision,
            "seed": config.experiment.seed,
            "data_fingerprint": data.fingerprint(),
        }

    networks = trained.sharding.roots
    num_parameters = sum(parameter.numel() for network in networks for parameter in network.parameters())
    title = f"training {', '.join(type(network).__name__ for network in networks)} of {num_parameters:,} parameters"
    rows = MetricRows(run_dir / "metrics.csv", METRICS, run_lock)
    saves = Save(
        run_dir,
        config.experiment.save_every,
        config.checkpoint,
        config.experiment.save_only_most_recent,
        trained.exported,
        ema,
        timer,
        run_state,
        run_lock,
        start.is_resumed,
        mirror,
        mirror_limit_s,
    )
    callbacks: list[pl.Callback | None] = [
        preemption,
        RunRecord(run_dir, resolved_yaml(config), run_metadata, lambda step: _banner(plan, start, data, title, step)),
        ema,
        NumericGuard(config.numerics, config.logging.every, run_dir, data.name_of, timer, run_metadata, ema, saves),
        ReplicaDigest(config.numerics.digest_every, run_dir),
        ConsistencyMark(run_state),
        Metrics(rows, config.logging.every, batch.global_batch, ema, timer, run_state),
        _validation(plan, data, ema, timer, preemption, run_lock),
        *_pictures(plan, trained, ema, timer),
        saves,
        ProgressBar(run_state, batch.global_batch, batch.num_steps) if config.logging.progress_bar else None,
        Heartbeat(watch),
        GarbageCollection(),
    ]
    return [callback for callback in callbacks if callback is not None]


def _banner(plan: Plan, start: Start, data: TrainingData, title: str, step: int) -> str:
    """What this start of the run does, in one block; a mistake is easier to see here than in the config.

    Args:
        title: what is trained, counted before it is sharded.
        step: optimizer steps that are done.
    """
    config, launch = plan.config, plan.launch
    device = torch.cuda.get_device_name() if launch.accelerator == "cuda" else launch.accelerator
    machines = "" if launch.num_nodes == 1 else f" on {launch.num_nodes} machines"
    average = f"EMA with decay {config.ema.decay:g} is exported" if config.model.use_ema else "no EMA"
    done = f"resuming after optimizer step {step:,} of {plan.batch.num_steps:,}" if step else "a new run"
    rows = {
        "run folder": f"{plan.run_dir}, {done}",
        "device": f"{device}, {counted(launch.processes, 'process', 'processes')}{machines}, "
        f"strategy {plan.layout.strategy}",
        "precision": f"{plan.precision.replace('no', 'fp32')}, {average}",
        "samples": f"{sum(len(dataset.selected) for dataset in data.datasets()):,}",
        "batch": plan.batch.sentence(),
    }
    lines = [title, *(f"  {name:<12}{value}" for name, value in rows.items())]
    return "\n".join([*lines, *([indent(start.changes(), "  ")] if start.changed else [])])


def _validation(
    plan: Plan, data: TrainingData, ema: Ema | None, timer: TrainingTimer, preemption: Preemption, run_lock: RunLock
) -> Validation | None:
    if data.held_out is None:
        return None
    config, rows = plan.config.validation, MetricRows(plan.run_dir / "validation.csv", COLUMNS, run_lock)
    count = 1 if plan.config.model.train == "vae" else config.num_levels  # an autoencoder has no noise levels
    quantiles = [(number + 0.5) / count for number in range(count)]
    return Validation(
        data.held_out, config.every, quantiles, rows, plan.precision, ema, timer, preemption, preemption.state
    )


def _ema(plan: Plan, trained: Trained) -> Ema:
    """The average, started from `ema.path` where it is given."""
    config, family = plan.config.ema, trained.family
    if config.path is None:
        return Ema(config, plan.run_dir)
    if family is None:
        return Ema(config, plan.run_dir, load_weights(config.path, "vae", "ema.path"))
    default = family.classes.get(family.denoiser_part)
    return Ema(config, plan.run_dir, load_weights(config.path, family.denoiser_part, "ema.path", default))


def _pictures(plan: Plan, trained: Trained, ema: Ema | None, timer: TrainingTimer) -> list[Pictures]:
    """Previews and evaluation images; there is nothing to draw while an autoencoder is trained."""
    config, jobs = plan.config, []
    if trained.family is None:
        return []
    if config.sampling.every and config.sampling.prompts:
        prompts = [(f"{i:03d}", prompt) for i, prompt in enumerate(config.sampling.prompts)]
        jobs.append(PictureJob("previews", config.sampling.every, prompts, at_start=True))
    if (path := config.experiment.eval_caption_file) is not None:
        captions = read_captions(Path(path))[: config.experiment.num_eval_images]
        if captions:
            jobs.append(PictureJob("eval", config.experiment.save_every, captions, config.experiment.eval_tar))
        else:
            log.warning(f"experiment.eval_caption_file: {path} has no caption to draw")
    resolution, samples_dir = config.dataset.params.resolution, plan.run_dir / "samples"
    return [
        Pictures(job, samples_dir, resolution, config.sampling, trained.family.pipeline, plan.precision, ema, timer)
        for job in jobs
    ]
