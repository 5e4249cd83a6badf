"""The callbacks of a run."""

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
from sd_training.data.datamodule import TrainingData
from sd_training.export.pictures import read_captions
from sd_training.log import get_logger
from sd_training.models.load import load_weights
from sd_training.watchdog.hang import HangWatch

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
    config, batch = plan.config, plan.batch
    timer = TrainingTimer(watch)
    ema = _ema(plan, trained) if config.model.use_ema else None
    validation = _validation(plan, data, ema, timer, preemption, run_lock)
    metrics = Metrics(
        plan.run_dir / "metrics.csv", config.logging.every, data.images_before, ema, timer, preemption.state, run_lock
    )

    def run_metadata() -> dict[str, Any]:
        return {
            "world_size": batch.processes,
            "global_batch": batch.global_batch,
            "data_fingerprint": data.fingerprint(),
        }

    networks = trained.sharding.roots
    num_parameters = sum(parameter.numel() for network in networks for parameter in network.parameters())
    what = f"{', '.join(type(network).__name__ for network in networks)} of {num_parameters:,} parameters"
    saves = Save(
        plan.run_dir,
        config.experiment.save_every,
        config.checkpoint,
        config.experiment.save_only_most_recent,
        trained.exported,
        ema,
        timer,
        preemption.state,
        run_lock,
        start.is_resumed,
        "model.use_ema" in config.experiment.allow_changed,
        mirror,
        _mirror_limit_s(plan),
    )
    guard = _numeric_guard(plan, data, timer, saves, ema)
    callbacks: list[pl.Callback | None] = [
        preemption,
        RunRecord(
            plan.run_dir, resolved_yaml(config), run_metadata, lambda step: _banner(plan, start, data, what, step)
        ),
        ema,
        guard,
        ReplicaDigest(config.numerics.digest_every, plan.run_dir),
        ConsistencyMark(preemption.state),
        metrics,
        validation,
        *_picture_callbacks(plan, trained, ema, timer),
        saves,
        ProgressBar(preemption.state, data.images_before, batch.num_steps) if config.logging.progress_bar else None,
        Heartbeat(watch),
        GarbageCollection(),
    ]
    return [callback for callback in callbacks if callback is not None]


def _banner(plan: Plan, start: Start, data: TrainingData, what: str, step: int) -> str:
    """What this start of the run does, in one block; a mistake is easier to see here than in the config.

    Args:
        what: is trained.
        step: optimizer steps that are done.
    """
    config, launch = plan.config, plan.launch
    device = torch.cuda.get_device_name() if launch.accelerator == "cuda" else launch.accelerator
    machines = "" if launch.num_nodes == 1 else f" on {launch.num_nodes} machines"
    processes = "1 process" if launch.processes == 1 else f"{launch.processes} processes{machines}"
    average = f"EMA with decay {config.ema.decay:g} is exported" if config.model.use_ema else "no EMA"
    samples = sum(len(dataset.selected) for dataset in data.datasets())
    done = f"resuming after optimizer step {step:,} of {plan.batch.num_steps:,}" if step else "a new run"
    rows = {
        "run folder": f"{plan.run_dir}, {done}",
        "device": f"{device}, {processes}, strategy {plan.layout.strategy}",
        "precision": f"{plan.precision.replace('no', 'fp32')}, {average}",
        "samples": f"{samples:,}",
        "batch": plan.batch.sentence(),
    }
    lines = [f"training {what}", *(f"  {name:<12}{value}" for name, value in rows.items())]
    return "\n".join([*lines, *([indent(start.changes(), "  ")] if start.changed else [])])


def _numeric_guard(plan: Plan, data: TrainingData, timer: TrainingTimer, saves: Save, ema: Ema | None) -> NumericGuard:
    """With what `scripts/replay_step.py` needs to find a step's samples and draws again."""
    config, batch = plan.config, plan.batch

    def run_metadata() -> dict[str, Any]:
        """Asked when an incident is written: the fingerprint is there once the data is."""
        return {
            "seed": config.experiment.seed,
            "batch_plan": asdict(batch),
            "strategy": plan.layout.strategy,
            "precision": plan.precision,
            "data_fingerprint": data.fingerprint(),
        }

    every = config.logging.every
    return NumericGuard(config.numerics, every, plan.run_dir, data.name_of, timer, run_metadata, ema, saves)


def _validation(
    plan: Plan, data: TrainingData, ema: Ema | None, timer: TrainingTimer, preemption: Preemption, run_lock: RunLock
) -> Validation | None:
    if data.held_out is None:
        return None
    config = plan.config.validation
    # An autoencoder is not asked at noise levels.
    count = 1 if plan.config.model.train == "vae" else config.num_levels
    quantiles = [(number + 0.5) / count for number in range(count)]
    path = plan.run_dir / "validation.csv"
    rows = MetricRows(path, COLUMNS, run_lock)
    return Validation(
        data.held_out, config.every, quantiles, rows, plan.precision, ema, timer, preemption, preemption.state
    )


def _mirror_limit_s(plan: Plan) -> float:
    """Time that something beside the saves may take before the hang watch or another process gives up."""
    watch = plan.config.watch
    return 0.8 * min(watch.save_s or watch.collective_timeout_s, watch.collective_timeout_s)


def _ema(plan: Plan, trained: Trained) -> Ema:
    """The average, started from `ema.path` where it is given."""
    config = plan.config
    if config.ema.path is None:
        return Ema(config.ema, plan.run_dir)
    part, default = "vae", None
    if trained.family is not None:
        part, default = trained.family.denoiser_part, trained.family.classes.get(trained.family.denoiser_part)
    initial = load_weights(config.ema.path, part, "ema.path", default)
    return Ema(config.ema, plan.run_dir, initial)


def _picture_callbacks(plan: Plan, trained: Trained, ema: Ema | None, timer: TrainingTimer) -> list[Pictures]:
    """Previews and evaluation images; there is nothing to draw while an autoencoder is trained."""
    config = plan.config
    if trained.family is None:
        return []
    jobs = []
    if config.sampling.every and config.sampling.prompts:
        prompts = [(f"{i:03d}", prompt) for i, prompt in enumerate(config.sampling.prompts)]
        jobs.append(PictureJob("previews", config.sampling.every, prompts, at_start=True))
    if config.experiment.eval_caption_file is not None:
        captions = read_captions(Path(config.experiment.eval_caption_file))[: config.experiment.num_eval_images]
        if captions:
            jobs.append(PictureJob("eval", config.experiment.save_every, captions, config.experiment.eval_tar))
        else:
            log.warning(f"experiment.eval_caption_file: {config.experiment.eval_caption_file} has no caption to draw")
    resolution, samples_dir = config.dataset.params.resolution, plan.run_dir / "samples"
    return [
        Pictures(job, samples_dir, resolution, config.sampling, trained.family.pipeline, plan.precision, ema, timer)
        for job in jobs
    ]
