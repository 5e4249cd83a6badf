"""Sends sealed checkpoints to the mirror beside the training, one at a time."""

import time
from pathlib import Path

import pytorch_lightning as pl

from sd_training.callbacks.background import Background
from sd_training.callbacks.every_step import OptimizerStepCallback
from sd_training.callbacks.saves import Saves, peers_of
from sd_training.callbacks.stopwatch import Stopwatch
from sd_training.checkpoint.mirror import Mirror
from sd_training.checkpoint.seal import sealed, step_of
from sd_training.incident_log import note_incident
from sd_training.rank_log import get_logger
from sd_training.training.base_module import TrainedModule

log = get_logger(__name__)

AFTER_A_STOP_S = 60.0
"""Whoever asked the run to stop may not wait longer; all is saved here, and a half sent copy is none."""


class Mirroring(OptimizerStepCallback):
    """The first process sends. Of the checkpoints that are sealed while one is on its way, the newest is sent after it.

    Args:
        run_dir: the run folder.
        mirror: gets the copies.
        saves: acts before this callback; deletes nothing that is on its way.
        stopwatch: stands still while the end of the run waits.
        limit_s: so long the end of a run that is done waits for the last copy.
    """

    def __init__(self, run_dir: Path, mirror: Mirror, saves: Saves, stopwatch: Stopwatch, limit_s: float) -> None:
        self.run_dir, self.mirror, self.saves, self.stopwatch = run_dir, mirror, saves, stopwatch
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
        with self.stopwatch.paused("save"):
            peers_of(trainer).on_first(lambda: self._finish(limit_s))

    def _finish(self, limit_s: float) -> None:
        end_s = time.monotonic() + limit_s
        if self._tell_failure(limit_s):
            self._send_newest()
            self._tell_failure(max(0.0, end_s - time.monotonic()))

    def _send_newest(self) -> None:
        """A save in the background may not be sealed yet; it is found after a later step."""
        newest = sealed(self.run_dir / "checkpoints")[-1:]
        if newest and step_of(newest[0]) > self._sent_step:
            self._tried_after = max(step_of(newest[0]), self._tried_after)
            self.saves.in_use = newest[0]
            self.background.start(lambda: self._send(newest[0]))

    def _send(self, folder: Path) -> None:
        """In the thread."""
        fence, config, step = self.saves.fence, self.saves.config, step_of(folder)
        self.mirror.send(folder, fence)
        self._sent_step = step
        log.info(f"copied {folder.name} to {self.mirror.root}")
        self.mirror.rotate(step, config.keep, config.keep_best, config.best_by, fence)

    def _tell_failure(self, limit_s: float | None = None) -> bool:
        """Waits, and says whether it ended in time. A mirror that fails ends no run: everything is on this machine."""
        try:
            self.background.wait(limit_s)
        except OSError as error:
            log.error(f"the copy in the mirror is behind or not tidied up: {error}")
            note_incident(self.run_dir, "mirror failed", max(self.saves.times.last_step, 0), cause=str(error))
            return not isinstance(error, TimeoutError)
        return True
