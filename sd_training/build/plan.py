"""The plan of a start, before model and data are loaded: devices, batch arithmetic, folders, precision, and whether
the run is new, resumes from a checkpoint, or is refused. Also acquires the run folder."""

import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import torch

import sd_training.models  # noqa: F401 - it must be what imports diffusers first
from sd_training.callbacks.ema import EMA_PART
from sd_training.callbacks.run_record import RunRecord
from sd_training.checkpoint.folder import (
    NO_LOCK,
    RunLock,
    acquire_run_lock,
    folder_name,
    last_saved_step,
    newest_verified,
    remove_leftovers,
    source_checkpoint,
    step_of,
    verify_checkpoint,
)
from sd_training.checkpoint.mirror import Mirror
from sd_training.checkpoint.save import open_checkpoint
from sd_training.config.changes import CONFIG, Change, changed_options, refused_changes
from sd_training.config.fields import is_below, options, value_of
from sd_training.config.plan import BatchPlan, Layout, counted, find_layout
from sd_training.config.schema import Config, ExperimentConfig
from sd_training.config.value_types import output_path
from sd_training.data.datamodule import TrainingData, order_problem
from sd_training.data.dataset import open_dataset
from sd_training.data.order.buckets import training_sizes
from sd_training.errors import CheckpointError, ConfigError, SaveError
from sd_training.export.pipeline import CURRENT, KEPT, recover_exports
from sd_training.log import get_logger, is_main_process
from sd_training.models.flops import encoding_share
from sd_training.parallel.launch import Launch, find_launch
from sd_training.training import changed_requirements
from sd_training.watchdog import FirstFailure

log = get_logger(__name__)

_BASE = ("model.pretrained", "model.revision", "model.unet.pretrained", "model.transformer.pretrained")
"""Options that choose the weights beside which adapters are trained."""


@dataclass(frozen=True)
class Plan:
    """Everything about a run that follows from the config and the launcher."""

    config: Config
    launch: Launch
    layout: Layout
    batch: BatchPlan
    run_dir: Path
    precision: str
    """no, bf16 or fp16, as supported by this device."""

    @property
    def encoders(self) -> int:
        """Encoder processes per machine."""
        count = self.config.distributed.encoders
        assert isinstance(count, int), "make_plan has counted them"
        return count

    @property
    def is_child(self) -> bool:
        """Whether Lightning's launcher started this process. It kills the first process, with a status of its own, when
        a child ends with another status than 0."""
        return self.launch.launcher == "own" and not is_main_process()

    def device_sentence(self) -> str:
        """Devices, precision and strategy, for the dry run and the first lines of a run."""
        launch, precision = self.launch, self.precision.replace("no", "fp32")
        if precision != "fp32":
            precision += f" (weights {'bf16' if self.config.model.bf16_weights else 'fp32'})"
        machines = f" on {counted(launch.num_nodes, 'machine')}" if launch.num_nodes > 1 else ""
        processes = counted(launch.processes, "process", "processes")
        if self.encoders:
            processes += f" and {counted(self.encoders, 'encoder process', 'encoder processes')} per machine"
        return f"{launch.accelerator}, {processes}{machines}, {precision}, strategy {self.layout.strategy}"


