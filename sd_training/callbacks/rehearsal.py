"""Resume rehearsal: whether a run can be resumed is known after its first save, not after its first crash."""

import json
import math
import time
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor

from sd_training.callbacks.every_step import OptimizerStepCallback
from sd_training.callbacks.gathered import gathered
from sd_training.callbacks.incidents import plain
from sd_training.callbacks.saves import Saves, peers_of
from sd_training.callbacks.second_run import NAME, SecondRun
from sd_training.callbacks.stopwatch import Stopwatch
from sd_training.checkpoint.seal import folder_name, sealed
from sd_training.incident_log import note_incident
from sd_training.rank_log import get_logger
from sd_training.training.base_module import TrainedModule

log = get_logger(__name__)

FILE_NAME = f"{NAME}.json"
"""In the run folder."""


class Rehearsal(OptimizerStepCallback):
    """After the first checkpoint a second process resumes from it and takes the next optimizer step, while the run
    waits; then the run takes the same step, and the two losses are compared. A run that was itself resumed has shown
    that it can be.

    Args:
        second: the other process.
        saves: acts before this callback.
        stopwatch: stands still meanwhile.
        tolerance: relative difference that the losses may have.
    """

    def __init__(self, second: SecondRun, saves: Saves, stopwatch: Stopwatch, tolerance: float) -> None:
        self.second, self.saves, self.stopwatch, self.tolerance = second, saves, stopwatch, tolerance
        self._is_wanted = True
        self._outcome: dict[str, Any] | None = None
        """Of the second process, while the run takes the step."""
        self._losses: list[Tensor] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Whether this start of the run is the first one."""
        super().on_train_start(trainer, pl_module)
        self._is_wanted = trainer.global_step == 0

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keeps the losses of the step that both take."""
        assert isinstance(pl_module, TrainedModule)
        if self._outcome is not None and pl_module.seen is not None:
            self._losses.append(pl_module.seen.loss.float())
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_optimizer_step(self, trainer: pl.Trainer, module: TrainedModule, step: int) -> None:
        """Collective after the first save, and after the step that follows."""
        if self._outcome is not None:
            self._compare(trainer, self._outcome)
            self._outcome = None
        is_saved = self.saves.times.last_step == step
        if not (self._is_wanted and is_saved) or step == trainer.max_steps or trainer.should_stop:
            return
        with self.stopwatch.paused("save"):
            self.saves.settle()
            self._outcome = peers_of(trainer).on_first(lambda: self._rehearse(step))
        self._is_wanted = self._outcome is None

    def _rehearse(self, step: int) -> dict[str, Any] | None:
        """On the first process; None where the save had failed."""
        run_dir = self.second.run_dir
        if folder_name(step) not in (folder.name for folder in sealed(run_dir / "checkpoints")):
            return None
        log.info(f"rehearsal: another process resumes from {run_dir / 'checkpoints' / folder_name(step)}")
        began_s = time.monotonic()
        outcome: dict[str, Any] = {"optimizer_step": step, "loss_resumed": None, "problem": ""}
        try:
            outcome["loss_resumed"] = self.second.loss_after(step)
        except (RuntimeError, OSError) as error:
            outcome["problem"] = f"the second process {error}"
        return outcome | {"seconds": round(time.monotonic() - began_s, 1)}

    def _compare(self, trainer: pl.Trainer, outcome: dict[str, Any]) -> None:
        """Collective: the mean loss of the step, as `metrics.csv` would have it, against that of the other process."""
        own = torch.zeros_like(self._losses[0])
        for loss in self._losses:
            own = own + loss
        mean = float(gathered(trainer, own / len(self._losses)).mean())
        self._losses = []
        if trainer.is_global_zero:
            self._report(outcome | {"loss": mean})

    def _report(self, outcome: dict[str, Any]) -> None:
        resumed, loss, step = outcome["loss_resumed"], outcome["loss"], outcome["optimizer_step"]
        if not outcome["problem"] and not _are_alike(resumed, loss, self.tolerance):
            outcome["problem"] = (
                f"optimizer step {step + 1:,} has the loss {loss:.9g}, and {resumed:.9g} after a resume; something "
                "that it depends on is in no checkpoint"
            )
        self._write(outcome)
        if outcome["problem"]:
            log.error(f"rehearsal: this run may not be resumable: {outcome['problem']}")
            note_incident(self.second.run_dir, "rehearsal failed", step, cause=outcome["problem"])
        else:
            same = "the same loss" if resumed == loss else f"a loss within {abs(resumed - loss) / abs(loss):.1e}"
            log.info(f"rehearsal: resumed, {same} in step {step + 1:,}, saved, exported ({outcome['seconds']:g} s)")

    def _write(self, outcome: dict[str, Any]) -> None:
        """A disk that is full now was told of by the save."""
        path = self.second.run_dir / FILE_NAME
        try:
            path.write_text(json.dumps(plain(outcome), indent=1, allow_nan=False) + "\n", encoding="utf-8")
        except OSError as error:
            log.warning(f"{path} cannot be written: {error.strerror}")


def _are_alike(one: float, other: float, tolerance: float) -> bool:
    """Losses that are not finite are alike."""
    if not math.isfinite(one) or not math.isfinite(other):
        return math.isfinite(one) == math.isfinite(other)
    return abs(one - other) <= tolerance * abs(other)
