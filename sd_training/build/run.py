"""A whole run: folder, model, data, callbacks, trainer."""

import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.plugins.environments import LightningEnvironment, SLURMEnvironment, TorchElasticEnvironment
from pytorch_lightning.plugins.precision import Precision
from pytorch_lightning.strategies import Strategy

from sd_training.build.callbacks import build_callbacks
from sd_training.build.loggers import build_loggers
from sd_training.build.models import Trained, build_model
from sd_training.build.plan import Plan
from sd_training.build.start import find_start, make_mirror, own_run_dir
from sd_training.build.strategy import LIGHTNING_PRECISION, make_strategy, precision_plugins
from sd_training.callbacks.background_logger import TAKING_LEAVE_S, BackgroundLogger
from sd_training.callbacks.deadlines import Deadlines
from sd_training.callbacks.mirroring import AFTER_A_STOP_S
from sd_training.callbacks.preemption import Preemption
from sd_training.callbacks.save_times import SaveTimes
from sd_training.config.watch_schema import SECTIONS
from sd_training.data.captions import Dropout
from sd_training.data.datamodule import TrainingData
from sd_training.data.dataset import DrawSettings
from sd_training.distributed.saves import WholeCheckpoints
from sd_training.errors import Checks
from sd_training.exit_status import HANG
from sd_training.models.family import Family
from sd_training.rank_log import get_logger, global_rank, is_main_process
from sd_training.run_log import RunLog
from sd_training.stop_signals import StopSignals
from sd_training.training.base_module import TrainedModule
from sd_training.types import LatentGrid
from sd_training.watch.hang_watch import HangWatch

log = get_logger(__name__)

ANY_GRID = LatentGrid(4, 8)
"""Stands in where nothing is drawn."""


@dataclass(frozen=True)
class Run:
    """A run ready to fit."""

    trainer: pl.Trainer
    module: TrainedModule
    data: TrainingData
    resume_from: Path | None
    """Folder of checkpoints, when there is one to resume from."""
    preemption: Preemption

    @property
    def exit_status(self) -> int:
        """After the fit: 0, or what the process ends with because a signal stopped it (see `stop_signals`).

        Lightning's own launcher kills the process that started the others when one of those does not end with 0.
        """
        environment = getattr(self.trainer.strategy, "cluster_environment", None)
        if isinstance(environment, LightningEnvironment) and not self.trainer.is_global_zero:
            return 0
        return self.preemption.status

    @property
    def is_logger_left(self) -> bool:
        """After the fit: whether a logger failed or is still busy, and nobody is to wait for it."""
        return any(isinstance(logger, BackgroundLogger) and logger.is_left for logger in self.trainer.loggers)


def build_run(
    plan: Plan,
    signals: StopSignals | None = None,
    watch: HangWatch | None = None,
    run_log: RunLog | None = None,
) -> Run:
    """Every object of the run.

    Args:
        plan: what to build.
        signals: notes of signals, when the program has taken some since its start.
        watch: counts how long a process does one thing; null: nobody does.
        run_log: `train.log`, from the moment on when the folder is this start's; null: there is none.

    Raises:
        ConfigError: a part cannot be loaded, parts do not fit, the run folder is taken, or the run cannot go on there
            (see `find_start`).
        CheckpointError: there are checkpoints, and none is whole.
        OutageError: storage does not answer for now.
        DataError: the data set cannot be used.
    """
    mirror = make_mirror(plan)
    start = find_start(plan, mirror)
    if start.refusal is not None:
        raise start.refusal
    fence = own_run_dir(plan, mirror)
    if run_log is not None:
        run_log.open(plan.run_dir, fence.check)
    if start.is_done:
        log.info("\n".join([f"{plan.run_dir} is finished; it {start.sentence()}", *filter(None, [start.changes()])]))
    resume_from = plan.run_dir / "checkpoints" if start.is_resumed else None
    trained = _model_or_all_problems(plan)
    data = make_data(plan, trained.family, trained.latent_grid)
    preemption = _preemption(plan, signals or StopSignals())
    watch = watch or HangWatch({}, plan.run_dir)
    callbacks = build_callbacks(plan, start, trained, data, preemption, fence, watch, mirror)
    strategy = make_strategy(plan, trained.cuts)
    assert isinstance(strategy, WholeCheckpoints)
    strategy.fence, strategy.is_written_later = fence, plan.config.checkpoint.asynchronous
    strategy.collective_timeout = timedelta(seconds=plan.config.watch.collective_timeout_s)
    trainer = _trainer(plan, callbacks, strategy)
    _without_signal_handling(trainer)
    return Run(trainer, trained.module, data, resume_from, preemption)


