"""Says how many graphs torch.compile made, and when it makes more although no new size of pictures came."""

from typing import Any

import pytorch_lightning as pl

from sd_training.callbacks.every_step import OptimizerStepCallback
from sd_training.config.batch_plan import counted
from sd_training.models.compilation import graphs_compiled
from sd_training.rank_log import get_logger
from sd_training.training.base_module import TrainedModule
from sd_training.types import PixelBatch

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
