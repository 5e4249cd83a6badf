"""How a start of a run begins: at the first step, from a checkpoint, or not at all; and the folder that it takes."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sd_training.build.plan import Plan
from sd_training.callbacks.metric_rows import MetricRows
from sd_training.callbacks.metrics import COLUMNS
from sd_training.callbacks.run_record import CONFIG, RECORD, read_starts
from sd_training.checkpoint.mirror import Mirror, MirrorError
from sd_training.checkpoint.seal import ever_finished, folder_name, last_saved, newest_apparent, step_of, sweep
from sd_training.checkpoint.tensor_files import read_state
from sd_training.checkpoint.writer import UNFENCED, Fence, take
from sd_training.config.batch_plan import counted
from sd_training.config.changes import Change, changed_options, refused_changes
from sd_training.config.check import PARTS, value_of
from sd_training.config.fields import options
from sd_training.config.problems import is_below
from sd_training.data.datamodule import TrainingData, order_problem
from sd_training.errors import CheckpointError, ConfigError, OutageError, SaveError, UserError
from sd_training.export.pipeline import CURRENT, KEPT, recover_exports
from sd_training.rank_log import is_main_process
from sd_training.training.base_module import changed_facts
from sd_training.watch.first_end import FirstEnd


@dataclass(frozen=True)
class Start:
    """What a start of the run does first. `find_start` finds it out and changes nothing."""

    run_dir: Path
    num_steps: int
    """Optimizer steps of the whole run."""
    step: int = 0
    """Optimizer steps of the checkpoint that it resumes from, by names and sizes of the files: a damaged one costs more
    steps."""
    source: str = ""
    """That checkpoint, or the mirror's copy of it; empty at the beginning of a run."""
    changed: Sequence[Change] = ()
    """What differs from the options of the last start of a run that is resumed."""
    refusal: UserError | None = None
    """Why the run does not start."""

    @property
    def is_resumed(self) -> bool:
        """Whether it goes on from a checkpoint."""
        return bool(self.source)

    @property
    def is_done(self) -> bool:
        """Whether there is nothing left to train."""
        return self.is_resumed and self.step >= self.num_steps

    def sentence(self) -> str:
        """For a report or a log."""
        if self.refusal is not None:
            return f"this run would not start: {self.refusal}"
        if not self.is_resumed:
            return f"a new run: {self.run_dir} has no checkpoint"
        after = f"{self.step:,} of {counted(self.num_steps, 'optimizer step')}"
        if self.step > self.num_steps:
            after = f"{counted(self.step, 'optimizer step')}, and the options ask for {self.num_steps:,}"
        done = f"resumes from {self.source}, after {after}"
        return f"{done}; raise experiment.num_examples_to_see to train more" if self.is_done else done

    def changes(self) -> str:
        """The changed options, one per line; empty where none changed."""
        if not self.changed:
            return ""
        title = f"options that differ from the last start ({self.run_dir / CONFIG}):"
        return "\n".join([title, *(f"  {change}" for change in self.changed)])


def find_start(plan: Plan, mirror: Mirror | None) -> Start:
    """What a start of this run will do, without doing it. All processes of a run find the same.

    Args:
        plan: of the run.
        mirror: as `make_mirror` gives it.
    """
    start, checkpoints = Start(plan.run_dir, plan.batch.num_steps), plan.run_dir / "checkpoints"
    try:
        is_begun = ever_finished(checkpoints)
        damage, own = _apparent(checkpoints)
        copies = _copies(mirror) if own is None or is_main_process() else []
    except UserError as error:
        return replace(start, refusal=error)
    except OSError as error:
        return replace(start, refusal=SaveError(f"experiment.log_dir: {checkpoints} cannot be read: {error.strerror}"))
    traces = _traces(plan.run_dir)
    if not plan.config.experiment.requeue and (is_begun or copies or traces):
        return replace(start, refusal=_not_requeued(plan.run_dir))
    if not is_begun and not copies:
        return replace(start, refusal=_lost(plan.run_dir, traces, mirror) if traces else None)
    if own is None and not copies:
        return replace(start, refusal=damage)
    step, source = (step_of(own), str(own)) if own is not None else (-1, "")
    if mirror is not None and copies and copies[-1] > step:
        step, source = copies[-1], f"{mirror.root}/{folder_name(copies[-1])}"
    changed = _changed(plan)
    problems = refused_changes(_read(plan, changed), plan.config.experiment.allow_changed, plan.run_dir)
    problems += _state_problems(plan, own, bool(problems)) if own is not None and source == str(own) else []
    refusal = ConfigError(problems) if problems else None
    return replace(start, step=step, source=source, changed=changed, refusal=refusal)


def data_refusal(start: Start, data: TrainingData) -> UserError | None:
    """Why the checkpoint that a start resumes from cannot go on with this data, which a run finds out when it loads the
    checkpoint; None where it can, and where the checkpoint is in the mirror only.

    Args:
        start: as `find_start` gives it.
        data: of this start; is opened, and indexed where it was not before.

    Raises:
        DataError: the data cannot be used.
    """
    folder = Path(start.source)
    if not start.is_resumed or start.run_dir not in folder.parents:
        return None
    try:
        data.load_state_dict(read_state(folder)[0][type(data).__qualname__])
    except CheckpointError as error:
        return error
    return None


