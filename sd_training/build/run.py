"""Every object of a run, from its plan: folder, model, data, callbacks, strategy, trainer."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins.environments import (
    ClusterEnvironment,
    LightningEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from pytorch_lightning.strategies import Strategy

from sd_training.build.callbacks import build_callbacks
from sd_training.build.loggers import END_S, build_loggers
from sd_training.build.models import Trained, build_model
from sd_training.build.plan import Plan
from sd_training.build.start import find_start, make_mirror, own_run_dir
from sd_training.callbacks.base import RunState
from sd_training.callbacks.preemption import Preemption, deadline_s
from sd_training.callbacks.save import MIRROR_AFTER_STOP_S
from sd_training.config.schema import SECTIONS
from sd_training.data.datamodule import TrainingData
from sd_training.data.samples.sample import DrawSettings, Dropout
from sd_training.errors import EXIT_HANG, Checks
from sd_training.log import RunLog, get_logger, global_rank, is_main_process
from sd_training.models.encoders import AUTOCAST_DTYPE
from sd_training.models.family import Family
from sd_training.parallel.launch import process_group_backend, set_rendezvous, use_one_worker_per_gloo_group
from sd_training.parallel.strategies import (
    FSDP2Options,
    FSDP2Strategy,
    ReplicatedStrategy,
    ShardingSpec,
    SingleProcessStrategy,
)
from sd_training.signals import StopSignals
from sd_training.training.base_module import TrainedModule
from sd_training.types import LatentGrid
from sd_training.watchdog import HangWatch

log = get_logger(__name__)

ANY_GRID = LatentGrid(4, 8)
"""Placeholder where no latents are drawn."""
_LIGHTNING_PRECISION: dict[str, Literal["32-true", "bf16-mixed", "16-mixed"]] = {
    "no": "32-true",
    "bf16": "bf16-mixed",
    "fp16": "16-mixed",
}
_ENVIRONMENTS: dict[str, Callable[[], ClusterEnvironment]] = {
    "torchrun": TorchElasticEnvironment,
    "slurm": partial(SLURMEnvironment, auto_requeue=False),
    "own": LightningEnvironment,
}


@dataclass(frozen=True)
class Run:
    """A run ready to fit."""

    trainer: pl.Trainer
    module: TrainedModule
    data: TrainingData
    preemption: Preemption
    is_child: bool
    """As `Plan.is_child`."""

    @property
    def exit_status(self) -> int:
        """After the fit: 0, or what the process ends with because a signal stopped it (see `signals.py`)."""
        return 0 if self.is_child else self.preemption.status


def build_run(
    plan: Plan,
    signals: StopSignals | None = None,
    watch: HangWatch | None = None,
    run_log: RunLog | None = None,
) -> Run:
    """Every object of the run.

    Args:
        plan: what to build.
        signals: signals received since the program started; None: none yet.
        watch: measures how long a process stays in one section; None: nothing does.
        run_log: `train.log`, opened once this start owns the folder; None: there is none.

    Raises:
        ConfigError: a part cannot be loaded, parts do not fit, the run folder is taken, or the run cannot continue
            there (see `find_start`).
        CheckpointError: there are checkpoints, and none is whole.
        OutageError: storage is temporarily unavailable.
        DataError: the data set cannot be used.
    """
    mirror = make_mirror(plan)
    start = find_start(plan, mirror)
    run_lock = own_run_dir(plan, mirror)
    if run_log is not None:
        run_log.open(plan.run_dir, run_lock.check)
    if start.is_done:
        log.info("\n".join([f"{plan.run_dir} is finished; it {start.sentence()}", *filter(None, [start.changes()])]))
    trained = _model_or_all_problems(plan)
    data = make_data(plan, trained.family, trained.latent_grid)
    config, signals = plan.config, signals or StopSignals()
    preemption = Preemption(
        signals,
        deadline_s(config.experiment.max_hours, signals.started_s, os.environ),
        END_S + (0.0 if mirror is None else MIRROR_AFTER_STOP_S),
        3 if config.checkpoint.asynchronous else 2,
        RunState(),
        config.checkpoint.save_every_minutes,
        config.watch.collective_timeout_s,
    )
    watch = watch or HangWatch({}, plan.run_dir)
    callbacks = build_callbacks(plan, start, trained, data, preemption, run_lock, watch, mirror)
    trainer = _trainer(plan, callbacks, _strategy(plan, trained.sharding))
    return Run(trainer, trained.module, data, preemption, plan.is_child)


def _model_or_all_problems(plan: Plan) -> Trained:
    """The model; where it cannot be built, rank 0 also checks the data, and all problems are reported together. The
    index that this makes is kept for the next start."""
    checks = Checks()
    trained = checks.run(lambda: build_model(plan))
    if trained is not None:
        return trained
    if is_main_process():
        log.warning("the model cannot be used (see the error at the end); the data is checked as well")
        checks.run(make_data(plan, None, ANY_GRID).prepare_data)
    checks.finish()
    raise AssertionError("a check has failed")


def make_data(plan: Plan, family: Family | None, grid: LatentGrid) -> TrainingData:
    """The training data for a model with these latents; `family` is None for autoencoder training, and where the data
    is only inspected. Nothing is drawn that the objective does not read."""
    config, seed = plan.config, plan.config.experiment.seed
    if family is None:
        draws = DrawSettings(seed, grid, has_noise=False)
    else:
        own, objective = config.conditioning, family.objective
        draws = DrawSettings(
            seed,
            grid,
            Dropout(own.dropout_prob, own.encoder_dropout_prob, own.size_dropout_prob, own.crop_dropout_prob),
            has_offset_noise=bool(objective.offset_noise),
            has_input_noise=objective.input_perturbation > 0,
            has_mask=objective.masked_loss != "none",
            is_stratified=objective.timestep_density.stratified,
        )
    return TrainingData(
        dataset=config.dataset,
        plan=plan.batch,
        workers=config.system.workers,
        tokenizers=family.tokenizers() if family else {},
        draws=draws,
        captions_needed=config.model.train != "vae",
        run_dir=plan.run_dir,
        validation=config.validation,
    )


def _strategy(plan: Plan, sharding: ShardingSpec) -> Strategy:
    """Lightning's strategy; one process needs no process group."""
    config, timeout = plan.config.distributed, timedelta(seconds=plan.config.watch.collective_timeout_s)
    accelerator, name = plan.launch.accelerator, plan.layout.strategy
    backend = ""
    if name != "single":
        set_rendezvous(config.dist_url)
        use_one_worker_per_gloo_group()
        backend = process_group_backend(config, accelerator)
    match name:
        case "single":
            device = torch.device("cuda", 0) if accelerator == "cuda" else torch.device(accelerator)
            return SingleProcessStrategy(device=device)
        case "ddp":
            # Gradients live in the communication buckets (no copy), and every parameter is used once in every step:
            # a static graph, which PyTorch cannot learn from a first micro-batch without communication.
            return ReplicatedStrategy(
                process_group_backend=backend,
                timeout=timeout,
                gradient_as_bucket_view=True,
                static_graph=plan.batch.accumulation == 1,
                broadcast_buffers=False,
            )
        case "fsdp" | "hsdp":
            options = FSDP2Options(
                AUTOCAST_DTYPE[plan.precision], config.reshard_after_forward, offload=config.offload_parameters
            )
            if options.offload and backend == "nccl":  # blocks in CPU memory are gathered by gloo
                backend = "cpu:gloo,cuda:nccl"
            return FSDP2Strategy(plan.layout.mesh, sharding, options, backend, timeout)
        case _:
            from sd_training.parallel.deepspeed import DeepSpeedZeroStrategy, deepspeed_options  # takes seconds

            zero = deepspeed_options(int(name[-1]), plan.config, plan.precision)
            return DeepSpeedZeroStrategy(zero, plan.config.optimizer.max_grad_norm, backend, timeout)


