"""Saves: when one is due, all ranks seal a checkpoint to resume from, older ones are rotated away, the pipeline folder
that diffusers loads is exported, and the checkpoint is copied to the mirror.

A save that fails is logged and written as an incident, and the run continues; too many in a row end it. With
`checkpoint.asynchronous` a thread does everything after the copy to CPU memory. A run that ends by an exception that
all ranks meet after the same step is saved as well.
"""

import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor

from sd_training.callbacks.base import OptimizerStepCallback, RunState, TrainingTimer
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

log = get_logger(__name__)

MIRROR_AFTER_STOP_S = 60.0
"""A run that was asked to stop waits this long for its last copy to the mirror; everything is saved here."""
_PENDING_AT_EXCEPTION_S = 600.0
"""At an exception, the longest wait for a save in the background."""
_EXPORTED = "exported_step"
"""File in the run folder: the optimizer step that `current_pipeline` is of."""


class ConsistencyMark(pl.Callback):
    """Keeps `RunState.is_consistent`. Acts after the callbacks that belong to the step (averages, guards), and before
    those that may fail without changing anything that is saved."""

    def __init__(self, state: RunState) -> None:
        self.state = state

    def on_before_optimizer_step(self, *_: Any) -> None:
        """From here on until the averages have seen the step, weights and averages do not fit together."""
        self.state.is_consistent = False

    def on_train_batch_end(self, *_: Any) -> None:
        """The averages have seen it."""
        self.state.is_consistent = True


