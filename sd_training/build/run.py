"""Every object of a run, from its plan: folder, model, data, callbacks, strategy, trainer."""

import os
import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytorch_lightning as pl
import torch
from PIL import Image
from pytorch_lightning.loggers import Logger
from pytorch_lightning.plugins.environments import LightningEnvironment, SLURMEnvironment, TorchElasticEnvironment
from pytorch_lightning.profilers import PassThroughProfiler
from pytorch_lightning.strategies import Strategy
from torch.utils.tensorboard import SummaryWriter
from torchmetrics.image.fid import FrechetInceptionDistance

from sd_training.build.cache import open_cache
from sd_training.build.data import ANY_GRID, make_data
from sd_training.build.encoders import start_encoders
from sd_training.build.flops import PictureFlops, peak_tflops
from sd_training.build.models import Trained, build_model, parts_encoded_elsewhere
from sd_training.build.plan import Plan, Start, find_start, make_mirror, own_run_dir, titled
from sd_training.build.preflight import wandb_mode
from sd_training.build.prior import draw_class_images
from sd_training.callbacks.base import RunState
from sd_training.callbacks.ema import Ema
from sd_training.callbacks.evaluation import Evaluation
from sd_training.callbacks.metrics import COLUMNS as METRICS
from sd_training.callbacks.metrics import GradientNorms, JsonRows, MetricRows, Metrics, ProgressBar
from sd_training.callbacks.numerics import NumericGuard
from sd_training.callbacks.preemption import Preemption, deadline_s
from sd_training.callbacks.previews import BatchPictures, Pictures
from sd_training.callbacks.profiling import Profile
from sd_training.callbacks.run_record import RunRecord
from sd_training.callbacks.runtime import Runtime, StartTimes
from sd_training.callbacks.save import MIRROR_AFTER_STOP_S, Save
from sd_training.callbacks.validation import RFD, RFID, Validation, column_names
from sd_training.checkpoint.folder import RunLock, replace_text
from sd_training.checkpoint.mirror import Mirror
from sd_training.config.changes import resolved_yaml, to_plain
from sd_training.config.schema import PartConfig
from sd_training.data.datamodule import TrainingData
from sd_training.data.index.report import report_text
from sd_training.errors import Checks
from sd_training.evaluation.networks import InceptionFeatures, load_inception
from sd_training.export.draw import read_captions
from sd_training.log import RunLog, get_logger, is_main_process, redacted
from sd_training.models.family import AUTOCAST_DTYPE
from sd_training.models.load import load_part
from sd_training.models.reconstruction import PooledFeatures
from sd_training.parallel.launch import process_group_backend, use_one_worker_per_gloo_group, use_own_device
from sd_training.parallel.strategies import FSDP2Strategy, ReplicatedStrategy, ShardingSpec, SingleProcessStrategy
from sd_training.signals import StopSignals
from sd_training.training import TrainedModule
from sd_training.watchdog import HangWatch

log = get_logger(__name__)

