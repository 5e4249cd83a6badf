"""The one place that tells optimizer steps from micro-batches."""

from typing import Any

import pytorch_lightning as pl

from sd_training.training.base_module import TrainedModule


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
