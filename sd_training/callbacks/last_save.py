"""What is saved when a run dies of an exception: the optimizer steps since the last save, without a pipeline."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch

from sd_training.config.batch_plan import counted
from sd_training.distributed.saves import WholeCheckpoints
from sd_training.rank_log import get_logger
from sd_training.watch.ending import is_of_the_network

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
        if is_of_the_network(exception):
            return  # another process ended first, and says so
        log.error(f"the steps since the last save are lost: other processes do not die of {exception!r:.200}")
        return
    try:
        if strategy.root_device.type == "cuda":
            torch.cuda.synchronize()  # fails when the device is lost
        folder = checkpoint(trainer, step)
        strategy.take_unwritten()()
        log.error(f"{type(exception).__name__} after {counted(step, 'optimizer step')}; saved {folder}")
    except Exception as error:
        log.error(f"the steps since the last save are lost: {error}")


class Settled(pl.Callback):
    """Knows whether weights, optimizer and averages all are as after the last optimizer step: whether they may be saved
    when something fails. Acts after the callbacks that belong to the step."""

    is_settled = False

    def on_before_optimizer_step(self, *_: Any) -> None:
        """From here on until the averages have seen the step, nothing fits together."""
        self.is_settled = False

    def on_train_batch_end(self, *_: Any) -> None:
        """The callbacks before this one have."""
        self.is_settled = True

    @contextmanager
    def left_alone(self) -> Iterator[None]:
        """Around a save: what fails in it is not saved once more."""
        self.is_settled = False
        yield
        self.is_settled = True