def make_plan(config: Config, *, is_described: bool = False) -> Plan:
    """Devices, batch arithmetic and folders.

    Args:
        is_described: the run is only described, and may be one of other machines than this one.

    Raises:
        ConfigError: when the config contradicts itself, the launcher or the machine.
    """
    encoders = config.distributed.encoders
    if encoders == "auto":
        encoders = _keeping_up(config, find_launch(config.trainer, is_described=is_described))
        config = config.replace(distributed=config.distributed.replace(encoders=encoders))
        log.info(f"distributed.encoders: auto is {encoders} here")
    named, gpus = config.distributed.encoder_devices, torch.cuda.device_count()
    if named and torch.cuda.is_available() and not is_described and max(named) >= gpus:
        raise ConfigError(f"distributed.encoder_devices: names GPU {max(named)}, but there are 0 to {gpus - 1}")
    # Who names both decides whether they share GPUs.
    apart = 0 if named and config.trainer.devices != "auto" else encoders
    launch = find_launch(config.trainer, apart, is_described=is_described)
    if encoders and not is_described and not sys.platform.startswith("linux"):
        raise ConfigError("distributed.encoders: needs Linux; use 0")
    layout = find_layout(config.distributed, launch.processes, launch.devices)
    if layout.strategy.startswith("deepspeed") and find_spec("deepspeed") is None:
        raise ConfigError(
            f"distributed.strategy: {layout.strategy} needs the package deepspeed; pip install deepspeed, or use fsdp"
        )
    if config.model.use_ema and config.ema.device == "cuda" and launch.accelerator != "cuda" and not is_described:
        raise ConfigError(f"ema.device: cuda, but the run is on {launch.accelerator}; use auto or cpu")
    batch = BatchPlan(
        micro_batch=config.system.batch_size,
        accumulation=config.system.gradient_accumulation,
        processes=layout.mesh.data_ranks,
        num_examples=1,
        sharing=layout.mesh.tensor,
    )
    batch = replace(batch, num_examples=run_length(config, batch.global_batch))
    if encoders and launch.devices % batch.sharing:
        raise ConfigError(
            f"distributed.encoders: a group of distributed.mesh.tensor={batch.sharing} must be on one machine, with "
            f"{counted(launch.devices, 'training process', 'training processes')}; use another number of them"
        )
    precision = config.model.mixed_precision
    if precision == "fp16" and launch.accelerator == "cpu":
        log.info("model.mixed_precision: a CPU cannot train in fp16, so bf16 is used here")
        precision = "bf16"
    run_dir = output_path(config.experiment.log_dir) / config.experiment.name
    return Plan(config, launch, layout, batch, run_dir, precision)


def run_length(config: Config, global_batch: int) -> int:
    """Length of a run [samples over all processes]; for passes over the data, this opens the data.

    Raises:
        DataError: the data cannot be used.
    """
    experiment, params = config.experiment, config.dataset.params
    if experiment.num_steps is not None:
        return experiment.num_steps * global_batch
    if experiment.num_epochs is None:
        assert experiment.num_examples_to_see is not None, "config/check.py requires one of the three"
        return experiment.num_examples_to_see
    sizes, needed = training_sizes(params), config.model.train != "vae"
    dataset = open_dataset(config.dataset.type, params, params, sizes, global_batch, captions_needed=needed)
    return round(experiment.num_epochs * len(dataset.selected))


def _keeping_up(config: Config, launch: Launch) -> int:
    """`distributed.encoders=auto`. A launcher, and `trainer.devices`, have decided how many processes train."""
    if launch.accelerator != "cuda":
        share = encoding_share(config)
        return math.ceil(launch.devices * share / (1 - share))
    gpus = torch.cuda.device_count()
    if launch.launcher == "own" and config.trainer.devices == "auto":
        return balanced_encoders(config, gpus)
    return gpus - launch.devices


def balanced_encoders(config: Config, gpus: int) -> int:
    """How many GPUs of a machine have to encode so that the others need not wait, by FLOPs; none of a single one.

    Not by measured times: the number decides how many processes train, and so the global batch, which every start of a
    run must have in common.

    Raises:
        ConfigError: parts of the model cannot be made or do not fit together.
    """
    return min(math.ceil(gpus * encoding_share(config)), gpus - 1)


@dataclass(frozen=True)
class Start:
    """How a start of the run begins. `find_start` determines it and changes nothing."""

    run_dir: Path
    num_steps: int
    """Optimizer steps of the whole run."""
    step: int = 0
    """Optimizer steps of the checkpoint that it resumes from, by names and sizes of the files; if that one turns out to
    be damaged, an older one is used."""
    source: str = ""
    """That checkpoint, or the mirror's copy of it; empty at the beginning of a run."""
    changed: Sequence[Change] = ()
    """Options that differ from the last start of a resumed run."""
    origin: str = ""
    """The checkpoint of another run that a new run begins with."""

    @property
    def is_done(self) -> bool:
        """Whether there is nothing left to train."""
        return bool(self.source) and self.step >= self.num_steps

    def sentence(self) -> str:
        """For the dry run and the log."""
        if not self.source:
            begun = f"; it begins with {self.origin}, after optimizer step {self.step:,}" if self.origin else ""
            return f"a new run: {self.run_dir} has no checkpoint{begun}"
        after = f"{self.step:,} of {counted(self.num_steps, 'optimizer step')}"
        done = f"resumes from {self.source}, after {after}"
        return f"{done}; make it longer to train more" if self.is_done else done

    def changes(self) -> str:
        """The changed options, one per line; empty where none changed."""
        return titled(f"options that differ from the last start ({self.run_dir / CONFIG}):", self.changed)


