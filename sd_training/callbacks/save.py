"""Saves: a sealed checkpoint to resume from, then rotation, then the pipeline folder that diffusers loads.

When the last save was, how long one takes, and whether one is asked for beside those of every so many steps.

What happens when a save fails: it is told, the run goes on, and too many in a row end it.

What is saved when a run dies of an exception: the optimizer steps since the last save, without a pipeline.

Sends sealed checkpoints to the mirror beside the training, one at a time.

One piece of work beside the training, and its end.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor

from sd_training.callbacks.base import OptimizerStepCallback, TrainingTimer
from sd_training.callbacks.ema import Ema, export_weights, sharding_of, whole_weights
from sd_training.checkpoint.atomic_io import free_bytes
from sd_training.checkpoint.folder import folder_name, sealed_checkpoints, step_of
from sd_training.checkpoint.lightning_state import restore_training_state, training_state
from sd_training.checkpoint.mirror import Mirror
from sd_training.checkpoint.retention import protected_checkpoints, retention_info, rotate
from sd_training.checkpoint.run_lock import RunLock
from sd_training.checkpoint.save import (
    PendingWrite,
    TrainingContents,
    load_checkpoint,
    newest_checkpoint,
    open_checkpoint,
    save_checkpoint,
)
from sd_training.config.plan import counted
from sd_training.config.schema import CheckpointConfig
from sd_training.errors import SaveError
from sd_training.export.pipeline import export_pipeline, keep_export
from sd_training.incidents import write_incident
from sd_training.log import get_logger, is_main_process
from sd_training.parallel.cpu_group import CpuGroup
from sd_training.parallel.strategies import strategy_of
from sd_training.training.base_module import TrainedModule
from sd_training.watchdog.first_failure import is_network_error


class SaveTimes:
    """Shared by who asks (`Preemption`) and who saves (`Saves`)."""

    def __init__(self) -> None:
        self.is_asked = False
        """Whether all ranks are to save after this optimizer step."""
        self.last_step = -1
        """Optimizer steps completed when this start of the run saved last; -1: not yet. The same on all ranks."""
        self.sealed_step = -1
        """Optimizer steps of the newest checkpoint that this start has sealed; -1: none. A save that failed, or that is
        still being written in the background, is not here."""
        self._longest_s = 0.0
        self._last_end_s = time.monotonic()
        self._in_flight_since_s: float | None = None

    @property
    def since_last_s(self) -> float:
        """Time since the last save, or since this start of the run."""
        return time.monotonic() - self._last_end_s

    @property
    def longest_s(self) -> float:
        """The longest save so far, from its beginning until it was sealed and exported; one that is being written in
        the background counts with the time that it has taken."""
        since_s = self._in_flight_since_s
        return max(self._longest_s, 0.0 if since_s is None else time.monotonic() - since_s)

    @property
    def num_in_flight(self) -> int:
        """Saves that are being written in the background; the last save of a run waits for them."""
        return int(self._in_flight_since_s is not None)

    @contextmanager
    def saving(self, step: int, *, asynchronous: bool) -> Iterator[None]:
        """Around a save. One that fails counts as well: the next is due when it would be, not at once.

        Args:
            step: optimizer steps completed.
            asynchronous: in the background; `written` says when.
        """
        began_s = time.monotonic()
        try:
            yield
        finally:
            self._last_end_s = time.monotonic()
            self.last_step = step
            if not asynchronous:
                self._longest_s = max(self._longest_s, self._last_end_s - began_s)

    def in_flight(self, began_s: float) -> None:
        """From now on a save is written in the background.

        Args:
            began_s: when its copies were begun [s of `time.monotonic`].
        """
        self._in_flight_since_s = began_s

    def written(self) -> None:
        """It is no longer; called by the thread that wrote it, however that ended."""
        self._longest_s, self._in_flight_since_s = self.longest_s, None


log = get_logger(__name__)


class FailedSaves:
    """Counts failed saves in a row; the same on every process.

    Args:
        run_dir: the run folder; `incidents/` gets a file for each.
        most: so many in a row end the run.
    """

    def __init__(self, run_dir: Path, most: int) -> None:
        self.run_dir = run_dir
        self.most = most
        self.in_a_row = 0

    def succeeded(self) -> None:
        """Counting starts anew."""
        self.in_a_row = 0

    def failed(self, step: int, error: OSError, *, is_last: bool) -> None:
        """Told loudly.

        Args:
            step: optimizer steps completed.
            error: the same on every process, naming folder and free space.
            is_last: whether no other save will follow.

        Raises:
            SaveError: this one counts too many, or was the last one.
        """
        self.in_a_row += 1
        if is_main_process():
            log.error(f"save of step {step:,} failed ({self.in_a_row} in a row): {error}")
            facts = {"cause": str(error), "free_bytes": _free(self.run_dir), "failed_in_a_row": self.in_a_row}
            write_incident(self.run_dir, "save", step, **facts)
        kept = f"older checkpoints in {self.run_dir / 'checkpoints'} are intact; the same command goes on from them"
        if is_last:
            raise SaveError(f"the last save of this run, of step {step:,}, failed: {error}; {kept}")
        if self.in_a_row >= self.most:
            raise SaveError(f"{self.in_a_row} saves in a row failed (checkpoint.max_failed_saves): {error}; {kept}")


def _free(folder: Path) -> int | None:
    try:
        return free_bytes(folder)
    except OSError:
        return None


log = get_logger(__name__)


def save_what_is_left(trainer: pl.Trainer, exception: Exception, checkpoint: Callable[[pl.Trainer, int], Path]) -> None:
    """Collective only where all processes meet an exception after the same optimizer step; else nothing is saved.

    Args:
        checkpoint: of Saves.
    """
    step = trainer.global_step
    if not step:
        return
    if not cpu_group_of(trainer).agree(step):
        if is_network_error(exception):
            return  # another process ended first, and says so
        log.error(f"the steps since the last save are lost: other processes do not die of {exception!r:.200}")
        return
    try:
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.synchronize()  # fails when the device is lost
        folder = checkpoint(trainer, step)
        log.error(f"{type(exception).__name__} after {counted(step, 'optimizer step')}; saved {folder}")
    except Exception as error:
        log.error(f"the steps since the last save are lost: {error}")


class ConsistentState(pl.Callback):
    """Knows whether weights, optimizer and averages all are as after the last optimizer step: whether they may be saved
    when something fails. Acts after the callbacks that belong to the step."""

    is_consistent = False

    def on_before_optimizer_step(self, *_: Any) -> None:
        """From here on until the averages have seen the step, nothing fits together."""
        self.is_consistent = False

    def on_train_batch_end(self, *_: Any) -> None:
        """The callbacks before this one have."""
        self.is_consistent = True

    @contextmanager
    def left_alone(self) -> Iterator[None]:
        """Around a save: what fails in it is not saved once more."""
        self.is_consistent = False
        yield
        self.is_consistent = True


class Background:
    """Runs one piece of work at a time in a thread."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    @property
    def is_busy(self) -> bool:
        """Whether there is work that nobody has waited for."""
        return self._thread is not None

    @property
    def is_running(self) -> bool:
        """Whether the work is still under way."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, act: Callable[[], None]) -> None:
        """Begins; the work before must have been waited for."""
        assert self._thread is None, "one at a time"
        # Not to be waited for by the interpreter: a process that dies may leave others without an answer.
        self._thread = threading.Thread(target=self._run, args=(act,), name="save", daemon=True)
        self._thread.start()

    def wait(self, limit_s: float | None = None) -> None:
        """Until the work is done; nothing to do is done.

        Raises:
            TimeoutError: it takes longer.
            Exception: what the work raised.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return
        thread.join(limit_s)
        if thread.is_alive():
            raise TimeoutError(f"it was not written within {limit_s:.0f} s")
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _run(self, act: Callable[[], None]) -> None:
        try:
            act()
        except BaseException as error:
            self._failure = error


