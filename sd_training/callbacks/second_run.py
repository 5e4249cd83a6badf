"""Resumes a checkpoint of a run in a process beside it, by the run's own `config.yaml`: one optimizer step, a save, an
export. What happens there is what happens after a crash; only the folder is another one.
"""

import csv
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sd_training.checkpoint.durable import make_empty_folder, remove_quietly
from sd_training.checkpoint.seal import folder_name
from sd_training.config.batch_plan import BatchPlan
from sd_training.config.one_device import ON_ONE_DEVICE
from sd_training.exit_status import STOPPED

NAME = "rehearsal"
"""Folder in the run folder; it is there while the process works, and keeps its log when that went wrong."""
_PROJECT = Path(__file__).resolve().parents[2]
_LAUNCHERS = ("SLURM", "TORCHELASTIC_", "GROUP_", "ROLE_", "MASTER_", "PMI", "OMPI_")
_LAUNCHED = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "SD_TRAINING_STEP_FILE"}
_ENDED_WELL = (0, STOPPED)
_POLL_S = 0.2


@dataclass(frozen=True)
class SecondRun:
    """How the process is started.

    Args:
        run_dir: of the run that it resumes; both use its folder, on one machine.
        accelerator: Lightning's name of the device kind.
        batch: of the run; one process takes the same samples per step by accumulating more.
        limit_s: it is killed when it has not ended by then [s].
        is_stopping: whether the run was asked to stop; then the process is killed at once.
    """

    run_dir: Path
    accelerator: str
    batch: BatchPlan
    limit_s: float
    is_stopping: Callable[[], bool] = bool

    @property
    def home(self) -> Path:
        """Its run folder."""
        return self.run_dir / NAME

    def loss_after(self, step: int) -> float:
        """The mean loss of the optimizer step after a checkpoint, as its `metrics.csv` has it.

        Args:
            step: optimizer steps of a sealed checkpoint of the run.

        Raises:
            RuntimeError: it did not come to an end; says why. Its log is kept.
        """
        make_empty_folder(self.home)
        shutil.copytree(
            self.run_dir / "checkpoints" / folder_name(step),
            self.home / "checkpoints" / folder_name(step),
            copy_function=_link,
        )
        try:
            self._run()
            loss = self._loss(step + 1)
        except BaseException:
            for path in self.home.iterdir():
                if path != self._log:
                    remove_quietly(path)
            raise
        remove_quietly(self.home)
        return loss

    def words(self) -> list[str]:
        """Its options. It stops after one optimizer step because its time is up; the length of the run stays, as the
        learning rate follows from it."""
        one_device: Sequence[str] = ()
        if self.batch.processes * self.batch.sharing > 1:
            accumulation = self.batch.accumulation * self.batch.processes
            one_device = (*ON_ONE_DEVICE, f"system.gradient_accumulation={accumulation}")
        return [
            f"config={self.run_dir / 'config.yaml'}",
            *one_device,
            f"trainer.accelerator={self.accelerator}",
            f"experiment.log_dir={self.run_dir}",
            f"experiment.name={NAME}",
            "experiment.requeue=true",
            "experiment.max_hours=1e-6",
            "experiment.eval_caption_file=null",
            "sampling.every=0",
            "checkpoint.rehearse=false",
            "checkpoint.asynchronous=false",
            "checkpoint.mirror=null",
            "logging.every=1",
            "logging.progress_bar=false",
            "wandb.mode=disabled",
        ]

    @property
    def _log(self) -> Path:
        return self.home / "log.txt"

    def _run(self) -> None:
        with self._log.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "train", *self.words()],
                env=_environment(os.environ),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            problem = self._wait(process)
        if problem:
            raise RuntimeError(f"{problem}; see {self._log}")

    def _wait(self, process: subprocess.Popen[bytes]) -> str:
        """Empty where it ended well."""
        end_s = time.monotonic() + self.limit_s
        while process.poll() is None:
            if self.is_stopping() or time.monotonic() > end_s:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                return "the run was asked to stop meanwhile" if self.is_stopping() else f"took over {self.limit_s:g} s"
            time.sleep(_POLL_S)
        if process.returncode in _ENDED_WELL:
            return ""
        said = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
        return f"ended with status {process.returncode}: {' '.join(said)}"

    def _loss(self, step: int) -> float:
        with (self.home / "metrics.csv").open(newline="", encoding="utf-8") as stream:
            losses = [row["loss"] for row in csv.DictReader(stream) if row["optimizer_step"] == str(step)]
        if not losses:
            raise RuntimeError(f"did not take optimizer step {step:,}; see {self._log}")
        single: float = struct.unpack("f", struct.pack("f", float(losses[-1])))[0]  # the digits are those of fp32
        return single


def _environment(own: Mapping[str, str]) -> dict[str, str]:
    """Without what a launcher told this process; the program is found from any folder."""
    kept = {name: value for name, value in own.items() if name not in _LAUNCHED and not name.startswith(_LAUNCHERS)}
    path = os.pathsep.join(filter(None, (str(_PROJECT), own.get("PYTHONPATH"))))
    return kept | {"PYTHONPATH": path}


def _link(source: str, target: str) -> None:
    """A sealed file never changes, so both folders can share it where the file system lets them."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
