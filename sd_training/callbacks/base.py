"""The base of all callbacks: one call per optimizer step, the run's clock, and the state that callbacks share.

Rules for a callback:

- The list in `build/run.py` is the order in which callbacks act. One that changes weights, optimizer state or averages
  acts before `NumericGuard`. One that may fail without changing them acts after it, and before `Save` if it has state.
- All ranks call it. They all call a collective, or none does. Only rank 0 writes files (`trainer.is_global_zero`).
- A parameter may be distributed over ranks: read weights by `strategy_of(trainer).sharding`.
- Reading the value of a tensor makes the host wait for the device, so do it every N steps (`is_due`, which is also true
  at the last step and at a stop). Losses are in `module.last_micro_batch` in `on_train_batch_end`.
- Reduce over ranks with `gather_ranks`; the strategy's `cpu_group` is reserved for saves.
- `state_dict` becomes part of every checkpoint: numbers, text, tensors, and dicts, lists and tuples of these. Only rank
  0's is stored, and every rank loads it; reduce first, in `on_save_checkpoint`, where collectives are allowed.
- Its `section` is where its time is booked (`Ledger` in `training.py`).
- Append rows with `MetricRows` (`callbacks/metrics.py`), which handles resume, full disks and the run lock.
"""

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytorch_lightning as pl
from PIL import Image
from torch import Tensor

from sd_training.training import Section, TrainedModule
from sd_training.watchdog import HangWatch


class OptimizerStepCallback(pl.Callback):
    """Calls `on_optimizer_step` once per optimizer step, however many micro-batches it took. A subclass with an
    `on_train_start` or `on_train_batch_end` also calls this class's method."""

    section: ClassVar[Section] = "other"
    """What its time is booked as."""
    _last_step: int = 0

    # Lightning calls every hook of every callback, also those that do nothing; what is None it passes over.
    on_train_batch_start: Any = None
    on_before_zero_grad: Any = None
    on_before_backward: Any = None
    on_after_backward: Any = None
    on_before_optimizer_step: Any = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """A resumed run starts counting where it stopped."""
        pl_module.ledger.enter(self.section)
        self._last_step = trainer.global_step

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Lightning's hook, once per micro-batch."""
        if (step := trainer.global_step) == self._last_step:
            return
        self._last_step = step
        pl_module.ledger.enter(self.section)
        self.on_optimizer_step(trainer, pl_module, step)

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


@dataclass
class RunState:
    """The only mutable state that callbacks share. Each field has one writer, named in its description.

    Steps are optimizer steps completed in this start of the run; -1: none yet.
    """

    watch: HangWatch | None = None
    """Limits the time of saves, validations and pictures."""
    save_requested: bool = False
    """`Preemption`: all ranks save after this step, beside the steps at which a save is due."""
    is_consistent: bool = False
    """`NumericGuard`, `Save`: whether weights, optimizer and averages all are as after the last optimizer step."""
    last_save_step: int = -1
    """`Save`: the last save that was begun, whether it failed or not; the same on all ranks."""
    last_save_end_s: float = field(default_factory=time.monotonic)
    """`Save`: when that returned to training [s of `time.monotonic`]; before the first save, the start."""
    longest_save_s: float = 0.0
    """`Save`: the longest save so far, from its beginning until it was sealed and exported; 0: none yet."""
    metrics: dict[str, float] = field(default_factory=dict)
    """`Metrics`: the newest row."""
    validation_loss: tuple[int, float] | None = None
    """`Validation`: step and loss of the newest one, of the weights that are exported; the same on all ranks."""

    def watched(self, section: str) -> AbstractContextManager[None]:
        """What is done inside belongs to `save` or `validate` of the hang watch."""
        return nullcontext() if self.watch is None else self.watch.inside(section)


def log_picture(trainer: pl.Trainer, name: str, picture: Image.Image, step: int, caption: str = "") -> None:
    """To all loggers."""
    loggers: Any = trainer.loggers  # each a `RunLogger` (build/run.py)
    for logger in loggers:
        logger.log_picture(name, picture, step, caption)


def gather_ranks(trainer: pl.Trainer, tensor: Tensor) -> Tensor:
    """Collective: [ranks, ...] the tensor of every rank, of one shape everywhere, on the CPU."""
    gathered = trainer.strategy.all_gather(tensor.to(trainer.strategy.root_device))
    return gathered.reshape(trainer.world_size, *tensor.shape).cpu()
