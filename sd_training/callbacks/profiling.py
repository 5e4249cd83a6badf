"""`logging.profile_steps`: torch's profiler over some optimizer steps, on rank 0."""

from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from torch.profiler import ProfilerActivity, profile

from sd_training.callbacks.base import OptimizerStepCallback
from sd_training.checkpoint.folder import replace_text
from sd_training.config.plan import counted
from sd_training.log import get_logger
from sd_training.training import TrainedModule

log = get_logger(__name__)

FOLDER = "profile"
"""In the run folder: `steps_A-B.json`, a trace for chrome://tracing or ui.perfetto.dev, and `steps_A-B.txt`."""
_ROWS = 100


class Profile(OptimizerStepCallback):
    """Writes a trace and a table of the operations that took longest, by time on the device where there is one. A
    profiled step is slower than others, on the host above all. What cannot be written is lost; the run continues.

    Args:
        run_dir: the run folder.
        first, last: optimizer steps, counted from 1; of a run that stops or resumes in between, those that it does.
    """

    section = "logging"

    def __init__(self, run_dir: Path, first: int, last: int) -> None:
        self.folder, self.first, self.last = run_dir / FOLDER, first, last
        self._profiler: profile | None = None
        self._begin = first

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Where the first step is the next one, or a run resumes after it."""
        super().on_train_start(trainer, pl_module)
        if self.first - 1 <= trainer.global_step < self.last:
            self._start(trainer, trainer.global_step + 1)

    def on_optimizer_step(self, trainer: pl.Trainer, module: TrainedModule, step: int) -> None:
        """Starts before the first step, and writes after the last one."""
        if self._profiler is not None:
            if self.is_due(trainer, step, self.last):  # after the last one, or where the run ends before it
                self._write(step)
        elif step == self.first - 1:
            self._start(trainer, step + 1)

    def on_exception(self, *_: object) -> None:
        """The profiler must not outlive the run."""
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None

    def _start(self, trainer: pl.Trainer, step: int) -> None:
        if trainer.is_global_zero:
            has_gpu = trainer.strategy.root_device.type == "cuda"
            self._begin = step
            self._profiler = profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if has_gpu else [])])
            self._profiler.start()

    def _write(self, step: int) -> None:
        profiler, self._profiler = self._profiler, None
        assert profiler is not None, "is checked by the caller"
        profiler.stop()
        trace, table = (self.folder / f"steps_{self._begin}-{step}{suffix}" for suffix in (".json", ".txt"))
        is_on_gpu = ProfilerActivity.CUDA in profiler.activities
        order = "self_device_time_total" if is_on_gpu else "self_cpu_time_total"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            replace_text(table, profiler.key_averages().table(sort_by=order, row_limit=_ROWS) + "\n")
            profiler.export_chrome_trace(str(trace))
        except (OSError, RuntimeError) as error:
            log.error(f"the profile in {self.folder} cannot be written: {error}")
        else:
            log.info(f"profile of {counted(step - self._begin + 1, 'optimizer step')}: {trace} and {table.name}")
