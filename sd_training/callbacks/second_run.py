"""Resumes a checkpoint of a run in a process beside it, by the run's own `config.yaml`: some optimizer steps, then a
signal, a save, an export. What happens there is what happens after a crash; only the folder is another one.
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
from sd_training.watch.parent import PARENT_VARIABLE

NAME = "rehearsal"
"""Folder in the run folder; it is there while the process works, and keeps its log when that went wrong."""
_PROJECT = Path(__file__).resolve().parents[2]
_LAUNCHERS = ("SLURM", "TORCHELASTIC_", "GROUP_", "ROLE_", "MASTER_", "PMI", "OMPI_")
_LAUNCHED = {
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK"),
    *("SD_TRAINING_STEP_FILE", "SD_TRAINING_STATUS_FILE"),
}
_ENDED_WELL = (0, STOPPED)
_POLL_S = 0.2
_STOP = "stop"
"""File in the folder: a process of the run that did not start the second one must soon stop."""


@dataclass(frozen=True)
class SecondRun:
    """How the process is started.

    Args:
        run_dir: of the run that it resumes; both use its folder, on one machine.
        accelerator: Lightning's name of the device kind.
        batch: of the run; one process takes the same samples per step by accumulating more.
        limit_s: it is killed when it has not ended by then [s].
        is_stopping: whether this process of the run must soon stop; then the second one is killed at once.
        permissions: options that allow what no file can allow, such as reading from commands.
    """

    run_dir: Path
    accelerator: str
    batch: BatchPlan
    limit_s: float
    is_stopping: Callable[[], bool] = bool
    permissions: tuple[str, ...] = ()

    @property
    def home(self) -> Path:
        """Its run folder."""
        return self.run_dir / NAME

    def losses_after(self, step: int, count: int) -> list[float]:
        """The mean losses of the optimizer steps after a checkpoint, as its `metrics.csv` has them.

        Args:
            step: optimizer steps of a sealed checkpoint of the run.
            count: steps to take at least.

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
            self._run(step + count)
            losses = self._losses(step, count)
        except BaseException:
            for path in self.home.iterdir():
                if path != self._log:
                    remove_quietly(path)
            raise
        remove_quietly(self.home)
        return losses

    def pass_on_stop(self) -> None:
        """For the processes that did not start it: a signal to one of them stops the run. The run folder is shared."""
        if self.is_stopping() and self._log.exists():
            with suppress(OSError):
                (self.home / _STOP).touch()

    def _is_unwanted(self) -> bool:
        return self.is_stopping() or (self.home / _STOP).exists()

    def words(self) -> list[str]:
        """Its options. The length of the run stays, as the learning rate follows from it."""
        one_device: Sequence[str] = ("trainer.devices=1", "trainer.num_nodes=1")
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
            "experiment.max_hours=null",
            "experiment.save_every=1000000000",
            "checkpoint.save_every_minutes=null",
            "checkpoint.milestone_every=0",
            *self.permissions,
            "experiment.eval_caption_file=null",
            "sampling.every=0",
            "validation.path=null",
            "checkpoint.best_by=training_loss",
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

    def _run(self, last_step: int) -> None:
        if "," in str(self.run_dir):
            raise RuntimeError(f"cannot be started: config= would take the comma in {self.run_dir} for two files")
        with self._log.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, str(_PROJECT / "train.py"), *self.words()],
                env={**_environment(os.environ), PARENT_VARIABLE: str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            problem = self._wait(process, last_step)
        if problem:
            raise RuntimeError(f"{problem}; see {self._log}")

    def _wait(self, process: subprocess.Popen[bytes], last_step: int) -> str:
        """Empty where it ended well. It is asked to stop when it has taken the steps."""
        # After the last step of the whole run it ends by itself, and a signal would meet a process that is leaving.
        end_s, is_asked = time.monotonic() + self.limit_s, last_step >= self.batch.num_steps
        while process.poll() is None:
            if not is_asked and last_step in self._rows():
                process.terminate()
                is_asked = True
            if (is_unwanted := self._is_unwanted()) or time.monotonic() > end_s:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                return "the run was asked to stop meanwhile" if is_unwanted else f"took over {self.limit_s:g} s"
            time.sleep(_POLL_S)
        if process.returncode in _ENDED_WELL:
            return ""
        said = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
        return f"ended with status {process.returncode}: {' '.join(said)}"

    def _losses(self, step: int, count: int) -> list[float]:
        rows, wanted = self._rows(), range(step + 1, step + 1 + count)
        if missing := [one for one in wanted if one not in rows]:
            raise RuntimeError(f"did not take optimizer step {missing[0]:,}; see {self._log}")
        # The digits are those of fp32.
        return [struct.unpack("f", struct.pack("f", float(rows[one])))[0] for one in wanted]

    def _rows(self) -> dict[int, str]:
        """Optimizer step → loss, as far as it has come."""
        path = self.home / "metrics.csv"
        if not path.exists():
            return {}
        with path.open(newline="", encoding="utf-8") as stream:
            rows = [row for row in csv.DictReader(stream) if (row["optimizer_step"] or "").isdigit() and row["loss"]]
        return {int(row["optimizer_step"]): row["loss"] for row in rows}


def _environment(own: Mapping[str, str]) -> dict[str, str]:
    """Without what a launcher told this process."""
    return {name: value for name, value in own.items() if name not in _LAUNCHED and not name.startswith(_LAUNCHERS)}


def _link(source: str, target: str) -> None:
    """A sealed file never changes, so both folders can share it where the file system lets them."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