def _model_or_all_problems(plan: Plan) -> Trained:
    """The model; where it cannot be built, the first process looks for what is wrong with the data as well, and all is
    reported together. What it indexes is kept, so the next start does not do it again."""
    checks = Checks()
    trained = checks.run(lambda: build_model(plan))
    if trained is not None:
        return trained
    if is_main_process():
        log.warning("the model cannot be used (see the error at the end); the data is checked as well")
        checks.run(make_data(plan, None, ANY_GRID).prepare_data)
    checks.finish()
    raise AssertionError("a check has failed")


def make_watch(plan: Plan) -> HangWatch:
    """The hang watch of this process, which does not count yet."""
    config, rank = plan.config.watch, global_rank()
    limits_s = {section: getattr(config, f"{section}_s") for section in SECTIONS}
    # Lightning's launcher kills the first process, with a status of its own, when a child ends with another one than 0.
    is_child = plan.launch.launcher == "own" and rank > 0
    return HangWatch(limits_s, plan.run_dir, rank, status=0 if is_child else HANG)


def _preemption(plan: Plan, signals: StopSignals) -> Preemption:
    config = plan.config
    signals.choose(config.system.stop_signals, config.system.save_signals)
    leave_s = TAKING_LEAVE_S + (0.0 if config.checkpoint.mirror is None else AFTER_A_STOP_S)
    deadlines = Deadlines(config.experiment.max_hours, signals.started_s, os.environ, leave_s)
    return Preemption(
        signals, deadlines, SaveTimes(), config.checkpoint.save_every_minutes, config.watch.collective_timeout_s
    )


def make_data(plan: Plan, family: Family | None, grid: LatentGrid) -> TrainingData:
    """The training data for a model with these latents; `family` is null for autoencoder training, and where only the
    data is looked at."""
    config = plan.config
    return TrainingData(
        dataset=config.dataset,
        plan=plan.batch,
        workers=config.system.workers,
        tokenizers=family.tokenizers() if family else {},
        draws=_draws(plan, family, grid),
        captions_needed=config.model.train != "vae",
        run_dir=plan.run_dir,
        validation=config.validation,
    )


def _draws(plan: Plan, family: Family | None, grid: LatentGrid) -> DrawSettings:
    """What is drawn per sample; nothing that the objective does not read."""
    config, seed = plan.config.conditioning, plan.config.experiment.seed
    if family is None:
        return DrawSettings(seed, grid, has_noise=False)
    objective = family.objective
    dropout = Dropout(
        config.dropout_prob, config.encoder_dropout_prob, config.size_dropout_prob, config.crop_dropout_prob
    )
    return DrawSettings(
        seed,
        grid,
        dropout,
        has_offset_noise=bool(objective.offset_noise),
        has_input_noise=objective.input_perturbation > 0,
        has_mask=objective.masked_loss != "none",
        is_stratified=objective.timestep_density.stratified,
    )


def _plugins(plan: Plan) -> list[Any]:
    """Precision and launcher; the launcher is named because Lightning would guess SLURM inside salloc."""
    plugins: list[Any] = precision_plugins(plan)
    if plan.launch.processes > 1:
        match plan.launch.launcher:
            case "torchrun":
                plugins.append(TorchElasticEnvironment())
            case "slurm":
                plugins.append(SLURMEnvironment(auto_requeue=False))
            case "own":
                plugins.append(LightningEnvironment())
    return plugins


def _trainer(plan: Plan, callbacks: list[pl.Callback], strategy: Strategy) -> pl.Trainer:
    plugins = _plugins(plan)
    has_precision = any(isinstance(plugin, Precision) for plugin in plugins)
    return pl.Trainer(
        accelerator=plan.launch.accelerator,
        devices=plan.launch.devices,
        num_nodes=plan.launch.num_nodes,
        strategy=strategy,
        precision=None if has_precision else LIGHTNING_PRECISION[plan.precision],
        max_steps=plan.batch.num_steps,
        accumulate_grad_batches=plan.batch.accumulation,
        callbacks=callbacks,
        logger=build_loggers(plan) if is_main_process() else [],
        plugins=plugins,
        log_every_n_steps=plan.config.logging.every,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        limit_val_batches=0,
        num_sanity_val_steps=0,
    )


def _without_signal_handling(trainer: pl.Trainer) -> None:
    """Signals are `callbacks/preemption.py`'s business.

    Lightning 2.6's handler of SIGTERM broadcasts inside the handler, so a signal to one rank makes it wait for the
    others for ever; and before every micro-batch it broadcasts a flag and reads it on the host, which waits for all the
    work in flight. It has no option for either.
    """
    connector, loop = trainer._signal_connector, trainer.fit_loop.epoch_loop
    connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
    if hasattr(loop, "_broadcast_sigterm_tensor"):
        loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