FINISH_S = 30.0
"""At the end of a run W&B has this long to send what is queued."""
END_S = 2 * FINISH_S
"""What the loggers may need after the last save: `FINISH_S`, and W&B's process until it has ended."""
_STEP = "trainer/global_step"
"""W&B's x axis, as Lightning names it."""
_LIGHTNING_PRECISION: dict[str, Any] = {"no": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}
_ENVIRONMENTS: dict[str, Callable[[], Any]] = {
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
    plan: Plan, signals: StopSignals | None = None, watch: HangWatch | None = None, run_log: RunLog | None = None
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
    signals = signals or StopSignals()
    times = StartTimes(signals.started_s)
    times.end("imports and configuration")
    use_own_device(plan.launch)
    torch.set_float32_matmul_precision(plan.config.trainer.matmul_precision)
    mirror = make_mirror(plan)
    start = find_start(plan, mirror)
    run_lock = own_run_dir(plan, mirror)
    times.end("run folder")
    if run_log is not None:
        run_log.open(plan.run_dir, run_lock.check)
    if start.is_done:
        log.info("\n".join([f"{plan.run_dir} is finished; it {start.sentence()}", *filter(None, [start.changes()])]))
    encoders = None if start.is_done else start_encoders(plan)  # they load their networks meanwhile
    checks = Checks()
    trained = checks.run(lambda: build_model(plan))
    if trained is None and is_main_process():  # the index that this makes is kept for the next start
        log.warning("the model cannot be used (see the error at the end); the data is checked as well")
        checks.run(make_data(plan, None, ANY_GRID).prepare_data)
    checks.finish()
    assert trained is not None
    times.end("model")
    watch = watch or HangWatch({}, plan.run_dir)
    if not start.is_done:
        draw_class_images(plan, start, trained, watch)
        if plan.config.dataset.prior.path is not None:
            times.end("class images")
    cache = open_cache(plan, trained.family) if trained.family else None
    data = make_data(plan, trained.family, trained.latent_grid, cache, encoders)
    config = plan.config
    end_s = deadline_s(config.experiment.max_hours, signals.started_s, os.environ)
    reserved_s = END_S + (0.0 if mirror is None else MIRROR_AFTER_STOP_S)
    preemption = Preemption(signals, config, RunState(watch), end_s, reserved_s)
    callbacks = _callbacks(plan, start, trained, data, preemption, run_lock, watch, mirror, times)
    trainer = _trainer(plan, callbacks, _strategy(plan, trained.sharding))
    return Run(trainer, trained.module, data, preemption, plan.is_child)


def _callbacks(
    plan: Plan,
    start: Start,
    trained: Trained,
    data: TrainingData,
    preemption: Preemption,
    run_lock: RunLock,
    watch: HangWatch,
    mirror: Mirror | None,
    times: StartTimes,
) -> list[pl.Callback]:
    """In the order they act after an optimizer step; the rules are in `callbacks/base.py`."""
    config, batch, run_dir, run_state = plan.config, plan.batch, plan.run_dir, preemption.state
    ema = _ema(plan, trained) if config.model.use_ema else None

    def run_metadata() -> dict[str, Any]:
        """For run.json and for incidents, from which `scripts/replay_step.py` finds samples and draws of a step again;
        called once the data is open."""
        return {
            "world_size": batch.processes,
            "global_batch": batch.global_batch,
            "batch_plan": asdict(batch),
            "strategy": plan.layout.strategy,
            "precision": plan.precision,
            "seed": config.experiment.seed,
            "data_fingerprint": data.fingerprint(),
        }

    networks = [*trained.sharding.roots, *trained.sharding.fp32_roots]
    num_parameters = sum(p.numel() for network in networks for p in network.parameters() if p.requires_grad)
    title = f"training {', '.join(type(network).__name__ for network in networks)} of {num_parameters:,} parameters"
    if trained.module.has_adapters:
        title = title.replace("training", "training adapters in", 1)

    def record() -> dict[str, Any]:
        return run_metadata() | {
            "model": title,
            "devices": plan.device_sentence(),
            "device": _device_name(plan),
            "data": report_text(data.report()).splitlines(),
        }

    names = {"metrics.csv": MetricRows, "metrics.jsonl": JsonRows}
    rows = [kind(run_dir / name, METRICS, run_lock) for name, kind in names.items()]
    every, shown_every, profiled = config.logging.every, config.logging.batch_every, config.logging.profile_steps
    gradient_norms = GradientNorms(every) if config.logging.gradient_norms else None
    peak = config.logging.peak_tflops
    if peak is None and plan.launch.accelerator == "cuda":
        peak = peak_tflops(torch.cuda.get_device_name(), plan.precision)
    flops = None if peak is None else PictureFlops(trained, parts_encoded_elsewhere(config))
    encoder_times = None if data.encoders is None else data.encoders.times
    validation = None
    if data.held_out is not None:
        frechet = dict[str, FrechetInceptionDistance]()  # made on the CPU; processes add up their sums
        if trained.module.perceptual is not None:
            frechet[RFD] = FrechetInceptionDistance(PooledFeatures(trained.module.perceptual))
        if trained.family is None and (place := config.validation.inception) is not None:
            inception = load_inception(place, "validation.inception").module
            frechet[RFID] = FrechetInceptionDistance(InceptionFeatures(inception))
        columns = column_names(trained.module.held_out, frechet)
        validation_rows = MetricRows(run_dir / "validation.csv", columns, run_lock)
        validation = Validation(data.held_out, config, validation_rows, plan.precision, ema, preemption, frechet)
    saves = Save(run_dir, config, trained.exported, ema, run_state, run_lock, bool(start.source), mirror)
    callbacks: list[pl.Callback | None] = [
        preemption,
        RunRecord(run_dir, resolved_yaml(config), record, lambda step: _banner(plan, start, data, title, step)),
        ema,
        NumericGuard(saves, data.name_of, run_metadata),
        gradient_norms,
        Metrics(rows, every, batch.global_batch, ema, run_state, gradient_norms, flops, peak, encoder_times),
        validation,
        *_pictures(plan, trained, ema, run_state),
        BatchPictures(run_dir, shown_every, data.tokenizers, plan.precision) if shown_every else None,
        saves,
        Evaluation(run_dir, config.evaluation.device, every) if trained.family and config.evaluation.every else None,
        ProgressBar(run_state, batch.global_batch, batch.num_steps) if config.logging.progress_bar else None,
        Profile(run_dir, *profiled) if profiled else None,
        Runtime(watch, run_lock, times),
    ]
    return [callback for callback in callbacks if callback is not None]


def _banner(plan: Plan, start: Start, data: TrainingData, title: str, step: int) -> str:
    """Summary of this start in one block, in which a mistake is easier to see than in the config.

    Args:
        title: what is trained, counted before it is sharded.
        step: optimizer steps that are done.
    """
    average = f"with decay {plan.config.ema.decay:g}, is exported" if plan.config.model.use_ema else "none"
    done = f"resuming after optimizer step {step:,} of {plan.batch.num_steps:,}" if step else "a new run"
    if start.origin:
        done = f"a new run from {start.origin}, at optimizer step {step:,} of {plan.batch.num_steps:,}"
    device = f" ({torch.cuda.get_device_name()})" if plan.launch.accelerator == "cuda" else ""
    rows = {
        "run folder": f"{plan.run_dir}, {done}",
        "runs on": f"{plan.device_sentence()}{device}",
        "EMA": average,
        "samples": f"{sum(len(dataset.selected) for dataset in data.datasets):,}",
        "length": plan.batch.sentence(),
    }
    return titled(title, [*(f"{name:<12}{value}" for name, value in rows.items()), *start.changes().splitlines()])


def _device_name(plan: Plan) -> str:
    """Of the GPU or the processor; empty where the system does not know it."""
    if plan.launch.accelerator == "cuda":
        return torch.cuda.get_device_name()
    with suppress(OSError):
        return "".join(re.findall(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text())[:1])
    return ""


def _ema(plan: Plan, trained: Trained) -> Ema:
    """The average, started from `ema.path` where it is given."""
    config, family, weights = plan.config.ema, trained.family, None
    if config.path is not None:
        part = family.denoiser_part if family else "vae"
        stored = PartConfig(pretrained=config.path, target=family.classes.get(part) if family else None)
        network = load_part(part, stored, seed=0, option="ema.path")
        weights = {name: parameter.detach() for name, parameter in network.named_parameters()}
    return Ema(config, plan.run_dir, weights)


def _pictures(plan: Plan, trained: Trained, ema: Ema | None, state: RunState) -> list[Pictures]:
    """Previews and evaluation images; there is nothing to draw while an autoencoder is trained."""
    config, pictures = plan.config, []
    if trained.family is None:
        return []
    parts = (plan.run_dir, config, trained.family.pipeline, plan.precision)
    if config.sampling.every and config.sampling.prompts:
        prompts = [(f"{i:03d}", prompt) for i, prompt in enumerate(config.sampling.prompts)]
        sets = {"": ema, "_trained": None} if config.sampling.raw and ema is not None else {"": ema}
        for suffix, weights in sets.items():
            rows = f"previews_denoising{suffix}" if config.sampling.denoising else None
            own = (*parts, weights, state, f"previews{suffix}", config.sampling.every, prompts)
            pictures.append(Pictures(*own, at_start=True, denoising=rows))
    path, count = config.experiment.eval_caption_file, config.experiment.num_eval_images
    if path is not None:
        if captions := read_captions(Path(path))[:count]:
            pictures.append(Pictures(*parts, ema, state, "eval", config.experiment.save_every, captions))
        else:
            log.warning(f"experiment.eval_caption_file: {path} has no caption to draw")
    return pictures


def _strategy(plan: Plan, sharding: ShardingSpec) -> Strategy:
    """Lightning's strategy; one process needs no process group."""
    config = plan.config.distributed
    accelerator, name = plan.launch.accelerator, plan.layout.strategy
    if name == "single":
        return SingleProcessStrategy(device="cuda:0" if accelerator == "cuda" else accelerator)
    use_one_worker_per_gloo_group()
    backend = process_group_backend(config, accelerator)
    timeout = timedelta(seconds=plan.config.watch.collective_timeout_s)
    options: dict[str, Any] = {"process_group_backend": backend, "timeout": timeout}
    match name:
        case "ddp":
            # Gradients live in the communication buckets (no copy), and every parameter is used once in every step:
            # a static graph, which PyTorch cannot learn from a first micro-batch without communication.
            is_static = plan.batch.accumulation == 1
            return ReplicatedStrategy(
                gradient_as_bucket_view=True, static_graph=is_static, broadcast_buffers=False, **options
            )
        case "fsdp" | "hsdp":
            if config.offload_parameters and backend == "nccl":  # blocks in CPU memory are gathered by gloo
                options["process_group_backend"] = "cpu:gloo,cuda:nccl"
            return FSDP2Strategy(plan.layout.mesh, sharding, config, AUTOCAST_DTYPE[plan.precision], **options)
        case _:
            from sd_training.parallel.deepspeed import DeepSpeedZeroStrategy  # takes seconds

            return DeepSpeedZeroStrategy(int(name[-1]), plan.config, plan.precision, **options)


class _NoProfiler(PassThroughProfiler):
    """Lightning enters the context of a profiler around every hook, some forty times per step."""

    _nothing = nullcontext("")

    def profile(self, action_name: str) -> AbstractContextManager[str]:  # type: ignore[override]
        """One context for all; the one of the base class makes a generator each time."""
        return self._nothing


def training_step_arguments(kwargs: OrderedDict[str, Any], batch: Any, batch_idx: int) -> OrderedDict[str, Any]:
    """Of a micro-batch, in their order."""
    return OrderedDict(batch=batch, batch_idx=batch_idx)


def _trainer(plan: Plan, callbacks: list[pl.Callback], strategy: Strategy) -> pl.Trainer:
    plugins: list[Any] = []
    is_deepspeed = plan.layout.strategy.startswith("deepspeed")
    if is_deepspeed:  # it would round inputs
        from sd_training.parallel.deepspeed import DeepSpeedZeroPrecision

        plugins.append(DeepSpeedZeroPrecision(_LIGHTNING_PRECISION[plan.precision]))
    if plan.launch.processes > 1:  # named, because Lightning would detect SLURM inside salloc
        plugins.append(_ENVIRONMENTS[plan.launch.launcher]())
    trainer = pl.Trainer(
        accelerator=plan.launch.accelerator,
        devices=plan.launch.devices,
        num_nodes=plan.launch.num_nodes,
        strategy=strategy,
        precision=None if is_deepspeed else _LIGHTNING_PRECISION[plan.precision],
        max_steps=plan.batch.num_steps,
        accumulate_grad_batches=plan.batch.accumulation,
        benchmark=plan.config.trainer.cudnn_benchmark,
        callbacks=callbacks,
        logger=_loggers(plan) if is_main_process() else [],
        plugins=plugins,
        profiler=_NoProfiler(),
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
    # Lightning looks up the parameters of `training_step` at every micro-batch, which takes longer than a kernel.
    trainer.fit_loop.epoch_loop._build_kwargs = training_step_arguments  # type: ignore[method-assign]
    return trainer


def _loggers(plan: Plan) -> list[Logger]:
    """TensorBoard always; W&B when a key or a mode asks for it."""
    mode, reason = wandb_mode(plan.config.wandb)
    if reason is not None:
        log.info(f"W&B is off: {reason}")
    loggers: list[Logger] = [RunLogger("TensorBoard", lambda: _begin_tensorboard(plan))]
    return loggers if mode == "disabled" else [*loggers, RunLogger("W&B", lambda: _begin_wandb(plan, mode))]


class LogWriter(NamedTuple):
    """The functions of TensorBoard or W&B for numbers and pictures of an optimizer step, and for the end."""

    metrics: Callable[[Mapping[str, float], int | None], object]
    picture: Callable[[str, Image.Image, int, str], object]
    """Tag, picture, step, caption; without a caption the last one is empty."""
    finish: Callable[[], object]


class RunLogger(Logger):
    """A logger beside `metrics.csv` that is off after its first failure, which is one warning; training continues.

    Both queue what they are given: TensorBoard in its own thread, W&B in its own process. `run.log` waits for
    that process, not for the server, and `run.finish` has a time limit. `wandb.init` waits for the server: one that
    never answers costs up to two minutes once.

    Args:
        title: for the warning.
        begin: makes the writer; called when training starts. By then the processes of the run have been started, which
            need the command line as it is (see `_begin_wandb`).
    """

    name, version = "", ""

    def __init__(self, title: str, begin: Callable[[], LogWriter]) -> None:
        super().__init__()
        self.name, self._begin = title, begin
        self._writer: LogWriter | None = None
        self._is_off = False

    def save(self) -> None:
        """Creates the writer; Lightning calls it when training starts."""
        self._do(lambda writer: None)

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """Does nothing: the options are logged when the run begins."""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Numbers of an optimizer step."""
        self._do(lambda writer: writer.metrics(metrics, step))

    def log_picture(self, tag: str, picture: Image.Image, step: int, caption: str) -> None:
        """A picture of an optimizer step."""
        self._do(lambda writer: writer.picture(tag, picture, step, caption))

    def finalize(self, status: str) -> None:
        """Writes or sends what is queued."""
        if self._writer is not None:
            self._do(lambda writer: writer.finish())
            self._is_off = True

    def _do(self, act: Callable[[LogWriter], object]) -> None:
        if self._is_off:
            return
        try:
            self._writer = self._writer or self._begin()
            act(self._writer)
        except (Exception, SystemExit) as error:
            self._is_off = True
            reason = str(error.__cause__ or error).strip().partition("\n")[0][:300]
            log.warning(
                f"{self.name} failed and is off from now on ({type(error).__name__}: {reason}); metrics.csv holds "
                "every number"
            )


def _begin_tensorboard(plan: Plan) -> LogWriter:
    writer: Any = SummaryWriter(str(plan.run_dir / "tensorboard"))

    def picture(tag: str, picture: Image.Image, step: int, caption: str) -> None:
        writer.add_image(tag, np.asarray(picture), step, dataformats="HWC")
        if caption:
            writer.add_text(tag, caption.replace("\n", "  \n"), step)  # Markdown: two blanks end a line

    return LogWriter(
        lambda metrics, step: [writer.add_scalar(name, value, step) for name, value in metrics.items()],
        picture,
        writer.close,
    )


def _begin_wandb(plan: Plan, mode: str) -> LogWriter:
    import wandb  # optional, and takes a second to import

    # W&B writes the command line into its files.
    sys.argv = [redacted(word) for word in sys.argv]
    # Only W&B's errors are printed; `setup` alone does not apply this where the search for a login has read settings.
    wandb.termsetup(wandb.setup(wandb.Settings(show_info=False, show_warnings=False)).settings, None)
    settings: dict[str, Any] = {"mode": mode, "finish_timeout": 0.8 * FINISH_S}
    # A key of the configuration goes to W&B alone: the environment would pass it to every process started from here.
    if plan.config.wandb.api_key is not None:
        settings["api_key"] = plan.config.wandb.api_key
    options = plan.config.experiment
    run = wandb.init(
        name=plan.config.experiment.name,
        project=plan.config.experiment.project,
        entity=plan.config.wandb.entity,
        dir=plan.run_dir,
        id=_wandb_id(plan.run_dir, None if "wandb" in options.reset else options.start_from),
        resume="allow",
        config=to_plain(plan.config),
        settings=wandb.Settings(**settings),
    )
    run.define_metric(_STEP)
    run.define_metric("*", step_metric=_STEP, step_sync=True)
    where = run.url if mode == "online" else f"offline; upload with `wandb sync {run.settings.sync_dir}`"
    log.info(f"W&B: {where}")
    return LogWriter(
        lambda metrics, step: run.log({**metrics, _STEP: step}),
        lambda tag, picture, step, caption: run.log(
            {tag: [wandb.Image(picture, caption=caption or None)], _STEP: step}
        ),
        run.finish,
    )


def _wandb_id(run_dir: Path, source: str | None = None) -> str:
    """The W&B id of the run, kept in its folder so that a resumed run continues the same curves; on a full disk it is
    not kept. A run that begins with the checkpoint of `source` continues the curves of that run."""
    path, identifier = run_dir / "wandb_id", os.urandom(8).hex()
    begun = [] if source is None else [Path(source), Path(source).absolute().parents[1]]  # RUN, RUN/checkpoints/step=N
    with suppress(OSError):
        kept = (p.read_text(encoding="utf-8").strip() for p in (path, *(b / path.name for b in begun)) if p.exists())
        identifier = next(filter(None, kept), identifier)
        replace_text(path, f"{identifier}\n")
    return identifier
