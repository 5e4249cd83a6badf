"""Images seen, images/s, time left and loss: a bar on a terminal, lines now and then anywhere else."""

import os
import sys
import time
from datetime import timedelta
from typing import Any

import pytorch_lightning as pl
from tqdm import tqdm

from sd_training.callbacks.base import OptimizerStepCallback, RunState
from sd_training.config.plan import counted
from sd_training.log import FOR_FILE, get_logger, write_lines_by
from sd_training.training import TrainedModule

log = get_logger(__name__)

_LINE_EVERY_S = 30.0
"""Between two lines where there is no terminal, and in `train.log`."""


class ProgressBar(OptimizerStepCallback):
    """Over the whole run, counted in images.

    Args:
        state: where the loss comes from; the bar itself never waits for the device.
        global_batch: images per optimizer step, over all processes.
        num_steps: optimizer steps of the run.
    """

    def __init__(self, state: RunState, global_batch: int, num_steps: int) -> None:
        self.state, self.global_batch, self.num_steps = state, global_batch, num_steps
        self._bar: tqdm | None = None
        self._started = self._line = (0.0, 0)
        """Time [s] and images of the start, and of the newest line."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """A resumed run's bar starts where it stopped."""
        super().on_train_start(trainer, pl_module)
        done = trainer.global_step * self.global_batch
        self._started = self._line = (time.monotonic(), done)
        # On a terminal without a size tqdm shows nothing.
        if trainer.is_global_zero and sys.stderr.isatty() and min(os.get_terminal_size(sys.stderr.fileno())):
            total = self.num_steps * self.global_batch
            self._bar = tqdm(total=total, initial=done, unit="img", desc="training", mininterval=1, dynamic_ncols=True)
            write_lines_by(lambda line: tqdm.write(line, file=sys.stderr))

    def on_optimizer_step(self, trainer: pl.Trainer, module: TrainedModule, step: int) -> None:
        """Advance by the images of the step."""
        if not trainer.is_global_zero:
            return
        done, now_s = step * self.global_batch, time.monotonic()
        loss = f", loss {self.state.metrics['loss']:.4f}" if self.state.metrics else ""
        if self._bar is not None:
            self._bar.set_postfix_str(f"step {step}{loss}", refresh=False)
            self._bar.update(done - self._bar.n)
        if now_s >= self._line[0] + _LINE_EVERY_S or step == self.num_steps:
            # Of the time since the last line: saves and pictures slow down the line they belong to only.
            per_s = (done - self._line[1]) / max(now_s - self._line[0], 1e-9)
            self._line = (now_s, done)
            s_per_image = (now_s - self._started[0]) / max(done - self._started[1], 1)
            left = timedelta(seconds=round(s_per_image * (self.num_steps * self.global_batch - done)))
            progress = f"step {step:,} of {self.num_steps:,}: {counted(done, 'image')}, {per_s:.1f} images/s"
            log.info(f"{progress}, {left} left{loss}", extra=None if self._bar is None else FOR_FILE)

    def on_exception(self, *_: object) -> None:
        """The error is printed below the bar."""
        self._close()

    def teardown(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        """Leave the finished bar on the terminal."""
        self._close()

    def _close(self) -> None:
        if self._bar is not None:
            write_lines_by(None)
            self._bar.close()
            self._bar = None
