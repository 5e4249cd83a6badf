"""Resume rehearsal: whether a run can be resumed is known after its first save, not after its first crash."""

import json
import math
import time
from collections.abc import Callable
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
from sd_training.checkpoint.durable import replace_text
from sd_training.checkpoint.seal import folder_name, sealed
from sd_training.distributed.peers import Peers
from sd_training.incident_log import note_incident
from sd_training.rank_log import get_logger
from sd_training.training.base_module import TrainedModule

log = get_logger(__name__)

_STEPS = 2
FILE_NAME = f"{NAME}.json"
"""In the run folder."""


class Rehearsal(OptimizerStepCallback):
    """After the first checkpoint a second process resumes from it and takes the next two optimizer steps, while the run
    waits; then the run takes the same steps, and the losses are compared. The first one tells of weights, samples and
    draws, the second one of the state of the optimizer as well. A run that was itself resumed has shown that it can be.

    Args:
        second: the other process.
        saves: acts before this callback.
        stopwatch: stands still meanwhile.
        tolerance: relative difference that the losses may have.
        has_ended: told when the run goes on.
    """

    def __init__(
        self, second: SecondRun, saves: Saves, stopwatch: Stopwatch, tolerance: float, has_ended: Callable[[], None]
    ) -> None:
        self.second, self.saves, self.stopwatch, self.tolerance = second, saves, stopwatch, tolerance
        self.has_ended = has_ended
        self._is_wanted = True
        self._outcome: dict[str, Any] | None = None
        """Of the second process, while the run takes the steps."""
        self._losses: list[list[Tensor]] = []
        """By optimizer step, of its micro-batches."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Whether this start of the run is the first one."""
        super().on_train_start(trainer, pl_module)
        self._is_wanted = trainer.global_step == 0

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keeps the losses of the steps that both take."""
        assert isinstance(pl_module, TrainedModule)
        if self._outcome is not None and pl_module.seen is not None:
            self._losses[-1].append(pl_module.seen.loss.float())
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_optimizer_step(self, trainer: pl.Trainer, module: TrainedModule, step: int) -> None:
        """Collective after the first save, and after the steps that follow."""
        if self._outcome is not None:
            if step == self._outcome["last_step"] or trainer.should_stop:
                self._compare(trainer, self._outcome)
                self._outcome = None
            else:
                self._losses.append([])
        is_saved = self.saves.times.last_step == step
        if not (self._is_wanted and is_saved) or step == trainer.max_steps or trainer.should_stop:
            return
        with self.stopwatch.paused("save"):
            self.saves.settle()
        count = min(_STEPS, trainer.max_steps - step)
        with self.stopwatch.paused("save"):
            peers = peers_of(trainer)
            if not trainer.is_global_zero:
                peers.meet(self.second.pass_on_stop)
            self._outcome = peers.on_first(lambda: self._rehearse_and_meet(step, count, peers))
        self.has_ended()
        self._is_wanted, self._losses = self._outcome is None, [[]]

    def _rehearse_and_meet(self, step: int, count: int, peers: Peers) -> dict[str, Any] | None:
        """On the first process; the others wait for it where a signal reaches them."""
        try:
            return self._rehearse(step, count)
        finally:
            peers.meet(lambda: None)

    def _rehearse(self, step: int, count: int) -> dict[str, Any] | None:
        """On the first process; None where the save had failed."""
        run_dir = self.second.run_dir
        if folder_name(step) not in (folder.name for folder in sealed(run_dir / "checkpoints")):
            return None
        log.info(f"rehearsal: another process resumes from {run_dir / 'checkpoints' / folder_name(step)}")
        began_s = time.monotonic()
        outcome: dict[str, Any] = {"optimizer_step": step, "last_step": step + count, "losses_resumed": []}
        outcome["problem"] = ""
        try:
            outcome["losses_resumed"] = self.second.losses_after(step, count)
        except Exception as error:  # whatever it is, the run itself is well
            outcome["problem"] = f"the second process {error}"
        return outcome | {"seconds": round(time.monotonic() - began_s, 1)}

    def _compare(self, trainer: pl.Trainer, outcome: dict[str, Any]) -> None:
        """Collective: the mean losses of the steps, as `metrics.csv` would have them, against the other process's."""
        own = [sum(step[1:], start=step[0]) / len(step) for step in self._losses]
        means = gathered(trainer, torch.stack(own)).view(trainer.world_size, -1).mean(dim=0).tolist()
        self._losses = []
        if trainer.is_global_zero:
            self._report(outcome | {"losses": means})

    def _report(self, outcome: dict[str, Any]) -> None:
        step, pairs = outcome["optimizer_step"], list(zip(outcome["losses"], outcome["losses_resumed"], strict=False))
        unlike = [i for i, (own, resumed) in enumerate(pairs) if not _are_alike(resumed, own, self.tolerance)]
        if not outcome["problem"] and unlike:
            own, resumed = pairs[unlike[0]]
            outcome["problem"] = (
                f"optimizer step {step + unlike[0] + 1:,} has the loss {own:.9g}, and {resumed:.9g} after a resume; "
                "something that it depends on is in no checkpoint"
            )
        self._write(outcome)
        if outcome["problem"]:
            log.error(f"rehearsal: this run may not be resumable: {outcome['problem']}")
            note_incident(self.second.run_dir, "rehearsal failed", step, cause=outcome["problem"])
        else:
            same = "the same losses" if all(a == b for a, b in pairs) else f"losses within {self.tolerance:g}"
            steps = f"steps {step + 1:,} to {step + len(pairs):,}"
            log.info(f"rehearsal: resumed, {same} in {steps}, saved, exported ({outcome['seconds']:g} s)")

    def _write(self, outcome: dict[str, Any]) -> None:
        """A disk that is full now was told of by the save."""
        path = self.second.run_dir / FILE_NAME
        try:
            replace_text(path, json.dumps(plain(outcome), indent=1, allow_nan=False) + "\n")
        except OSError as error:
            log.warning(f"{path} cannot be written: {error.strerror}")


def _are_alike(one: float, other: float, tolerance: float) -> bool:
    """Losses that are not finite are alike."""
    if not math.isfinite(one) or not math.isfinite(other):
        return math.isfinite(one) == math.isfinite(other)
    return abs(one - other) <= tolerance * abs(other)
