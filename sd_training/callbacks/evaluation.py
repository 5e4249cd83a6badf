"""`evaluation.every`: a process beside the run that evaluates what it exports, `scripts/evaluate.py RUN --watch`.

Neither waits for the other or ends it. The process reads exports and checkpoints from the run folder and writes only
`evaluation/`, `evaluation.csv` and `tensorboard/evaluation/`. It ends when the last export is evaluated.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytorch_lightning as pl

from sd_training.log import get_logger

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
class Evaluation(pl.Callback):
    """Starts the process when training starts. Where it cannot be started, the run goes on without it."""

    run_dir: Path
    device: str
    """`evaluation.device`."""

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        """Rank 0, once the run folder has its configuration. A run that is resumed starts another process, which waits
        for the one before."""
        if not trainer.is_global_zero:
            return
        is_cpu, nice = self.device == "cpu", shutil.which("nice")
        command = [sys.executable, str(_SCRIPT), str(self.run_dir.resolve()), "--watch", "--beside", str(os.getpid())]
        environment = {name: value for name, value in os.environ.items() if not name.startswith(_OF_LAUNCHERS)}
        environment["CUDA_VISIBLE_DEVICES"] = "" if is_cpu else self.device
        path = self.run_dir / LOG
        try:
            with path.open("ab") as output:
                process = subprocess.Popen(
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
        log.info(f"evaluation: process {process.pid} on {self.device} writes evaluation.csv and {path}")
