"""Runs the trainer inside the test process, and reads what it left."""

import csv
import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from torch import Tensor, distributed

from sd_training.build.plan import make_plan
from sd_training.build.run import Run, build_run
from sd_training.checkpoint.save import open_checkpoint
from sd_training.config.load import load_config
from tests.faults.fork_server import shared_server
from tests.faults.tiny_run import ONE_MACHINE, TORCHRUN, run_as_torchrun

ROOT = Path(__file__).parents[2]


class Interrupted(BaseException):
    """Stands for a crash at a chosen moment; no exception that a run saves before it dies of."""


class CrashAfter(pl.Callback):
    """Raises after so many micro-batches of this process."""

    def __init__(self, micro_batches: int) -> None:
        self.left = micro_batches

    def on_train_batch_end(self, *_: Any) -> None:
        self.left -= 1
        if self.left == 0:
            raise Interrupted


class AtStep(pl.Callback):
    """Does something before the micro-batch after `step` optimizer steps."""

    def __init__(self, step: int, act: Callable[[], Any]) -> None:
        self.step, self.act = step, act

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            self.act()


def options(run_dir: Path, pipeline_dir: Path, shards_dir: Path, **changes: Any) -> list[str]:
    """Overrides of a small fp32 diffusion run in `run_dir`; keyword names use `__` for dots."""
    values = {
        "experiment.log_dir": run_dir.parent,
        "experiment.name": run_dir.name,
        "experiment.num_examples_to_see": 64,
        "experiment.save_every": 4,
        "system.batch_size": 8,
        "system.workers": 0,
        "model.pretrained": pipeline_dir,
        "model.mixed_precision": "no",
        "model.use_ema": True,
        "optimizer.params.learning_rate": 0.001,
        "lr_scheduler.params.warmup_length": 3,
        "dataset.params.path": shards_dir,
        "dataset.params.resolution": 16,
        "dataset.params.crop": "random",
        "dataset.params.flip_prob": 0.5,
        "logging.every": 1,
        "logging.progress_bar": False,
    }
    values |= {name.replace("__", "."): value for name, value in changes.items()}
    return [f"{name}={value}" for name, value in values.items()]


def prepare(argv: list[str]) -> Run:
    """A built run."""
    return build_run(make_plan(load_config(argv)))


def train(argv: list[str], *callbacks: pl.Callback) -> Run:
    """Fit to the end, or to a callback's exception."""
    run = prepare(argv)
    run.trainer.callbacks.extend(callbacks)  # type: ignore[attr-defined]
    try:
        run.trainer.fit(run.module, datamodule=run.data)
    finally:
        if distributed.is_initialized() and distributed.get_world_size() == 1:  # FSDP, or a mesh of one process
            distributed.destroy_process_group()
    return run


def train_in_processes(argv: list[str], processes: int, module: str = "train", status: int = 0) -> str:
    """The same in several processes; returns their output.

    Args:
        module: run as `python -m` would.
        status: 0 when all have to succeed, 1 when one has to fail.
    """
    handle, name = tempfile.mkstemp(suffix=".log")
    os.close(handle)
    log = Path(name)
    statuses = run_as_torchrun([module, *argv], log, processes)
    output = log.read_text(encoding="utf-8", errors="replace")
    log.unlink()
    assert int(any(statuses)) == status, f"{statuses}\n{output}"
    return output


def train_until_killed(argv: list[str], processes: int, step: int) -> None:
    """The same; all of them end by SIGKILL after so many optimizer steps."""
    words = [",".join(map(str, range(processes))), f"kill@{step}", *argv]
    with tempfile.NamedTemporaryFile("r", suffix=".log", encoding="utf-8", errors="replace") as log:
        statuses = run_as_torchrun(["tests.integration.dying_run", *words], Path(log.name), processes)
        assert -signal.SIGKILL in statuses, f"{statuses}\n{log.read()}"


def torchrun(argv: list[str], processes: int, module: str = "train", status: int = 0) -> str:
    """`torchrun -m train`, or another module, which has to end with this status; returns its output."""
    with tempfile.NamedTemporaryFile("r", suffix=".log", encoding="utf-8", errors="replace") as log:
        words = ["--nproc_per_node", str(processes), *ONE_MACHINE, "-m", module, *argv]
        ended = shared_server().start(TORCHRUN, words, Path(log.name), os.environ).wait(900)
        output = log.read()
    assert ended == status, output
    return output


def metrics(run_dir: Path) -> list[dict[str, str]]:
    """Rows of metrics.csv."""
    with (run_dir / "metrics.csv").open(newline="") as stream:
        return list(csv.DictReader(stream))


def losses(run_dir: Path) -> list[float]:
    """Loss per logged row."""
    return [float(row["loss"]) for row in metrics(run_dir)]


def checkpoint_tensors(run_dir: Path, step: int) -> dict[str, Tensor]:
    """Weights, EMA and optimizer of a checkpoint by part and name, whichever process wrote them."""
    stored = open_checkpoint(run_dir / "checkpoints" / f"step={step}").parts
    return {f"{part}:{name}": tensor for part, tensors in stored.items() for name, tensor in tensors.items()}
