"""Images seen, images/s, time left and loss on the terminal of the first process."""

import sys
from collections.abc import Callable

import pytorch_lightning as pl
from tqdm import tqdm

from sd_training.callbacks.every_step import OptimizerStepCallback
from sd_training.callbacks.metrics import Metrics
from sd_training.training.base_module import TrainedModule


class ProgressBar(OptimizerStepCallback):
    """One bar over the whole run, counted in images.

    Args:
        metrics: where the loss comes from; the bar itself never waits for the device.
        images_before: how many images the steps before a step take.
        num_steps: optimizer steps of the run.
    """

    def __init__(self, metrics: Metrics, images_before: Callable[[int], int], num_steps: int) -> None:
        self.metrics = metrics
        self.images_before = images_before
        self.num_steps = num_steps
        self._bar: tqdm | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """A resumed run's bar starts where it stopped."""
        super().on_train_start(trainer, pl_module)
        if trainer.is_global_zero:
            self._bar = tqdm(
                total=self.images_before(self.num_steps),
                initial=self.images_before(trainer.global_step),
                unit="img",
                desc="training",
                # A log file gets a line now and then, a terminal a moving bar.
                mininterval=1.0 if sys.stderr.isatty() else 30.0,
                dynamic_ncols=True,
            )

    def on_optimizer_step(self, trainer: pl.Trainer, module: TrainedModule, step: int) -> None:
        """Advance by the images of the step."""
        if self._bar is None:
            return
        if "loss" in self.metrics.latest:
            self._bar.set_postfix_str(f"step {step}, loss {self.metrics.latest['loss']:.4f}", refresh=False)
        self._bar.update(self.images_before(step) - self._bar.n)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Leave the finished bar on the terminal."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