log = get_logger(__name__)
_PATIENCE_S = 600.0
"""For a save in the background, when the run dies [s]."""
_EXPORTED = "exported_step"
"""File in the run folder: the optimizer step that `current_pipeline` is of."""


class Saves(OptimizerStepCallback):
    """Every `every` optimizer steps, at milestones, at the end of the run, when it is asked to stop, and when it dies
    of an exception that all processes meet after the same step.

    Args:
        run_dir: the run folder.
        every: optimizer steps between saves.
        config: what is kept, and how many saves may fail.
        only_most_recent: replace `current_pipeline/`; else keep `pipelines/step_N/` and point at the newest.
        exported: makes what is exported, a pipeline or the autoencoder, around the live networks or, from whole
            weights by their name in the trained network, around a copy. Collective.
        ema: the average to export, if there is one.
        timer: stands still while saving.
        times: says when a save is asked for, and is told of each.
        run_lock: of this start of the run; the first process asks it.
        take_losses: gives the losses that a manifest holds (see `retention_info`), after an optimizer step.
        is_resumed: whether the run continues from its newest checkpoint.
    """

    def __init__(
        self,
        run_dir: Path,
        every: int,
        config: CheckpointConfig,
        only_most_recent: bool,
        exported: Callable[[Mapping[str, Tensor] | None], Any],
        ema: Ema | None,
        timer: TrainingTimer,
        times: SaveTimes,
        run_lock: RunLock,
        take_losses: Callable[[int], dict[str, float | None]],
        is_resumed: bool,
    ) -> None:
        self.run_dir = run_dir
        self.every = every
        self.config = config
        self.only_most_recent = only_most_recent
        self.exported = exported
        self.ema = ema
        self.timer = timer
        self.run_lock = run_lock
        self.take_losses = take_losses
        self.failures = FailedSaves(run_dir, config.max_failed_saves)
        self.times = times
        self.in_use: Path | None = None
        """A checkpoint that is being copied elsewhere; it is deleted after a later save."""
        self.is_resumed = is_resumed
        self._loaded_step: int | None = None
        self.background = Background()
        self._begun_step = 0
        """Optimizer steps of the save in the background."""
        self.settled = ConsistentState()
        """Acts after averages and guards, and before whatever may fail without a part in the step."""

    def on_optimizer_step(self, trainer: pl.Trainer, module: TrainedModule, step: int) -> None:
        """Save when due; every rank takes part."""
        if not (self.is_due(trainer, step, self.every) or self._is_milestone(step) or self.times.is_asked):
            return
        is_last = step == trainer.max_steps or trainer.should_stop
        asynchronous = self.config.asynchronous
        saving = self.times.saving(step, asynchronous=asynchronous)
        with self.timer.excluded("save"), saving, self.settled.left_alone():
            self.finish_pending(is_last=False)
            with self._failures_told(step, is_last=is_last):
                if asynchronous:
                    self._begin(trainer, module, step)
                else:
                    self._save(trainer, module, step)
            if is_last:
                self.finish_pending(is_last=True)

    @contextmanager
    def _failures_told(self, step: int, *, is_last: bool) -> Iterator[None]:
        """The same on all ranks."""
        try:
            yield
        except OSError as error:
            self.failures.failed(step, error, is_last=is_last)

    def _save(self, trainer: pl.Trainer, module: TrainedModule, step: int) -> None:
        """Collective: checkpoint, rotation, export.

        Raises:
            OSError: something could not be written; what was there before is intact.
            TakenOverError: another start has the run.
        """
        checkpoint = self._checkpoint(trainer, step)
        self.times.sealed_step = step
        cpu_group_of(trainer).on_rank0(lambda: self._rotate(checkpoint))
        self._export(trainer, module, step)
        self.failures.succeeded()

    def _begin(self, trainer: pl.Trainer, module: TrainedModule, step: int) -> None:
        """Collective: copies what `_save` would write, for a thread to write; `finish_pending` ends it."""
        began_s = time.monotonic()
        pending, cpu_group = self._store(trainer, step, asynchronous=True), cpu_group_of(trainer)
        weights = self._copied_weights(trainer, module)
        exported = self.exported(weights if trainer.is_global_zero else None)

        def finish() -> None:
            try:
                if pending is not None:
                    pending.write()
                self.times.sealed_step = step
                cpu_group.on_rank0(lambda: self._rotate(self._folder(step)))
                cpu_group.on_rank0(lambda: self._write(step, exported))
            finally:
                self.times.written()

        self._begun_step = step
        self.times.in_flight(began_s)
        self.background.start(finish)

    def finish_pending(self, *, is_last: bool = False) -> None:
        """Collective: waits for the save in the background, and tells how it ended.

        Raises:
            SaveError: too many failed, or the last one.
        """
        if self.background.is_busy:
            with self._failures_told(self._begun_step, is_last=is_last):
                self.background.wait()
                self.failures.succeeded()

    def _copied_weights(self, trainer: pl.Trainer, module: TrainedModule) -> dict[str, Tensor]:
        """Collective: what `_export` would export, on the CPU of the first process."""
        if not sharding_of(trainer).is_network_whole:
            return whole_weights(trainer, module, self.ema)
        with export_weights(module, self.ema):
            if not trainer.is_global_zero:
                return {}
            return {name: p.detach().to("cpu", copy=True) for name, p in module.network.named_parameters()}

    def write_checkpoint(self, trainer: pl.Trainer, step: int) -> None:
        """Collective: one beside those that are due, without an export, written when this returns.

        Raises:
            OSError: it could not be written.
        """
        self.finish_pending()
        self._checkpoint(trainer, step)
        self.times.sealed_step = step

    def _checkpoint(self, trainer: pl.Trainer, step: int) -> Path:
        """Collective: seals a checkpoint; returns its folder."""
        self._store(trainer, step, asynchronous=False)
        return self._folder(step)

    def _store(self, trainer: pl.Trainer, step: int, *, asynchronous: bool) -> PendingWrite | None:
        info = retention_info(is_milestone=self._is_milestone(step), **self.take_losses(step))
        state = training_state(trainer)
        averages = {} if self.ema is None else self.ema.averages_by_module_name()
        contents = TrainingContents(trainer.lightning_module, sharding_of(trainer), averages, state)
        group = cpu_group_of(trainer)
        return save_checkpoint(self._folder(step), contents, info, group, self.run_lock, asynchronous=asynchronous)

    def _folder(self, step: int) -> Path:
        return self.run_dir / "checkpoints" / folder_name(step)

    def _is_milestone(self, step: int) -> bool:
        every = self.config.milestone_every
        return every > 0 and step % every == 0

    def _rotate(self, newest: Path) -> None:
        """What cannot be deleted now is deleted after a later save."""
        root = newest.parent
        try:
            best = protected_checkpoints(root, self.config.keep_best, self.config.best_by)
            kept = [*best, *([self.in_use] if self.in_use else [])]
            rotate(root, self.config.keep, [newest], kept, self.run_lock)
        except OSError as error:
            log.warning(f"older checkpoints could not be deleted: {error}")

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Collective: continue from the newest checkpoint, the same on all ranks.

        Raises:
            CheckpointError: none verifies, or it is of another run.
        """
        if not self.is_resumed:
            return
        stored = open_checkpoint(newest_checkpoint(self.run_dir / "checkpoints", cpu_group_of(trainer)))
        self._loaded_step = int(stored.state["global_step"])
        pl_module.on_load_checkpoint(stored.state)
        load_checkpoint(stored, pl_module, sharding_of(trainer))
        restore_training_state(trainer, stored.state)
        if self.ema is not None:
            assert isinstance(pl_module, TrainedModule)
            self.ema.load_averages(trainer, pl_module, stored.averages())

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """A process that was killed between a checkpoint and its export left an older pipeline, and perhaps older
        checkpoints to delete: do both now."""
        super().on_train_start(trainer, pl_module)
        cpu_group_of(trainer)  # made by all processes together; at an exception they may not be together
        self._export_what_was_left_out(trainer, pl_module)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Training does not start when there is nothing left to train."""
        self._export_what_was_left_out(trainer, pl_module)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Another start may have the folder."""
        self.run_lock.release()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """The run ends. A save in the background is waited for, unless another process is missing in it."""
        with self.timer.excluded("save"):
            try:
                self.background.wait(_PATIENCE_S)
            except Exception as error:
                log.error(f"save of step {self._begun_step:,} failed: {error}")
            if isinstance(exception, Exception) and self.settled.is_consistent:
                save_what_is_left(trainer, exception, self._checkpoint)
        self.run_lock.release()

    def _export_what_was_left_out(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        left_out, self._loaded_step = self._loaded_step, None
        if left_out is None or cpu_group_of(trainer).on_rank0(self._exported_step) >= left_out:
            return
        assert isinstance(module, TrainedModule)
        with self._failures_told(left_out, is_last=trainer.global_step >= trainer.max_steps):
            cpu_group_of(trainer).on_rank0(lambda: self._rotate(self._folder(left_out)))
            self._export(trainer, module, left_out)

    def _exported_step(self) -> int:
        """-1 where nothing says so."""
        path = self.run_dir / _EXPORTED
        text = path.read_text(encoding="utf-8").strip() if path.is_file() else ""
        return int(text) if text.isdigit() else -1

    def _export(self, trainer: pl.Trainer, module: TrainedModule, step: int) -> None:
        """Collective; the first process writes, and all get its error."""
        cpu_group = cpu_group_of(trainer)
        if sharding_of(trainer).is_network_whole:
            with export_weights(module, self.ema):
                exported = self.exported(None)
                cpu_group.on_rank0(lambda: self._write(step, exported))
        else:
            weights = whole_weights(trainer, module, self.ema)
            exported = self.exported(weights if trainer.is_global_zero else None)
            cpu_group.on_rank0(lambda: self._write(step, exported))

    def _write(self, step: int, exported: Any) -> None:
        current = self.run_dir / "current_pipeline"
        if self.only_most_recent:
            export_pipeline(exported, current, self.run_lock)
        else:
            keep_export(exported, self.run_dir, step, self.run_lock)
        (self.run_dir / _EXPORTED).write_text(f"{step}\n", encoding="utf-8")
        log.info(f"saved step {step}: {self._folder(step)} and {current}")


def cpu_group_of(trainer: pl.Trainer) -> CpuGroup:
    """The processes that save together."""
    return strategy_of(trainer).cpu_group


log = get_logger(__name__)

AFTER_A_STOP_S = 60.0
"""Whoever asked the run to stop may not wait longer; all is saved here, and a half sent copy is none."""


class Mirroring(OptimizerStepCallback):
    """The first process sends. Of the checkpoints that are sealed while one is on its way, the newest is sent after it.

    Args:
        run_dir: the run folder.
        mirror: gets the copies.
        saves: acts before this callback; deletes nothing that is on its way.
        timer: stands still while the end of the run waits.
        limit_s: so long the end of a run that is done waits for the last copy.
    """

    def __init__(self, run_dir: Path, mirror: Mirror, saves: Saves, timer: TrainingTimer, limit_s: float) -> None:
        self.run_dir, self.mirror, self.saves, self.timer = run_dir, mirror, saves, timer
        self.limit_s = limit_s
        self.background = Background()
        self._sent_step = -1
        """Optimizer steps of the newest copy."""
        self._tried_after = -1
        """Optimizer steps of the newest save when a copy was begun."""

    def on_optimizer_step(self, trainer: pl.Trainer, module: TrainedModule, step: int) -> None:
        """Never waits."""
        if not trainer.is_global_zero or self.background.is_running:
            return
        self._tell_failure()
        if self.saves.times.last_step > self._tried_after:
            self._send_newest()

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Collective: all wait for the last copy; also where nothing was left to train."""
        limit_s = AFTER_A_STOP_S if trainer.global_step < trainer.max_steps else self.limit_s
        with self.timer.excluded("save"):
            cpu_group_of(trainer).on_rank0(lambda: self._finish(limit_s))

    def _finish(self, limit_s: float) -> None:
        end_s = time.monotonic() + limit_s
        if self._tell_failure(limit_s):
            self._send_newest()
            self._tell_failure(max(0.0, end_s - time.monotonic()))

    def _send_newest(self) -> None:
        """A save in the background may not be sealed yet; it is found after a later step."""
        newest = sealed_checkpoints(self.run_dir / "checkpoints")[-1:]
        if newest and step_of(newest[0]) > self._sent_step:
            self._tried_after = max(step_of(newest[0]), self._tried_after)
            self.saves.in_use = newest[0]
            self.background.start(lambda: self._send(newest[0]))

    def _send(self, folder: Path) -> None:
        """In the thread."""
        run_lock, config, step = self.saves.run_lock, self.saves.config, step_of(folder)
        self.mirror.send(folder, run_lock)
        self._sent_step = step
        log.info(f"copied {folder.name} to {self.mirror.root}")
        self.mirror.rotate(step, config.keep, config.keep_best, config.best_by, run_lock)

    def _tell_failure(self, limit_s: float | None = None) -> bool:
        """Waits, and says whether it ended in time. A mirror that fails ends no run: everything is on this machine."""
        try:
            self.background.wait(limit_s)
        except OSError as error:
            log.error(f"the copy in the mirror is behind or not tidied up: {error}")
            write_incident(self.run_dir, "mirror", max(self.saves.times.last_step, 0), cause=str(error))
            return not isinstance(error, TimeoutError)
        return True
