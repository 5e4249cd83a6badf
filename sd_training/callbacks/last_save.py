"""What is saved when a run dies of an exception: the optimizer steps since the last save, without a pipeline."""

from collections.abc import Callable
from pathlib import Path

import pytorch_lightning as pl
import torch

from sd_training.distributed.saves import WholeCheckpoints
from sd_training.rank_log import get_logger

log = get_logger(__name__)


def save_what_is_left(trainer: pl.Trainer, exception: Exception, checkpoint: Callable[[pl.Trainer, int], Path]) -> None:
    """Collective only where all processes meet an exception after the same optimizer step; else nothing is saved.

    Args:
        checkpoint: of Saves.
    """
    step, strategy = trainer.global_step, trainer.strategy
    assert isinstance(strategy, WholeCheckpoints)
    if not step:
        return
    if not strategy.peers.agree(step):
        log.error(f"the steps since the last save are lost: other processes do not die of {exception!r:.200}")
        return
    try:
        if strategy.root_device.type == "cuda":
            torch.cuda.synchronize()  # fails when the device is lost
        folder = checkpoint(trainer, step)
        strategy.take_unwritten()()
        log.error(f"{type(exception).__name__} after {step:,} optimizer steps; saved {folder}")
    except Exception as error:
        log.error(f"the steps since the last save are lost: {error}")