class Save(OptimizerStepCallback):
    """Saves every `every` optimizer steps, at milestones, on request, and at the end of the run.

    Args:
        run_dir: the run folder.
        every: optimizer steps between saves.
        config: what is kept, and how many saves may fail.
        only_most_recent: replace `current_pipeline/`; else keep `pipelines/step_N/` and point at the newest.
        exported: makes what is exported, a pipeline or the autoencoder, around the live networks or, from whole
            weights by their name in the trained network, around a copy. Collective.
        ema: the average to export, if there is one.
        timer: does not count the time of a save.
        state: says when a save is requested, and is told of each.
        run_lock: of this start of the run; rank 0 checks it.
        is_resumed: whether the run continues from its newest checkpoint.
        mirror: gets a copy of the newest checkpoint; null: none.
        mirror_limit_s: the end of a finished run waits this long for the last copy.
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
        state: RunState,
        run_lock: RunLock,
        is_resumed: bool,
        mirror: Mirror | None = None,
        mirror_limit_s: float = 0.0,
    ) -> None:
        self.run_dir, self.every, self.config, self.only_most_recent = run_dir, every, config, only_most_recent
        self.exported, self.ema, self.timer, self.state = exported, ema, timer, state
        self.run_lock, self.is_resumed, self.mirror, self.mirror_limit_s = run_lock, is_resumed, mirror, mirror_limit_s
        self.pending: Future[None] | None = None
        """The save that is written in the background."""
        self._pending_step = 0
        self._failed_in_a_row = 0
        self._loaded_step: int | None = None
        self._copy: Future[None] | None = None
        self._copied_folder: Path | None = None
        """Copied to the mirror by `_copy`; rotation leaves it."""
        self._copied_step = self._copy_tried_step = -1

    def on_optimizer_step(self, trainer: pl.Trainer, module: TrainedModule, step: int) -> None:
        """Save when due; every rank takes part. Then start a copy to the mirror, without waiting."""
        if self.is_due(trainer, step, self.every) or self._is_milestone(step) or self.state.save_requested:
            is_last = step == trainer.max_steps or trainer.should_stop
            with self.timer.excluded("save"), self._noted_in_state(step):
                self.finish_pending()
                with self._failures_counted(step, is_last=is_last):
                    if self.config.asynchronous:
                        self._begin(trainer, module, step)
                    else:
                        self._save(trainer, module, step)
                if is_last:
                    self.finish_pending(is_last=True)
        if self.mirror is not None and trainer.is_global_zero and (self._copy is None or self._copy.done()):
            self._end_copy()
            if self.state.sealed_step > self._copy_tried_step:
                self._start_copy()

    def _is_milestone(self, step: int) -> bool:
        every = self.config.milestone_every
        return every > 0 and step % every == 0

    @contextmanager
    def _noted_in_state(self, step: int) -> Iterator[None]:
        """A save that fails counts as one as well: the next is due when it would be, not at once."""
        began_s = time.monotonic()
        self.state.is_consistent = False  # what fails inside a save is not saved once more
        try:
            yield
            self.state.is_consistent = True
        finally:
            self.state.last_save_step, self.state.last_save_end_s = step, time.monotonic()
            if not self.config.asynchronous:
                self.state.longest_save_s = max(self.state.longest_save_s, self.state.last_save_end_s - began_s)

    @contextmanager
    def _failures_counted(self, step: int, *, is_last: bool) -> Iterator[None]:
        """An error of the disk is the same on all ranks, and names folder and free space.

        Raises:
            SaveError: it is one too many, or that of the last save.
        """
        try:
            yield
        except OSError as error:
            self._failed_in_a_row += 1
            if is_main_process():
                log.error(f"save of step {step:,} failed ({self._failed_in_a_row} in a row): {error}")
                facts = {"cause": str(error), "free_bytes": _free(self.run_dir)}
                write_incident(self.run_dir, "save", step, **facts, failed_in_a_row=self._failed_in_a_row)
            kept = (
                f"older checkpoints in {self.run_dir / 'checkpoints'} are intact; the same command continues from them"
            )
            if is_last:
                raise SaveError(f"the last save of this run, of step {step:,}, failed: {error}; {kept}") from error
            if self._failed_in_a_row >= self.config.max_failed_saves:
                raise SaveError(
                    f"{self._failed_in_a_row} saves in a row failed (checkpoint.max_failed_saves): {error}; {kept}"
                ) from error

    def _save(self, trainer: pl.Trainer, module: TrainedModule, step: int) -> None:
        """Collective: checkpoint, rotation, export.

        Raises:
            OSError: something could not be written; what was there before is intact.
            TakenOverError: another start has the run.
        """
        self._checkpoint(trainer, step)
        self.state.sealed_step = step
        cpu_group_of(trainer).on_rank0(lambda: self._rotate(step))
        self._export(trainer, module, step)
        self._failed_in_a_row = 0

    def _begin(self, trainer: pl.Trainer, module: TrainedModule, step: int) -> None:
        """Collective: copies what `_save` would write, for a thread to write; `finish_pending` ends it."""
        began_s = time.monotonic()
        pending, group = self._checkpoint(trainer, step, asynchronous=True), cpu_group_of(trainer)
        weights = self._copied_weights(trainer, module)
        exported = self.exported(weights if trainer.is_global_zero else None)

        def finish() -> None:
            try:
                if pending is not None:
                    pending.write()
                self.state.sealed_step = step
                group.on_rank0(lambda: self._rotate(step))
                group.on_rank0(lambda: self._publish(step, exported))
            finally:
                self.state.longest_save_s = max(self.state.longest_save_s, time.monotonic() - began_s)
                self.state.pending_save_since_s = None

        self._pending_step, self.state.pending_save_since_s = step, began_s
        self.pending = _in_thread(finish)

    def finish_pending(self, *, is_last: bool = False) -> None:
        """Collective: waits for the save in the background; its failure counts now.

        Raises:
            SaveError: it is one too many, or that of the last save.
        """
        pending, self.pending = self.pending, None
        if pending is not None:
            with self._failures_counted(self._pending_step, is_last=is_last):
                pending.result()
                self._failed_in_a_row = 0

    def write_checkpoint(self, trainer: pl.Trainer, step: int) -> None:
        """Collective: one beside those that are due, without an export; it is sealed when this returns.

        Raises:
            OSError: it could not be written.
        """
        self.finish_pending()
        self._checkpoint(trainer, step)
        self.state.sealed_step = step

    def _checkpoint(self, trainer: pl.Trainer, step: int, *, asynchronous: bool = False) -> PendingWrite | None:
        """Collective: seals a checkpoint, or returns what is left to write."""
        steps = sum(count for count, _ in self.state.window_losses)
        mean = sum(count * loss for count, loss in self.state.window_losses) / steps if steps else math.nan
        self.state.window_losses.clear()
        measured = self.state.validation_loss
        is_measured = measured is not None and measured[0] == step and math.isfinite(measured[1])
        info = retention_info(
            is_milestone=self._is_milestone(step),
            mean_loss=mean if math.isfinite(mean) else None,
            validation_loss=measured[1] if measured is not None and is_measured else None,
        )
        training = training_state(trainer)
        averages = {} if self.ema is None else self.ema.averages_by_module_name()
        contents = TrainingContents(trainer.lightning_module, sharding_of(trainer), averages, training)
        group = cpu_group_of(trainer)
        return save_checkpoint(self._folder(step), contents, info, group, self.run_lock, asynchronous=asynchronous)

    def _folder(self, step: int) -> Path:
        return self.run_dir / "checkpoints" / folder_name(step)

    def _rotate(self, newest: int) -> None:
        """What cannot be deleted now is deleted after a later save."""
        root = self.run_dir / "checkpoints"
        try:
            kept = protected_checkpoints(root, self.config.keep_best, self.config.best_by)
            kept += [self._copied_folder] if self._copied_folder else []
            rotate(root, self.config.keep, [self._folder(newest)], kept, self.run_lock)
        except OSError as error:
            log.warning(f"older checkpoints could not be deleted: {error}")

    def _export(self, trainer: pl.Trainer, module: TrainedModule, step: int) -> None:
        """Collective; rank 0 writes, and all get its error."""
        group = cpu_group_of(trainer)
        if sharding_of(trainer).is_network_whole:
            with export_weights(module, self.ema):
                exported = self.exported(None)
                group.on_rank0(lambda: self._publish(step, exported))
        else:
            weights = whole_weights(trainer, module, self.ema)
            exported = self.exported(weights if trainer.is_global_zero else None)
            group.on_rank0(lambda: self._publish(step, exported))

    def _copied_weights(self, trainer: pl.Trainer, module: TrainedModule) -> dict[str, Tensor]:
        """Collective: what `_export` would export, on the CPU of rank 0."""
        if not sharding_of(trainer).is_network_whole:
            return whole_weights(trainer, module, self.ema)
        with export_weights(module, self.ema):
            if not trainer.is_global_zero:
                return {}
            return {name: p.detach().to("cpu", copy=True) for name, p in module.network.named_parameters()}

    def _publish(self, step: int, exported: Any) -> None:
        current = self.run_dir / "current_pipeline"
        if self.only_most_recent:
            export_pipeline(exported, current, self.run_lock)
        else:
            keep_export(exported, self.run_dir, step, self.run_lock)
        (self.run_dir / _EXPORTED).write_text(f"{step}\n", encoding="utf-8")
        log.info(f"saved step {step}: {self._folder(step)} and {current}")

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
        cpu_group_of(trainer)  # made by all ranks together; at an exception they may not be together
        self._export_loaded(trainer, pl_module)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Collective: all wait for the last copy to the mirror. Training does not start when nothing is left to train,
        so a missing export is made here as well."""
        self._export_loaded(trainer, pl_module)
        if self.mirror is not None:
            limit_s = MIRROR_AFTER_STOP_S if trainer.global_step < trainer.max_steps else self.mirror_limit_s
            with self.timer.excluded("save"):
                cpu_group_of(trainer).on_rank0(lambda: self._finish_copies(limit_s))

    def _export_loaded(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Collective: exports the loaded checkpoint, where the pipeline folder is older."""
        step, self._loaded_step = self._loaded_step, None
        if step is None or cpu_group_of(trainer).on_rank0(self._exported_step) >= step:
            return
        assert isinstance(module, TrainedModule)
        with self._failures_counted(step, is_last=trainer.global_step >= trainer.max_steps):
            cpu_group_of(trainer).on_rank0(lambda: self._rotate(step))
            self._export(trainer, module, step)

    def _exported_step(self) -> int:
        """-1 where it is unknown."""
        path = self.run_dir / _EXPORTED
        text = path.read_text(encoding="utf-8").strip() if path.is_file() else ""
        return int(text) if text.isdigit() else -1

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Another start may have the folder."""
        self.run_lock.release()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """The run ends. A save in the background is waited for, unless another rank is missing in it."""
        with self.timer.excluded("save"):
            try:
                if self.pending is not None:
                    _result(self.pending, _PENDING_AT_EXCEPTION_S)
            except Exception as error:
                log.error(f"save of step {self._pending_step:,} failed: {error}")
            self.pending = None
            if isinstance(exception, Exception) and self.state.is_consistent and trainer.global_step:
                self._save_at_exception(trainer, exception)
        self.run_lock.release()

    def _save_at_exception(self, trainer: pl.Trainer, exception: Exception) -> None:
        """Saves the steps since the last save, without an export. Collective where all ranks meet an exception after
        the same optimizer step; else nothing is saved."""
        step = trainer.global_step
        if not cpu_group_of(trainer).agree(step):
            if not is_network_error(exception):  # else another rank failed first, and reports it
                log.error(f"the steps since the last save are lost: other ranks do not fail with {exception!r:.200}")
            return
        try:
            if trainer.strategy.root_device.type == "cuda":
                torch.cuda.synchronize()  # fails when the device is lost
            self._checkpoint(trainer, step)
            log.error(f"{type(exception).__name__} after {counted(step, 'optimizer step')}; saved {self._folder(step)}")
        except Exception as error:
            log.error(f"the steps since the last save are lost: {error}")

    def _start_copy(self) -> None:
        """Rank 0: copies the newest checkpoint to the mirror, in a thread. Of those that are sealed meanwhile, the
        newest is copied afterwards."""
        newest = sealed_checkpoints(self.run_dir / "checkpoints")[-1:]
        if newest and step_of(newest[0]) > self._copied_step:
            self._copied_folder, self._copy_tried_step = newest[0], step_of(newest[0])
            self._copy = _in_thread(lambda: self._copy_to_mirror(newest[0]))

    def _copy_to_mirror(self, folder: Path) -> None:
        assert self.mirror is not None
        config, step = self.config, step_of(folder)
        self.mirror.send(folder, self.run_lock)
        self._copied_step = step
        log.info(f"copied {folder.name} to {self.mirror.root}")
        self.mirror.rotate(step, config.keep, config.keep_best, config.best_by, self.run_lock)

    def _end_copy(self, limit_s: float | None = None) -> bool:
        """Waits for the copy; whether it ended in time. A mirror that fails does not end the run: everything is saved
        on this machine."""
        copy, self._copy = self._copy, None
        try:
            if copy is not None:
                _result(copy, limit_s)
        except OSError as error:
            log.error(f"the copy in the mirror is behind or not tidied up: {error}")
            write_incident(self.run_dir, "mirror", max(self.state.last_save_step, 0), cause=str(error))
            return not isinstance(error, TimeoutError)
        return True

    def _finish_copies(self, limit_s: float) -> None:
        end_s = time.monotonic() + limit_s
        if self._end_copy(limit_s):
            self._start_copy()
            self._end_copy(max(0.0, end_s - time.monotonic()))


def cpu_group_of(trainer: pl.Trainer) -> CpuGroup:
    """The ranks' group for saves."""
    return strategy_of(trainer).cpu_group


def _in_thread(act: Callable[[], None]) -> Future[None]:
    """Runs `act` in a thread that the interpreter does not wait for: a rank that dies may leave the others without an
    answer."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            act()
            future.set_result(None)
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="save", daemon=True).start()
    return future


def _result(future: Future[None], limit_s: float | None) -> None:
    """Waits for work of `_in_thread`.

    Raises:
        TimeoutError: it takes longer.
        Exception: what it raised.
    """
    if not wait([future], limit_s).done:
        raise TimeoutError(f"it was not written within {limit_s:.0f} s")
    future.result()


def _free(folder: Path) -> int | None:
    try:
        return free_bytes(folder)
    except OSError:
        return None