def titled(title: str, lines: Sequence[object]) -> str:
    """A title and the lines below it; empty where there is none."""
    return "\n".join([title, *(f"  {line}" for line in lines)]) if lines else ""


def find_start(plan: Plan, mirror: Mirror | None) -> Start:
    """What a start of this run will do, without doing it. All processes of a run get the same result.

    Args:
        plan: of the run.
        mirror: as `make_mirror` gives it.

    Raises:
        UserError: the run does not start, and why.
    """
    run_dir, experiment, checkpoints = plan.run_dir, plan.config.experiment, plan.run_dir / "checkpoints"
    damage = own = None
    with _storage_errors(run_dir):
        try:
            own = newest_verified(checkpoints, contents=False)
        except CheckpointError as error:
            damage = error
        saved = last_saved_step(run_dir)
        # Every process lists them; continuing without the list could lose steps that were trained elsewhere.
        copies = mirror.steps() if mirror is not None and (own is None or is_main_process()) else []
    # A run that was stopped before its first save leaves rows of metrics and a record of its start only: a new run
    # loses nothing by replacing those.
    traces = [name for name in (CURRENT, KEPT) if os.path.lexists(run_dir / name)]
    if saved is not None:
        traces.insert(0, f"last save after optimizer step {saved}")
    if not experiment.requeue and (own is not None or damage is not None or copies or traces):
        raise ConfigError(
            f"experiment.requeue: false, but {run_dir} already holds a run; choose another experiment.name, remove the "
            "folder, or set experiment.requeue=true to continue it"
        )
    if own is None and not copies:
        if damage is not None:
            raise damage
        if traces:
            where = f"{checkpoints} and {mirror.root} hold" if mirror else f"{checkpoints} holds"
            given = "" if mirror else ", give the checkpoint.mirror that has copies of them"
            raise ConfigError(
                f"experiment.name: {run_dir} holds a run that has trained ({', '.join(traces)}), but {where} no "
                "checkpoint of it, and a new run would replace what is left: bring the checkpoints back"
                f"{given}, take another experiment.name, or remove {run_dir}"
            )
        return _new_start(plan)
    step, source = (step_of(own), str(own)) if own is not None else (-1, "")
    if mirror is not None and copies and copies[-1] > step:
        step, source = copies[-1], f"{mirror.root}/{folder_name(copies[-1])}"
    changed, problems = _changes(plan, own)
    if own is not None and source == str(own):
        problems += _state_problems(plan, own)
    if problems:
        raise ConfigError(problems)
    return Start(run_dir, plan.batch.num_steps, step, source, changed)


def _new_start(plan: Plan) -> Start:
    """Of a run without a checkpoint of its own."""
    options, num_steps = plan.config.experiment, plan.batch.num_steps
    if options.start_from is None:
        return Start(plan.run_dir, num_steps)
    folder = source_checkpoint(Path(options.start_from), contents=False)
    step = 0 if "data" in options.reset else step_of(folder)
    problems = _state_problems(plan, folder, options)
    if step >= num_steps:
        length = f"the run has {counted(num_steps, 'optimizer step')}, and {folder} is after {step:,}"
        problems.append(f"{options.length_option}: {length}; raise it, or add data to experiment.reset")
    if problems:
        raise ConfigError(problems)
    if plan.config.model.lora.rank:  # the checkpoint holds adapters alone
        others = [change for change in changed_options(_options_of(folder), plan.config) if is_below(change.key, _BASE)]
        if others:
            said = "; ".join(change.sentence() for change in others)
            log.warning(f"experiment.start_from: its adapters were trained beside other frozen weights: {said}")
    return Start(plan.run_dir, num_steps, step, origin=str(folder))


