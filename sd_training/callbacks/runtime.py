"""Python's garbage collector at work between optimizer steps, in the thread that trains, and at no other time.

Left alone it runs in whatever thread allocates. A collection in a logger's thread, while autograd worked without
Python's lock, is the likeliest reason for a run that once died here: the first backward pass found DDP's weak reference
to itself empty, as Lightning issue 20706 tells of other trainers. On many devices the pauses also fall together.

Says how many graphs torch.compile made, and when it makes more although no new size of pictures came.
"""

import gc
from typing import Any

import pytorch_lightning as pl

from sd_training.callbacks.base import OptimizerStepCallback
from sd_training.config.plan import counted
from sd_training.log import get_logger
from sd_training.models.execution import graphs_compiled
from sd_training.training.base_module import TrainedModule
from sd_training.types import PixelBatch

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


log = get_logger(__name__)


class CompileWatch(OptimizerStepCallback):
    """Looks at the number of graphs every `every` optimizer steps.

    Shapes are static, so a new graph means a new size, and after all sizes were seen there is none. One that is made
    nevertheless is made again and again as a rule, and costs minutes each time.
    """

    def __init__(self, every: int) -> None:
        self.every = every
        self._shapes: set[tuple[int, ...]] = set()
        self._has_new_shape = False
        self._graphs = self._graphs_before = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Graphs of before do not count."""
        super().on_train_start(trainer, pl_module)
        self._graphs = self._graphs_before = graphs_compiled()

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: PixelBatch, *_: Any
    ) -> None:
        """Remembers the shape of the batch."""
        shape = tuple(batch.pixels.shape)
        self._has_new_shape |= shape not in self._shapes
        self._shapes.add(shape)

    def on_optimizer_step(self, trainer: pl.Trainer, module: TrainedModule, step: int) -> None:
        """One line when there are new graphs: a plain one, or a warning."""
        if not self.is_due(trainer, step, self.every):
            return
        graphs = graphs_compiled()
        if graphs > self._graphs:
            self._tell(step, graphs - self._graphs)
        self._graphs, self._has_new_shape = graphs, False

    def _tell(self, step: int, new: int) -> None:
        total, sizes = self._graphs + new - self._graphs_before, len(self._shapes)
        if self._has_new_shape:
            log.info(
                f"trainer.compile: {counted(total, 'graph')} for {counted(sizes, 'size')} of pictures after "
                f"{counted(step, 'step')}"
            )
            return
        log.warning(
            f"trainer.compile: {new} new graph(s) by step {step:,} although no new size of pictures came ({total} for "
            f"{sizes} size(s)); each costs time. TORCH_LOGS=recompiles tells why, trainer.compile=false goes without"
        )
