"""Tells the hang watch what the training process is doing; saves and pictures tell it themselves."""

import os
import platform
import zlib
from typing import Any

import pytorch_lightning as pl
import torch

from sd_training.callbacks.base import gather_ranks
from sd_training.watchdog.hang import HangWatch


class Heartbeat(pl.Callback):
    """The last of the callbacks, so that what the others do after a step still belongs to the step.

    The first optimizer step belongs to the start: it compiles, and finds the fastest kernels.
    """

    def __init__(self, watch: HangWatch) -> None:
        self.watch = watch
        self._first_step = 0
        self._is_warm = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Collective: the watch learns who is on this machine."""
        self._first_step = trainer.global_step
        if trainer.world_size > 1:
            own_node = zlib.crc32(platform.node().encode())
            everyone = gather_ranks(trainer, torch.tensor([own_node, os.getpid()])).tolist()
            self.watch.local_peers = {
                rank: pid for rank, (node, pid) in enumerate(everyone) if node == own_node and pid != os.getpid()
            }

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """The micro-batch is there."""
        if self._is_warm:
            self.watch.enter("step", trainer.global_step)

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """The next thing is to wait for a micro-batch."""
        self._is_warm |= trainer.global_step > self._first_step
        if self._is_warm:
            self.watch.enter("data", trainer.global_step)

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """What is left is to put away what was saved, and to take leave of the loggers."""
        self.watch.enter("save", trainer.global_step)
