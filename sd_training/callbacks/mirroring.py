"""Sends sealed checkpoints to the mirror beside the training; one at a time, the newest first."""

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


class Mirroring(OptimizerStepCallback):
    """The first process sends. A checkpoint that is sealed while another one is on its way is sent after it, unless a
    newer one is there by then. The end of the run waits.

    Args:
        run_dir: the run folder.
        mirror: gets the copies.
        saves: acts before this callback.
        stopwatch: stands still while the end of the run waits.
    """

    def __init__(self, run_dir: Path, mirror: Mirror, saves: Saves, stopwatch: Stopwatch) -> None:
        self.run_dir, self.mirror, self.saves, self.stopwatch = run_dir, mirror, saves, stopwatch
        self.background = Background()
        self._sent_step = -1
        """Optimizer steps of the newest checkpoint that was sent, or whose sending failed."""

    def on_optimizer_step(self, trainer: pl.Trainer, module: TrainedModule, step: int) -> None:
        """Never waits."""
        if not trainer.is_global_zero or self.background.is_running:
            return
        self._tell_failure()
        if self.saves.times.last_step > self._sent_step:
            self._send_newest()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Collective: all wait for the last copy."""
        with self.stopwatch.paused("save"):
            peers_of(trainer).on_first(self._finish)

    def _finish(self) -> None:
        self._tell_failure()
        self._send_newest()
        self._tell_failure()

    def _send_newest(self) -> None:
        """A save in the background may not be sealed yet; it is found after a later step."""
        newest = sealed(self.run_dir / "checkpoints")[-1:]
        if newest and step_of(newest[0]) > self._sent_step:
            self._sent_step = step_of(newest[0])
            self.background.start(lambda: self._send(newest[0]))

    def _send(self, folder: Path) -> None:
        """In the thread."""
        fence, config = self.saves.fence, self.saves.config
        self.mirror.send(folder, fence)
        self.mirror.rotate(config.keep, config.keep_best, fence)
        log.info(f"copied {folder.name} to {self.mirror.root}")

    def _tell_failure(self) -> None:
        """Waits. A mirror that fails ends no run: everything is on this machine."""
        try:
            self.background.wait()
        except OSError as error:
            log.error(f"step {self._sent_step:,} was not copied: {error}")
            note_incident(self.run_dir, "mirror failed", self._sent_step, cause=str(error))
