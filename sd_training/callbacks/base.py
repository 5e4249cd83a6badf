"""The one place that tells optimizer steps from micro-batches.

Time spent training, without the time spent saving and drawing, which the hang watch is told of.

What every rank has, on every rank.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, distributed

from sd_training.training.base_module import TrainedModule
from sd_training.watchdog.hang import HangWatch


class OptimizerStepCallback(pl.Callback):
    """Calls `on_optimizer_step` once per optimizer step, however many micro-batches it took."""

    _last_step: int = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """A resumed run starts counting where it stopped."""
        self._last_step = trainer.global_step

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Lightning's hook, once per micro-batch."""
        if trainer.global_step == self._last_step:
            return
        self._last_step = trainer.global_step
        assert isinstance(pl_module, TrainedModule)
        self.on_optimizer_step(trainer, pl_module, trainer.global_step)

    def on_optimizer_step(self, trainer: pl.Trainer, module: TrainedModule, step: int) -> None:
        """Once per optimizer step, after it.

        Args:
            step: optimizer steps completed.
        """
        raise NotImplementedError

    @staticmethod
    def is_due(trainer: pl.Trainer, step: int, every: int) -> bool:
        """Whether something done every `every` optimizer steps, and at the end of the run, is due now; 0 is never.

        A run that was asked to stop ends with this step.
        """
        return every > 0 and (step % every == 0 or step == trainer.max_steps or trainer.should_stop)


class TrainingTimer:
    """Runs from its making; stands still inside `excluded`.

    Args:
        watch: told what is done meanwhile; null: nobody is.
    """

    def __init__(self, watch: HangWatch | None = None) -> None:
        self.watch = watch
        self._start_s = time.perf_counter()
        self._paused_s = 0.0

    @contextmanager
    def excluded(self, section: str) -> Iterator[None]:
        """The time inside does not count.

        Args:
            section: of the hang watch, `save` or `validate`.
        """
        began_s = time.perf_counter()
        try:
            if self.watch is None:
                yield
            else:
                with self.watch.inside(section):
                    yield
        finally:
            self._paused_s += time.perf_counter() - began_s

    def lap_s(self) -> float:
        """Seconds of training since the last lap; starts the next one."""
        now_s = time.perf_counter()
        elapsed_s = now_s - self._start_s - self._paused_s
        self._start_s, self._paused_s = now_s, 0.0
        return max(elapsed_s, 1e-9)


def gather_ranks(trainer: pl.Trainer, tensor: Tensor) -> Tensor:
    """Collective: [ranks, ...] the tensor of every rank, of one shape everywhere, on the CPU."""
    if trainer.world_size == 1:
        return tensor[None].cpu()
    strategy: Any = trainer.strategy
    own = tensor.to(strategy.root_device).contiguous()
    everyone = [torch.empty_like(own) for _ in range(trainer.world_size)]
    distributed.all_gather(everyone, own)
    return torch.stack(everyone).cpu()
