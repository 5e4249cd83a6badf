"""Saves: when one is due, all ranks seal a checkpoint to resume from, older ones are rotated away, the pipeline folder
that diffusers loads is exported, and the checkpoint is copied to the mirror.

A failed save is logged and written as an incident, and the run continues; too many in a row end it. With
`checkpoint.asynchronous` a thread does everything after the copy to CPU memory. A run that ends by an exception that
all ranks meet after the same step is saved as well.
"""

import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor

from sd_training.callbacks.base import OptimizerStepCallback, RunState
from sd_training.callbacks.ema import EMA_PART, Ema, full_export_weights
from sd_training.checkpoint.folder import (
    RunLock,
    folder_name,
    newest_verified,
    replace_text,
    rotate,
    sealed_checkpoints,
    source_checkpoint,
    step_of,
)
from sd_training.checkpoint.mirror import Mirror
from sd_training.checkpoint.save import (
    StoredCheckpoint,
    load_checkpoint,
    open_checkpoint,
    restore_training_state,
    save_checkpoint,
)
from sd_training.config.plan import counted
from sd_training.config.schema import Config
from sd_training.data.datamodule import TrainingData
from sd_training.errors import CheckpointError, ConfigError, OutageError, SaveError
from sd_training.export.pipeline import (
    CURRENT,
    EXPORTED_STEP,
    WrittenPart,
    export_pipeline,
    exported_step,
    frozen_parts,
    keep_export,
)
from sd_training.log import get_logger, is_main_process, write_incident
from sd_training.parallel.strategies import strategy_of
from sd_training.training import TrainedModule
from sd_training.watchdog import is_network_error

log = get_logger(__name__)

MIRROR_AFTER_STOP_S = 60.0
"""A run that was asked to stop waits this long for its last copy to the mirror; everything is saved here."""
STEP_FILE_VARIABLE = "SD_TRAINING_STEP_FILE"
"""Environment variable of a file that gets the newest sealed step, for a launcher that checks for progress."""
_PENDING_AT_EXCEPTION_S = 600.0
"""At an exception, the longest wait for a save in the background."""