def make_watch(plan: Plan) -> HangWatch:
    """The hang watch of this process, which does not count yet."""
    limits_s = {section: getattr(plan.config.watch, f"{section}_s") for section in SECTIONS}
    return HangWatch(limits_s, plan.run_dir, global_rank(), status=0 if plan.is_child else EXIT_HANG)


def _trainer(plan: Plan, callbacks: list[pl.Callback], strategy: Strategy) -> pl.Trainer:
    plugins: list[Any] = []
    is_deepspeed = plan.layout.strategy.startswith("deepspeed")
    if is_deepspeed:  # it would round inputs
        from sd_training.parallel.deepspeed import DeepSpeedZeroPrecision

        plugins.append(DeepSpeedZeroPrecision(_LIGHTNING_PRECISION[plan.precision]))
    if plan.launch.processes > 1:  # named, because Lightning would guess SLURM inside salloc
        plugins.append(_ENVIRONMENTS[plan.launch.launcher]())
    trainer = pl.Trainer(
        accelerator=plan.launch.accelerator,
        devices=plan.launch.devices,
        num_nodes=plan.launch.num_nodes,
        strategy=strategy,
        precision=None if is_deepspeed else _LIGHTNING_PRECISION[plan.precision],
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
    # Signals are handled by `callbacks/preemption.py`. Lightning 2.6's handler of SIGTERM broadcasts inside the
    # handler, so a signal to one rank makes it wait for the others forever; and before every micro-batch it broadcasts
    # a flag and reads it on the host, which waits for all the work in flight. It has no option for either.
    trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
    return trainer
