"""Saves: a sealed checkpoint to resume from, then rotation, then the pipeline folder that diffusers loads."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from torch import Tensor

from sd_training.callbacks.background import Background
from sd_training.callbacks.ema import Ema, export_weights, placement_of, whole_weights
from sd_training.callbacks.every_step import OptimizerStepCallback
from sd_training.callbacks.failed_saves import FailedSaves
from sd_training.callbacks.last_save import Settled, save_what_is_left
from sd_training.callbacks.save_times import SaveTimes
from sd_training.callbacks.stopwatch import Stopwatch
from sd_training.checkpoint.kinds import info_of, protected
from sd_training.checkpoint.rotation import rotate
from sd_training.checkpoint.seal import folder_name
from sd_training.checkpoint.writer import Fence
from sd_training.config.schema import CheckpointConfig
from sd_training.distributed.peers import Peers
from sd_training.distributed.saves import WholeCheckpoints
from sd_training.export.pipeline import export_pipeline, keep_export
from sd_training.rank_log import get_logger
from sd_training.training.base_module import TrainedModule

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
        stopwatch: stands still while saving.
        times: says when a save is asked for, and is told of each.
        fence: of this start of the run; the first process asks it.
        take_losses: gives the losses that a manifest holds (see `info_of`), after an optimizer step.
    """

    def __init__(
        self,
        run_dir: Path,
        every: int,
        config: CheckpointConfig,
        only_most_recent: bool,
        exported: Callable[[Mapping[str, Tensor] | None], Any],
        ema: Ema | None,
        stopwatch: Stopwatch,
        times: SaveTimes,
        fence: Fence,
        take_losses: Callable[[int], dict[str, float | None]],
    ) -> None:
        self.run_dir = run_dir
        self.every = every
        self.config = config
        self.only_most_recent = only_most_recent
        self.exported = exported
        self.ema = ema
        self.stopwatch = stopwatch
        self.fence = fence
        self.take_losses = take_losses
        self.failures = FailedSaves(run_dir, config.max_failed_saves)
        self.times = times
        self.in_use: Path | None = None
        """A checkpoint that is being copied elsewhere; it is deleted after a later save."""
        self._loaded_step: int | None = None
        self.background = Background()
        self._begun_step = 0
        """Optimizer steps of the save in the background."""
        self.settled = Settled()
        """Acts after averages and guards, and before whatever may fail without a part in the step."""

    def on_optimizer_step(self, trainer: pl.Trainer, module: TrainedModule, step: int) -> None:
        """Save when due; every rank takes part."""
        if not (self.is_due(trainer, step, self.every) or self._is_milestone(step) or self.times.is_asked):
            return
        is_last = step == trainer.max_steps or trainer.should_stop
        is_written_later = self.config.asynchronous
        saving = self.times.saving(step, is_written_later=is_written_later)
        with self.stopwatch.paused("save"), saving, self.settled.left_alone():
            self.settle(is_last=False)
            with self._failures_told(step, is_last=is_last):
                if is_written_later:
                    self._begin(trainer, module, step)
                else:
                    self._save(trainer, module, step)
            if is_last:
                self.settle(is_last=True)

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
        peers_of(trainer).on_first(lambda: self._rotate(checkpoint))
        self._export(trainer, module, step)
        self.failures.succeeded()

    def _begin(self, trainer: pl.Trainer, module: TrainedModule, step: int) -> None:
        """Collective: copies what `_save` would write, and has it written in the background; `settle` ends it."""
        began_s = time.monotonic()
        checkpoint = self._checkpoint(trainer, step)
        write, peers = _strategy(trainer).take_unwritten(), peers_of(trainer)
        weights = self._copied_weights(trainer, module)
        exported = self.exported(weights if trainer.is_global_zero else None)

        def finish() -> None:
            try:
                write()
                self.times.sealed_step = step
                peers.on_first(lambda: self._rotate(checkpoint))
                peers.on_first(lambda: self._write(step, exported))
            finally:
                self.times.written()

        self._begun_step = step
        self.times.in_flight(began_s)
        self.background.start(finish)

    def settle(self, *, is_last: bool = False) -> None:
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
        if not placement_of(trainer).is_network_whole:
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
        self.settle()
        self._checkpoint(trainer, step)
        _strategy(trainer).take_unwritten()()
        self.times.sealed_step = step

    def _checkpoint(self, trainer: pl.Trainer, step: int) -> Path:
        folder = self._folder(step)
        info = info_of(is_milestone=self._is_milestone(step), **self.take_losses(step))
        trainer.save_checkpoint(folder, storage_options=info)
        return folder

    def _folder(self, step: int) -> Path:
        return self.run_dir / "checkpoints" / folder_name(step)

    def _is_milestone(self, step: int) -> bool:
        every = self.config.milestone_every
        return every > 0 and step % every == 0

    def _rotate(self, newest: Path) -> None:
        """What cannot be deleted now is deleted after a later save."""
        root = newest.parent
        try:
            best = protected(root, self.config.keep_best, self.config.best_by)
            kept = [*best, *([self.in_use] if self.in_use else [])]
            rotate(root, self.config.keep, [newest], kept, self.fence)
        except OSError as error:
            log.warning(f"older checkpoints could not be deleted: {error}")

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """A process that was killed between a checkpoint and its export left an older pipeline, and perhaps older
        checkpoints to delete: do both now."""
        super().on_train_start(trainer, pl_module)
        peers_of(trainer)  # made by all processes together; at an exception they may not be together
        self._export_what_was_left_out(trainer, pl_module)

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Training does not start when there is nothing left to train."""
        self._export_what_was_left_out(trainer, pl_module)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Another start may have the folder."""
        self.fence.release()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """The run ends. A save in the background is waited for, unless another process is missing in it."""
        with self.stopwatch.paused("save"):
            try:
                self.background.wait(_PATIENCE_S)
            except Exception as error:
                log.error(f"save of step {self._begun_step:,} failed: {error}")
            if isinstance(exception, Exception) and self.settled.is_settled:
                save_what_is_left(trainer, exception, self._checkpoint)
        self.fence.release()

    def _export_what_was_left_out(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        left_out, self._loaded_step = self._loaded_step, None
        if left_out is None or peers_of(trainer).on_first(self._exported_step) >= left_out:
            return
        assert isinstance(module, TrainedModule)
        with self._failures_told(left_out, is_last=trainer.global_step >= trainer.max_steps):
            peers_of(trainer).on_first(lambda: self._rotate(self._folder(left_out)))
            self._export(trainer, module, left_out)

    def _exported_step(self) -> int:
        """-1 where nothing says so."""
        path = self.run_dir / _EXPORTED
        text = path.read_text(encoding="utf-8").strip() if path.is_file() else ""
        return int(text) if text.isdigit() else -1

    def _export(self, trainer: pl.Trainer, module: TrainedModule, step: int) -> None:
        """Collective; the first process writes, and all get its error."""
        peers = peers_of(trainer)
        if placement_of(trainer).is_network_whole:
            with export_weights(module, self.ema):
                exported = self.exported(None)
                peers.on_first(lambda: self._write(step, exported))
        else:
            weights = whole_weights(trainer, module, self.ema)
            exported = self.exported(weights if trainer.is_global_zero else None)
            peers.on_first(lambda: self._write(step, exported))

    def _write(self, step: int, exported: Any) -> None:
        current = self.run_dir / "current_pipeline"
        if self.only_most_recent:
            export_pipeline(exported, current, self.fence)
        else:
            keep_export(exported, self.run_dir, step, self.fence)
        (self.run_dir / _EXPORTED).write_text(f"{step}\n", encoding="utf-8")
        log.info(f"saved step {step}: {self._folder(step)} and {current}")

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Express the loop's micro-batch counters in today's accumulation.

        Progress is counted in optimizer steps; Lightning also stores micro-batches, which mean something else after a
        change of `system.gradient_accumulation` at the same global batch.
        """
        self._loaded_step = int(checkpoint["global_step"])
        micro_batches = checkpoint["global_step"] * trainer.accumulate_grad_batches
        progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        for counts in (progress["total"], progress["current"]):
            counts |= {"ready": micro_batches, "started": micro_batches, "processed": micro_batches}
            # Saved inside on_train_batch_end, where Lightning has not yet counted the batch as completed.
            counts["completed"] = micro_batches - 1
        progress["is_last_batch"] = False


def peers_of(trainer: pl.Trainer) -> Peers:
    """The processes that save together."""
    return _strategy(trainer).peers


def _strategy(trainer: pl.Trainer) -> WholeCheckpoints:
    strategy = trainer.strategy
    assert isinstance(strategy, WholeCheckpoints)
    return strategy