@dataclass(eq=False)
class Save(OptimizerStepCallback):
    """Saves every `experiment.save_every` optimizer steps, at milestones, on request, and at the end of the run."""

    section = "saving"

    run_dir: Path
    config: Config
    make_export: Callable[[Mapping[str, Tensor] | None], Any]
    """Makes the pipeline or the autoencoder to write; on rank 0 around a copy of the network with the full weights that
    it is given by name. Collective."""
    ema: Ema | None
    """The average to export, if there is one."""
    state: RunState
    """Has the requests for saves, and records each save."""
    run_lock: RunLock
    """Of this start of the run; rank 0 checks it."""
    is_resumed: bool = False
    """Whether the run continues from its newest checkpoint."""
    mirror: Mirror | None = None
    """Gets a copy of the newest checkpoint; None: there is none."""
    pending: Future[None] | None = field(default=None, init=False)
    """The save that is written in the background."""
    _pending_step: int = field(default=0, init=False)
    _written: Mapping[str, WrittenPart] = field(default_factory=dict, init=False)
    """Frozen parts of the newest export of this start, which later ones are linked to."""
    _failed_in_a_row: int = field(default=0, init=False)
    _upload: Future[None] | None = field(default=None, init=False)
    _last_upload: Path | None = field(default=None, init=False)
    """The checkpoint of the newest upload; rotation leaves it."""

    @property
    def _root(self) -> Path:
        return self.run_dir / "checkpoints"

    def on_fit_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Collective: continue from the newest checkpoint, the same on all ranks, or begin with that of another run. A
        process that was killed between a checkpoint and its export left an older pipeline, and perhaps old checkpoints:
        both are handled now.

        Raises:
            CheckpointError: none verifies, or it is of another run.
        """
        group = strategy_of(trainer).cpu_group  # made by all ranks together; at an exception they may not be together
        if not self.is_resumed:
            if self.config.experiment.start_from is not None:
                self._begin_from(trainer, pl_module, Path(self.config.experiment.start_from))
            return

        def newest_step() -> int:
            newest = newest_verified(self._root)
            if newest is None:  # the start has found one
                raise CheckpointError(f"{self._root}: no checkpoint was ever finished")
            return step_of(newest)

        stored = open_checkpoint(self._root / folder_name(group.on_rank0(newest_step)))
        step = int(stored.state["global_step"])
        self._write_step_file(step)  # also for the start after one that was killed
        self._continue_from(stored, trainer, pl_module)

        if group.on_rank0(lambda: exported_step(self.run_dir)) < step:
            with self._failures_counted(step, is_last=step >= trainer.max_steps):
                self._collect_export(trainer, pl_module, step)()

    def _begin_from(self, trainer: pl.Trainer, module: TrainedModule, source: Path) -> None:
        """Collective: `experiment.start_from`."""
        options = self.config.experiment
        folder = Path(strategy_of(trainer).cpu_group.on_rank0(lambda: str(source_checkpoint(source))))
        average = EMA_PART if options.start_from_average else None
        try:
            stored = open_checkpoint(folder).for_new_run(options.reset, TrainingData.__name__, average)
            self._continue_from(stored, trainer, module)
        except CheckpointError as error:
            raise CheckpointError(f"experiment.start_from: {folder}: {error}") from error
        log.info(f"began with {folder}; experiment.reset: {options.reset}")

    def _continue_from(self, stored: StoredCheckpoint, trainer: pl.Trainer, module: TrainedModule) -> None:
        """Collective: weights, optimizer, averages and position of a checkpoint. One of another run that is at the
        beginning of the data has no position."""
        averages = stored.averages()
        module.on_load_checkpoint(stored.state)
        load_checkpoint(stored, trainer)
        if stored.state["global_step"]:
            restore_training_state(trainer, stored.state)
        if self.is_resumed and (self.ema is None) == (EMA_PART in averages):
            log.warning(f"model.use_ema: the checkpoint's average {'is dropped' if averages else 'begins only now'}")
        if self.ema is not None and (averages or self.is_resumed):
            self.ema.load_averages(trainer, module, averages)

    def on_optimizer_step(self, trainer: pl.Trainer, module: TrainedModule, step: int) -> None:
        """Save when due; every rank takes part. A failed save counts as done; the next one runs at its regular step."""
        every = self.config.experiment.save_every
        if not (self.is_due(trainer, step, every) or self._is_milestone(step) or self.state.save_requested):
            return
        is_last = step == trainer.max_steps or trainer.should_stop
        self.state.is_consistent = False  # a failure inside a save must not trigger another save
        with self.state.watched("save"):
            try:
                self.finish_pending()
                with self._failures_counted(step, is_last=is_last):
                    self._save(trainer, module, step)
                if is_last:
                    self.finish_pending(is_last=True)
            finally:
                self.state.last_save_step, self.state.last_save_end_s = step, time.monotonic()
        self.state.is_consistent = True

    def _is_milestone(self, step: int) -> bool:
        every = self.config.checkpoint.milestone_every
        return every > 0 and step % every == 0

    @contextmanager
    def _failures_counted(self, step: int, *, is_last: bool) -> Iterator[None]:
        """A disk error is raised alike on all ranks, and names folder and free space.

        Raises:
            SaveError: too many saves in a row failed, or the last save of the run.
        """
        try:
            yield
        except OSError as error:
            self._failed_in_a_row += 1
            if is_main_process():
                log.error(f"save of step {step:,} failed ({self._failed_in_a_row} in a row): {error}")
                write_incident(self.run_dir, "save", step, cause=str(error), failed_in_a_row=self._failed_in_a_row)
            kept = f"older checkpoints in {self._root} are intact; the same command continues from them"
            if is_last:
                raise SaveError(f"the last save of this run, of step {step:,}, failed: {error}; {kept}") from error
            if self._failed_in_a_row >= self.config.checkpoint.max_failed_saves:
                raise SaveError(
                    f"{self._failed_in_a_row} saves in a row failed (checkpoint.max_failed_saves): {error}; {kept}"
                ) from error

    def _save(self, trainer: pl.Trainer, module: TrainedModule, step: int) -> None:
        """Collective: checkpoint, rotation, export; in the background all that follows the copies, if asynchronous.

        Raises:
            OSError: something could not be written; older saves are intact.
            TakenOverError: another start took over the run.
        """
        began_s, asynchronous = time.monotonic(), self.config.checkpoint.asynchronous
        seal = self._begin_checkpoint(trainer, step, asynchronous=asynchronous)
        if not asynchronous:
            seal()  # the checkpoint exists even if the export fails
        publish = self._collect_export(trainer, module, step)

        def finish() -> None:
            if asynchronous:
                seal()
            publish()
            self.state.longest_save_s = max(self.state.longest_save_s, time.monotonic() - began_s)
            self._failed_in_a_row = 0

        if asynchronous:
            self._pending_step, self.pending = step, _in_thread(finish)
        else:
            finish()

    def finish_pending(self, *, is_last: bool = False) -> None:
        """Collective: waits for the save in the background; its failure is counted now.

        Raises:
            SaveError: too many saves in a row failed, or the last save of the run.
        """
        pending, self.pending = self.pending, None
        if pending is not None:
            with self._failures_counted(self._pending_step, is_last=is_last):
                pending.result()

    def write_checkpoint(self, trainer: pl.Trainer, step: int) -> None:
        """Collective: writes a checkpoint in addition to the regular ones, without an export, and seals it.

        Raises:
            OSError: it could not be written.
        """
        self.finish_pending()
        self._begin_checkpoint(trainer, step)()

    def _begin_checkpoint(self, trainer: pl.Trainer, step: int, *, asynchronous: bool = False) -> Callable[[], None]:
        """Collective: begins a checkpoint. Call the returned function, also collective, to seal it."""
        measured_step, validation_loss = self.state.validation_loss or (-1, math.nan)
        is_measured = measured_step == step and math.isfinite(validation_loss)
        info = {"is_milestone": self._is_milestone(step), "validation_loss": validation_loss if is_measured else None}
        if self.ema is not None:
            self.ema.finish_update()
        averages = {} if self.ema is None else self.ema.averages
        folder = self._root / folder_name(step)
        write = save_checkpoint(folder, trainer, averages, info, self.run_lock, asynchronous=asynchronous)

        def seal() -> None:
            write()
            self._write_step_file(step)

        return seal

    def _write_step_file(self, step: int) -> None:
        """The newest sealed step, for the launcher."""
        path = os.environ.get(STEP_FILE_VARIABLE)
        if path and is_main_process():
            try:
                replace_text(Path(path), f"{step}\n")
            except OSError as error:
                log.warning(f"{STEP_FILE_VARIABLE}: {path} cannot be written: {error.strerror}")

    def _collect_export(self, trainer: pl.Trainer, module: TrainedModule, step: int) -> Callable[[], None]:
        """Collective: collects what is exported. The result, also collective, rotates and publishes it."""
        group, weights = strategy_of(trainer).cpu_group, full_export_weights(module, self.ema)
        exported = self.make_export(weights if trainer.is_global_zero else None)
        config, newest, current = self.config.checkpoint, self._root / folder_name(step), self.run_dir / CURRENT

        def rotate_and_export() -> None:
            try:
                kept = [self._last_upload] if self._last_upload else []
                rotate(self._root, config.keep, config.keep_best, newest, kept, self.run_lock)
            except OSError as error:  # what cannot be deleted now is deleted after a later save
                log.warning(f"older checkpoints could not be deleted: {error}")
            self._start_upload()
            if self.config.experiment.save_only_most_recent:
                export_pipeline(exported, current, self.run_lock, self._written)
            else:
                keep_export(exported, self.run_dir, step, self.run_lock, self._written)
            self._written = frozen_parts(exported, current.resolve())
            self.run_lock.check()
            replace_text(self.run_dir / EXPORTED_STEP, f"{step}\n")
            log.info(f"saved step {step}: {newest} and {current}")

        return lambda: group.on_rank0(rotate_and_export)

    def _start_upload(self) -> None:
        """Rank 0: copies the newest checkpoint to the mirror in a thread, unless an upload is running; it then
        uploads the newest."""
        mirror, config = self.mirror, self.config.checkpoint
        if mirror is None or not self._finish_upload(0):
            return

        def upload() -> None:
            while (newest := sealed_checkpoints(self._root)[-1:]) and newest[0] != self._last_upload:
                self._last_upload = newest[0]
                mirror.send(newest[0], self.run_lock)
                log.info(f"copied {newest[0].name} to {mirror.root}")
                mirror.rotate(step_of(newest[0]), config.keep, config.keep_best, self.run_lock)

        self._upload = _in_thread(upload)

    def _finish_upload(self, limit_s: float) -> bool:
        """Waits for the upload; returns whether it has ended. A failed one does not end the run: everything is saved on
        this machine."""
        if self._upload is not None:
            if not wait([self._upload], limit_s).done:
                return False
            upload, self._upload = self._upload, None
            try:
                upload.result()
            except (OSError, OutageError, ConfigError) as error:
                log.error(f"the mirror is out of date or old copies were not deleted: {error}")
                write_incident(self.run_dir, "mirror", max(self.state.last_save_step, 0), cause=str(error))
        return True

    def on_fit_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Collective: all wait for the last copy to the mirror."""
        # The longest wait before the hang watch or another process gives up.
        watch = self.config.watch
        limit_s = 0.8 * min(watch.save_s or math.inf, watch.collective_timeout_s)
        end_s = time.monotonic() + (MIRROR_AFTER_STOP_S if trainer.global_step < trainer.max_steps else limit_s)

        def finish_uploads() -> None:
            if self._finish_upload(max(0.0, end_s - time.monotonic())):
                self._start_upload()  # if the newest was sealed just after the thread had ended
                self._finish_upload(max(0.0, end_s - time.monotonic()))
            if self._upload is not None:
                log.error("the mirror is out of date: the run ended before the last upload was complete")

        if self.mirror is not None:
            with self.state.watched("save"):
                strategy_of(trainer).cpu_group.on_rank0(finish_uploads)

    def on_exception(self, trainer: pl.Trainer, pl_module: Any, exception: BaseException) -> None:
        """The run ends. Waits for a save in the background, unless another rank is missing in it. Then the steps since
        the last save are saved, without an export, if all ranks meet an exception after the same step."""
        step = trainer.global_step
        with self.state.watched("save"):
            try:
                if self.pending is not None:
                    self.pending.result(_PENDING_AT_EXCEPTION_S)
            except Exception as error:
                log.error(f"save of step {self._pending_step:,} failed: {error!r}")
            self.pending = None
            if isinstance(exception, Exception) and self.state.is_consistent and step:
                if strategy_of(trainer).cpu_group.agree(step):
                    self._save_at_exception(trainer, exception)
                elif not is_network_error(exception):  # else another rank failed first, and reports it
                    log.error(
                        f"the steps since the last save are lost: other ranks do not fail with {exception!r:.200}"
                    )
        self.run_lock.release()

    def _save_at_exception(self, trainer: pl.Trainer, exception: Exception) -> None:
        step = trainer.global_step
        try:
            if trainer.strategy.root_device.type == "cuda":
                torch.cuda.synchronize()  # fails when the device is lost
            self._begin_checkpoint(trainer, step)()
            saved = self._root / folder_name(step)
            log.error(f"{type(exception).__name__} after {counted(step, 'optimizer step')}; saved {saved}")
        except Exception as error:
            log.error(f"the steps since the last save are lost: {error}")

    def teardown(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        """Releases the run folder for another start."""
        self.run_lock.release()


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
