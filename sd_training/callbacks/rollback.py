"""Going back to an older checkpoint inside a run: weights, optimizer state and averages, but neither the step nor the
data.

The optimizer step goes on counting, so the batches that did the damage, and those since the checkpoint, are behind the
run for good; no order of the data, name of a checkpoint or row of the metrics has two meanings.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytorch_lightning as pl

from sd_training.callbacks.ema import Ema
from sd_training.callbacks.saves import peers_of
from sd_training.checkpoint.seal import folder_name, sealed, step_of, verify
from sd_training.training.base_module import TrainedModule


class Rollback(NamedTuple):
    """One that was done."""

    at: int
    """Optimizer steps completed when it was done; training goes on from here."""
    to: int
    """Optimizer steps of the checkpoint whose weights it goes on with."""
    first_bad: int
    """The first step that was wrong [optimizer steps completed before it]."""
    kind: str
    """What was wrong: `skipped` or `spike`."""


def older_checkpoint(trainer: pl.Trainer, root: Path, before: int, done: Sequence[Rollback]) -> Path | None:
    """Collective: the newest checkpoint of fewer than `before` optimizer steps that verifies, the same everywhere.

    Those that a rollback has already left behind are not taken.
    """
    step = peers_of(trainer).on_first(lambda: newest_before(root, before, done))
    return None if step is None else root / folder_name(step)


def newest_before(root: Path, before: int, done: Sequence[Rollback]) -> int | None:
    """As `older_checkpoint`, on the process that looks."""
    for folder in reversed(sealed(root)):
        step = step_of(folder)
        is_left_behind = any(rollback.to < step < rollback.at for rollback in done)
        if step < before and not is_left_behind and not verify(folder):
            return step
    return None


def restore(trainer: pl.Trainer, module: TrainedModule, folder: Path, ema: Ema | None) -> None:
    """Collective: training goes on from the weights, optimizer state and averages of a checkpoint.

    Raises:
        CheckpointError: it is of another format or network.
    """
    strategy: Any = trainer.strategy
    checkpoint = strategy.open_checkpoint(folder)
    strategy.load_model_state_dict(checkpoint)
    strategy.load_optimizer_state_dict(checkpoint)
    precision = trainer.precision_plugin
    if type(precision).__qualname__ in checkpoint:
        precision.load_state_dict(checkpoint[type(precision).__qualname__])
    if ema is not None:
        ema.finish_update()
        ema.on_load_checkpoint(trainer, module, checkpoint)
