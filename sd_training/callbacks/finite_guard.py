"""Names the optimizer steps that were skipped for a non-finite gradient, and stops a run that makes no progress.

The skip itself happens on the device, in the optimizer (see `TrainedModule.configure_gradient_clipping`); this callback
reads the flags in the background of the logging interval.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytorch_lightning as pl
import torch
from torch import Tensor

from sd_training.callbacks.every_step import OptimizerStepCallback
from sd_training.errors import UserError
from sd_training.rank_log import get_logger
from sd_training.training.base_module import TrainedModule

log = get_logger(__name__)

MAX_SKIPPED_IN_A_ROW = 10


class FiniteGuard(OptimizerStepCallback):
    """Writes `incidents.jsonl` and raises after `MAX_SKIPPED_IN_A_ROW` skipped steps.

    Args:
        path: the run's `incidents.jsonl`.
        every: optimizer steps between looks at the flags.
        positions_of: the positions of a step's samples in the order of the run.
    """

    def __init__(self, path: Path, every: int, positions_of: Callable[[int], range]) -> None:
        self.path = path
        self.every = every
        self.positions_of = positions_of
        self._flags: list[Tensor] = []
        self._in_a_row = 0

    def on_optimizer_step(self, trainer: pl.Trainer, module: TrainedModule, step: int) -> None:
        """Collect the step's flag; look at a window of them at once."""
        if module.was_step_skipped is not None:
            self._flags.append(module.was_step_skipped)
        if not self._flags or not self.is_due(trainer, step, self.every):
            return
        flags = torch.stack(self._flags).tolist()
        first_step = step - len(flags)
        self._flags.clear()
        for offset, flag in enumerate(flags):
            self._in_a_row = self._in_a_row + 1 if flag else 0
            if flag and trainer.is_global_zero:
                self._record(first_step + offset)
            if self._in_a_row >= MAX_SKIPPED_IN_A_ROW:
                raise UserError(
                    f"{MAX_SKIPPED_IN_A_ROW} optimizer steps in a row had a non-finite gradient, the last after "
                    f"{first_step + offset} steps; see {self.path}. Lower optimizer.params.learning_rate, set "
                    "optimizer.max_grad_norm, or look at the named samples."
                )

    def _record(self, step: int) -> None:
        """One line per skipped step; positions are those of the run's data order."""
        positions = self.positions_of(step)
        first, last = positions[0], positions[-1]
        incident = {
            "kind": "non-finite gradient, step skipped",
            "optimizer_step": step,
            "first_position": first,
            "last_position": last,
        }
        log.warning(f"optimizer step {step} skipped: non-finite gradient (positions {first} to {last})")
        with self.path.open("a") as stream:
            stream.write(json.dumps(incident) + "\n")
