"""`evaluation.every`: a process beside the run that evaluates what it exports, `scripts/evaluate.py RUN --watch`.

Neither waits for the other or ends it. The process reads exports and checkpoints from the run folder and writes only
`evaluation/`, `evaluation.csv` and `tensorboard/evaluation/`; the run sends new rows to W&B, which has one writer. It
ends when the last export is evaluated.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytorch_lightning as pl

from sd_training.callbacks.base import OptimizerStepCallback
from sd_training.errors import DataError
from sd_training.evaluation.measure import ROWS, read_rows, write_rows
from sd_training.log import get_logger
from sd_training.training import TrainedModule

log = get_logger(__name__)

LOG = "evaluation.log"
"""In the run folder: what the process prints."""
_SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "evaluate.py"
_OF_LAUNCHERS = (
    *("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "NODE_RANK", "MASTER_", "TORCHELASTIC_", "TORCH_NCCL_"),
    *("SLURM_", "PMI", "SD_TRAINING_"),
)
"""Begin variables of the environment that would make the process one of the run's ranks."""


@dataclass(eq=False)
class Evaluation(OptimizerStepCallback):
    """Starts the process when training starts. Where it cannot be started, the run goes on without it."""

    section = "logging"

    run_dir: Path
    device: str
    """`evaluation.device`."""
    log_every: int
    """Optimizer steps between looks at what has been measured."""
    _logged: set[tuple[int, str, float]] = field(default_factory=set, init=False)
    """Optimizer step, metric with the kind of weights, value."""
    _read_at_ns: int = field(default=0, init=False)
    """When `evaluation.csv` was written, as it was last read."""
    _process: "subprocess.Popen[bytes] | None" = field(default=None, init=False)
    """Until it has ended."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Rank 0, once the run folder has its configuration. A run that is resumed starts another process, which waits
        for the one before."""
        super().on_train_start(trainer, pl_module)
        if not trainer.is_global_zero:
            return
        try:
            if (self.run_dir / ROWS).is_file():  # what a run has gone back behind will be measured again
                write_rows(self.run_dir / ROWS, [], last_step=trainer.global_step)
        except (OSError, DataError) as error:
            log.warning(f"evaluation.every: {error}")
        is_cpu, nice = self.device == "cpu", shutil.which("nice")
        is_numbered = self.device.isdecimal() and "CUDA_VISIBLE_DEVICES" not in os.environ
        if is_numbered and trainer.strategy.root_device.type == "cuda" and int(self.device) < trainer.num_devices:
            log.warning(f"evaluation.device: GPU {self.device} trains as well; give another, or fewer trainer.devices")
        command = [sys.executable, str(_SCRIPT), str(self.run_dir.resolve()), "--watch", "--beside", str(os.getpid())]
        command += ["--device", "cpu" if is_cpu else "cuda"]
        environment = {name: value for name, value in os.environ.items() if not name.startswith(_OF_LAUNCHERS)}
        environment["CUDA_VISIBLE_DEVICES"] = "" if is_cpu else self.device
        path = self.run_dir / LOG
        try:
            with path.open("ab") as output:
                self._process = subprocess.Popen(
                    [nice, "-n", "19", *command] if is_cpu and nice else command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C and the signals of a launcher are for the run
                )
        except OSError as error:
            log.error(f"evaluation.every: the process cannot be started, and the run goes on without it: {error}")
            return
        log.info(f"evaluation: process {self._process.pid} on {self.device} writes evaluation.csv and {path}")

    def on_optimizer_step(self, trainer: pl.Trainer, module: TrainedModule, step: int) -> None:
        """Rank 0: what this start has not logged yet, each value under the step that was measured."""
        if trainer.is_global_zero and self.is_due(trainer, step, self.log_every):
            self._log(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """What has come since the last logged step."""
        if trainer.is_global_zero:
            self._log(trainer)

    def _log(self, trainer: pl.Trainer) -> None:
        if self._process is not None and (status := self._process.poll()) is not None:
            self._process, how = None, f"ended with status {status}; {self.run_dir / LOG} has its output"
            log.warning(f"evaluation: the process {how}. The run goes on without evaluations until it is started again")
        try:
            if (written_ns := (self.run_dir / ROWS).stat().st_mtime_ns) == self._read_at_ns:
                return
            rows = [row for row in read_rows(self.run_dir / ROWS) if row["value"]]
            measured = {(int(row["step"]), f"{row['metric']}_{row['weights']}", float(row["value"])) for row in rows}
        except (OSError, ValueError, DataError):  # the next look finds what can be read then
            return
        self._read_at_ns = written_ns
        for number, name, value in sorted(measured - self._logged):
            for logger in trainer.loggers:
                if logger.name != "TensorBoard":
                    logger.log_metrics({name: value}, number)
        self._logged |= measured