def make_mirror(plan: Plan) -> Mirror | None:
    """Where copies of the checkpoints are.

    Raises:
        ConfigError: the environment's credentials cannot be used.
    """
    url = plan.config.checkpoint.mirror
    return None if url is None else Mirror(url, plan.config.experiment.name)


def own_run_dir(plan: Plan, mirror: Mirror | None) -> Fence:
    """The first process makes the run folder, takes it over, tidies what a killed run left, and fetches what the mirror
    has beyond it."""
    if not is_main_process():
        return UNFENCED
    checkpoints = plan.run_dir / "checkpoints"
    try:
        plan.run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"experiment.log_dir: {plan.run_dir} cannot be made: {error.strerror}") from error
    try:
        fence = take(plan.run_dir)
        FirstEnd(plan.run_dir, 0).clear()
        sweep(checkpoints)
        recover_exports(plan.run_dir)
        if mirror is not None:
            mirror.restore(checkpoints, fence)
    except MirrorError as error:
        raise _unreadable(error) from error
    except OSError as error:
        raise SaveError(f"experiment.log_dir: {plan.run_dir} cannot be written: {error}") from error
    return fence


def _apparent(checkpoints: Path) -> tuple[UserError | None, Path | None]:
    """The newest checkpoint whose files are there, or why there is none."""
    try:
        return None, newest_apparent(checkpoints)
    except CheckpointError as error:
        return error, None


def _copies(mirror: Mirror | None) -> list[int]:
    """Optimizer steps of the copies, oldest first; every process asks for itself.

    Raises:
        ConfigError, OutageError: it cannot be asked; going on without it could lose what was trained elsewhere.
    """
    try:
        return [] if mirror is None else mirror.steps()
    except MirrorError as error:
        raise _unreadable(error) from error


def _unreadable(error: MirrorError) -> ConfigError | OutageError:
    text = f"{error}; set checkpoint.mirror=null to go on from what this machine has"
    return OutageError(text) if error.is_outage else ConfigError(text)


def _read(plan: Plan, changed: list[Change]) -> list[Change]:
    """Without the settings of parts that `model.pretrained` replaces, at the last start and now."""
    was_missing = any(change.key == "model.pretrained" and change.before is None for change in changed)
    if plan.config.model.pretrained is None or was_missing:
        return changed
    # Those of a noise scheduler override what is stored.
    unread = ["model.text_encoders", *(f"model.{part}" for part in PARTS if not part.startswith("noise_scheduler"))]
    return [change for change in changed if not is_below(change.key, unread)]


def _state_problems(plan: Plan, folder: Path, is_refused: bool) -> list[str]:
    """Why a checkpoint cannot go on with these options, as far as they tell without model and data; the rest is found
    when it is loaded.

    Args:
        is_refused: the run does not start anyway; changed options of the data are then named in any case.
    """
    try:
        state = read_state(folder)[0]
    except CheckpointError:
        return []  # an older one is looked for when it is loaded
    trained, config = state.get("trained_as", {}), plan.config
    given = {key: value_of(config, key) for key in trained if key in options()}
    trained_problem = changed_facts(trained, {key: value for key, value in given.items() if value is not None})
    before = state.get(TrainingData.__qualname__, {})
    is_refused = is_refused or bool(trained_problem)
    data_problem = order_problem(before, config.dataset, plan.batch, config.experiment.seed, is_refused=is_refused)
    return [problem for problem in (trained_problem, data_problem) if problem]


def _traces(run_dir: Path) -> list[str]:
    """What shows that a run has trained and saved in this folder, in words; empty when nothing does.

    A run that was stopped before its first save leaves rows of metrics and a record of its start: those alone show
    nothing that a new beginning could lose.
    """
    starts = read_starts(run_dir / RECORD)
    saved = [name for name in (CURRENT, KEPT) if os.path.lexists(run_dir / name)]
    if (step := last_saved(run_dir)) is not None:
        saved.insert(0, f"last save after {counted(step, 'optimizer step')}")
    if any(first > 0 for first in (start.get("first_optimizer_step") for start in starts) if isinstance(first, int)):
        saved.append("a resume")
    if not saved:
        return []
    rows = MetricRows(run_dir / "metrics.csv", COLUMNS).last_step()
    also = [f"metrics.csv up to step {rows:,}"] if rows else []
    return [*saved, *also, *([f"{RECORD} of {len(starts):,} start{'s' * (len(starts) > 1)}"] if starts else [])]


def _lost(run_dir: Path, traces: Sequence[str], mirror: Mirror | None) -> ConfigError:
    where = f"{run_dir / 'checkpoints'}" if mirror is None else f"{run_dir / 'checkpoints'} and {mirror.root}"
    copies = ", give the checkpoint.mirror that has copies of them" if mirror is None else ""
    return ConfigError(
        f"experiment.name: {run_dir} holds a run that has trained and saved ({', '.join(traces)}), but {where} "
        f"hold{'s' * (mirror is None)} no checkpoint of it, and a new beginning would replace what is left: bring the "
        f"checkpoints back{copies}, take another experiment.name, or remove {run_dir}"
    )


def _not_requeued(run_dir: Path) -> ConfigError:
    return ConfigError(
        f"experiment.requeue: false, but {run_dir} already holds a run; choose another experiment.name, remove the "
        "folder, or set experiment.requeue=true to continue it"
    )


def _changed(plan: Plan) -> list[Change]:
    """Against the options of the last start that has trained; none where nothing says what they were."""
    try:
        previous = (plan.run_dir / CONFIG).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return []
    return changed_options(previous, plan.config)