def _changes(plan: Plan, checkpoint: Path | None) -> tuple[list[Change], list[str]]:
    """Options that differ from the last start, and why those that may not differ are refused. If the run folder has no
    configuration of that start, the checkpoint's is compared; without either, nothing is."""
    previous = ""
    try:
        previous = (plan.run_dir / CONFIG).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        previous = _options_of(checkpoint) if checkpoint is not None else ""
    changed = changed_options(previous, plan.config)
    return changed, refused_changes(changed, plan.config.experiment.allow_changed, plan.run_dir)


def _options_of(checkpoint: Path) -> str:
    """The configuration in a checkpoint; empty where it cannot be read, which is said when it is loaded."""
    with suppress(CheckpointError, LookupError, TypeError):
        return str(open_checkpoint(checkpoint).state["callbacks"][RunRecord.__name__][CONFIG])
    return ""


def _state_problems(plan: Plan, folder: Path, begun: ExperimentConfig | None = None) -> list[str]:
    """Why a checkpoint cannot continue with these options, as far as it is known without model and data; the rest is
    found when it is loaded.

    Args:
        begun: how a new run begins with the checkpoint of another one.
    """
    try:
        stored = open_checkpoint(folder)
        if begun is not None:
            average = EMA_PART if begun.start_from_average else None
            stored = stored.for_new_run(begun.reset, TrainingData.__name__, average)
        state = stored.state
    except CheckpointError as error:
        # A damaged one is set aside when it is loaded, and an older one is used; an intact one is of another version.
        return [] if verify_checkpoint(folder) else [str(error)]
    trained, config = state.get("trained_as", {}), plan.config
    given = {key: value_of(config, key) for key in trained if key in options()}
    trained_problem = changed_requirements(trained, {key: value for key, value in given.items() if value is not None})
    before = state.get(TrainingData.__qualname__, {})
    data_problem = order_problem(before, config.dataset, plan.batch, config.experiment.seed)
    return [problem for problem in (trained_problem, data_problem) if problem]


def check_data(start: Start, data: TrainingData) -> None:
    """As a run does when it loads the checkpoint that it resumes from, unless that one is in the mirror only.

    Args:
        start: as `find_start` gives it.
        data: of this start; is opened, and indexed where it was not before.

    Raises:
        CheckpointError: the checkpoint does not fit this data.
        DataError: the data cannot be used.
    """
    folder = Path(start.source)
    if start.run_dir in folder.parents:
        data.load_state_dict(open_checkpoint(folder).state[type(data).__qualname__])


def make_mirror(plan: Plan) -> Mirror | None:
    """Where copies of the checkpoints are.

    Raises:
        ConfigError: the environment's credentials cannot be used.
    """
    url = plan.config.checkpoint.mirror
    return None if url is None else Mirror(url, plan.config.experiment.name)


def own_run_dir(plan: Plan, mirror: Mirror | None) -> RunLock:
    """Rank 0 makes the run folder, acquires its lock, removes what a killed run left, and downloads a newer
    checkpoint of the mirror."""
    if not is_main_process():
        return NO_LOCK
    checkpoints, restored = plan.run_dir / "checkpoints", None
    try:
        plan.run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"experiment.log_dir: {plan.run_dir} cannot be made: {error.strerror}") from error
    with _storage_errors(plan.run_dir):
        run_lock = acquire_run_lock(plan.run_dir)
        FirstFailure(plan.run_dir, 0).clear()
        remove_leftovers(checkpoints)
        recover_exports(plan.run_dir)
        if mirror is not None:
            restored = mirror.restore(checkpoints, run_lock)
    if restored is not None and (problems := _changes(plan, restored)[1]):
        raise ConfigError(problems)
    return run_lock


@contextmanager
def _storage_errors(run_dir: Path) -> Iterator[None]:
    """Turns OS errors of the run folder into messages."""
    try:
        yield
    except (NotADirectoryError, FileExistsError) as error:
        raise ConfigError(f"experiment.name: {run_dir} cannot be a run folder: {error}; take another one") from error
    except OSError as error:
        raise SaveError(f"experiment.log_dir: {run_dir} cannot be read or written: {error}") from error
