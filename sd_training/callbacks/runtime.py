"""The process itself: the hang watch learns what it is doing, the log what a start took, and Python's garbage is
collected between steps only.

Left alone the collector runs in whatever thread allocates. A collection in a logger's thread, while autograd worked
without Python's lock, is the likeliest reason for a run that once died here: the first backward pass found DDP's weak
reference to itself empty, as in Lightning issue 20706. On many devices the pauses also fall together.
"""

import gc
import os
import platform
import time
import zlib
from itertools import pairwise
from typing import Any

import pytorch_lightning as pl
import torch

from sd_training.callbacks.base import OptimizerStepCallback, gather_ranks
from sd_training.checkpoint.folder import RunLock
from sd_training.log import get_logger
from sd_training.training import TrainedModule
from sd_training.watchdog import HangWatch

log = get_logger(__name__)

FULL_COLLECTION_EVERY = 1000
"""Optimizer steps between collections of everything, which take a second; young objects are collected every step."""


class StartTimes:
    """What the phases of a start took, one after the other.

    Args:
        started_s: when the program began [s of `time.monotonic`].
    """

    def __init__(self, started_s: float) -> None:
        self._started_s, self._ends_s = started_s, dict[str, float]()

    def end(self, phase: str) -> None:
        """It ends now."""
        self._ends_s[phase] = time.monotonic()

    def sentence(self) -> str:
        """Total, and each phase."""
        moments_s = [self._started_s, *self._ends_s.values()]
        parts = [f"{phase} {b - a:.1f}" for phase, (a, b) in zip(self._ends_s, pairwise(moments_s), strict=True)]
        return f"started in {moments_s[-1] - moments_s[0]:.1f} s: {', '.join(parts)}"


class Runtime(OptimizerStepCallback):
    """Marks the sections of the hang watch; saves and pictures mark theirs themselves. The last callback: what the
    others do after a step still belongs to the step, and when garbage is collected nothing of it is in progress.

    The first optimizer step belongs to the start: it compiles, and finds the fastest kernels.
    """

    def __init__(self, watch: HangWatch, run_lock: RunLock, times: StartTimes) -> None:
        self.watch, self.run_lock, self.times = watch, run_lock, times
        self._is_warm = False

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Collective: the watch learns the process ids of the ranks on this machine, and who owns the run folder."""
        super().on_train_start(trainer, pl_module)
        if trainer.world_size > 1:
            own_node = zlib.crc32(platform.node().encode())
            ranks = gather_ranks(trainer, torch.tensor([own_node, os.getpid(), self.run_lock.token])).tolist()
            self.watch.first_failure.local_peers = {
                rank: pid for rank, (node, pid, _) in enumerate(ranks) if node == own_node and pid != os.getpid()
            }
            self.watch.first_failure.check_owner = RunLock(self.watch.run_dir, ranks[0][2]).check  # rank 0 has the lock
        self.times.end("data and processes")
        gc.collect()
        gc.disable()

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """The micro-batch is there."""
        if self._is_warm:
            self.watch.enter("step", trainer.global_step)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """What follows is the wait for the next micro-batch."""
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if self._is_warm:
            self.watch.enter("data", trainer.global_step)

    def on_optimizer_step(self, trainer: pl.Trainer, module: TrainedModule, step: int) -> None:
        """Collects cycles of the step, and from time to time older ones."""
        if not self._is_warm:
            self.times.end("first optimizer step")
            log.info(self.times.sentence())
        self._is_warm = True
        gc.collect(1 if step % FULL_COLLECTION_EVERY else 2)  # generations

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """What follows is the end of pending saves and of the loggers."""
        self.watch.enter("save", trainer.global_step)
        gc.enable()

    def on_exception(self, *_: Any) -> None:
        """The collector runs again."""
        gc.enable()
