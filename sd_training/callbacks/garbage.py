"""Python's garbage collector at work between optimizer steps, in the thread that trains, and at no other time.

Left alone it runs in whatever thread allocates. A collection in a logger's thread, while autograd worked without
Python's lock, is the likeliest reason for a run that once died here: the first backward pass found DDP's weak reference
to itself empty, as Lightning issue 20706 tells of other trainers. On many devices the pauses also fall together.
"""

import gc
from typing import Any

import pytorch_lightning as pl

from sd_training.callbacks.every_step import OptimizerStepCallback
from sd_training.training.base_module import TrainedModule

WHOLE_EVERY = 1000
"""Optimizer steps between collections of everything, which take a second; young objects are looked at every step."""
_YOUNG = 1
_EVERYTHING = 2


class GarbageCollection(OptimizerStepCallback):
    """Acts last, when nothing of the step is under way any more."""

    def __init__(self) -> None:
        self._was_enabled = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Nothing is collected inside the steps."""
        super().on_train_start(trainer, pl_module)
        self._was_enabled = self._was_enabled or gc.isenabled()
        gc.collect()
        gc.disable()

    def on_optimizer_step(self, trainer: pl.Trainer, module: TrainedModule, step: int) -> None:
        """Cycles of the step, and from time to time older ones."""
        gc.collect(_YOUNG if step % WHOLE_EVERY else _EVERYTHING)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """As before."""
        self._restore()

    def on_exception(self, *_: Any) -> None:
        """As before."""
        self._restore()

    def _restore(self) -> None:
        if self._was_enabled:
            gc.enable()
