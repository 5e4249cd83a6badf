"""A run of the trainer that writes down, line by line, what it does and when; started by `fork_server.py`.

`marks_RANK.jsonl` in the folder of WATCH_DIR gets, each with `at_s` [s] of the system's monotonic clock, with the
process as `pid` and with how often SLURM has started this job before as `start`:
{"do": "step", "step": 3, "samples": [[position, sample id, digest of its draws], …]}  a micro-batch of that step begins
{"do": "save", "step": 4}     a save begins
{"do": "saved", "step": 4}    its checkpoint is sealed
{"do": "save done", "step": 4}  the export and the rotation after it are done, too
With WATCH_STEP_S every micro-batch takes so much longer [s]. With WATCH_HOLD=STEP:FILE[,STEP:FILE…] the first start of
a job waits before that step until there is such a file.
"""

import hashlib
import json
import os
import runpy
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch

from sd_training.build import run as building
from sd_training.callbacks import save as saving
from sd_training.checkpoint.folder import step_of
from sd_training.types import PixelBatch

_HOLDS_S = 300
"""A trial that went wrong ends after this."""


class Marks:
    """Appends lines to this rank's file; a line is one write, so that a kill leaves no half of one.

    Args:
        folder: of the file.
    """

    def __init__(self, folder: Path) -> None:
        rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
        self.who = {"start": int(os.environ.get("SLURM_RESTART_COUNT", "0")), "pid": os.getpid()}
        self._file = os.open(folder / f"marks_{rank}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, do: str, step: int, **more: Any) -> None:
        """One line."""
        line = json.dumps({"do": do, "step": step, "at_s": time.monotonic(), **self.who, **more})
        os.write(self._file, f"{line}\n".encode())


class Watch(pl.Callback):
    """Notes every micro-batch."""

    def __init__(self, marks: Marks) -> None:
        self.marks = marks

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: PixelBatch, batch_idx: int) -> None:
        """Which samples with which draws."""
        positions, ids = batch.positions.tolist(), batch.sample_ids.tolist()
        draws = [_digest(batch, i) for i in range(len(positions))]
        self.marks.write("step", trainer.global_step, samples=list(zip(positions, ids, draws, strict=True)))
        time.sleep(float(os.environ.get("WATCH_STEP_S", "0")))
        if self.marks.who["start"] == 0:
            _hold(trainer.global_step, os.environ.get("WATCH_HOLD", ""))


def _hold(step: int, holds: str) -> None:
    """Until there is the file that is named for this step."""
    files = [file for at, _, file in (hold.partition(":") for hold in holds.split(",")) if at == str(step)]
    end_s = time.monotonic() + _HOLDS_S
    while not all(map(os.path.exists, files)) and time.monotonic() < end_s:
        time.sleep(0.02)


def _digest(batch: PixelBatch, index: int) -> str:
    """Of one sample's random numbers."""
    draws = (batch.noise, batch.posterior_noise, batch.timestep_draw)
    return hashlib.sha256(b"".join(draw[index].numpy().tobytes() for draw in draws)).hexdigest()[:16]


def watch_saves(marks: Marks, owner: Any, step_of_call: Callable[[Any], int], saves: type[Any], method: str) -> None:
    """Marks around every save.

    Args:
        owner: its `save_checkpoint` writes a checkpoint, or returns what is left to do for it.
        step_of_call: the optimizer step, from that function's first argument.
        saves: its `method` saves when it is due, and exports and rotates afterwards.
    """
    save, when_due = owner.save_checkpoint, getattr(saves, method)
    begun: list[int] = []

    def marked_save(first: Any, *arguments: Any, **named: Any) -> Any:
        step = step_of_call(first)
        begun.append(step)
        marks.write("save", step)
        rest = save(first, *arguments, **named)

        def marked_rest() -> None:
            if rest is not None:
                rest()
            marks.write("saved", step)

        return marked_rest if rest is not None else marked_rest()

    def marked_when_due(self: Any, *arguments: Any, **named: Any) -> None:
        when_due(self, *arguments, **named)
        while begun:
            marks.write("save done", begun.pop())

    owner.save_checkpoint = marked_save
    setattr(saves, method, marked_when_due)


def begin() -> Marks:
    """What a child of the fork server does first: its own folder for temporary files, one thread."""
    tempfile.tempdir = None
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has it ignored where it starts in the background
    torch.set_num_threads(1)
    return Marks(Path(os.environ["WATCH_DIR"]))


def train(words: list[str]) -> None:
    """`python train.py` with these words."""
    marks, build_run = begin(), building.build_run
    watch_saves(marks, saving, step_of, saving.Save, "on_optimizer_step")

    def build_watched(*given: Any) -> building.Run:
        run = build_run(*given)
        callbacks: list[pl.Callback] = run.trainer.callbacks  # type: ignore[attr-defined]
        callbacks.append(Watch(marks))
        return run

    building.build_run = build_watched  # type: ignore[assignment]
    sys.argv = ["train.py", *words]
    runpy.run_module("train", run_name="__main__")


if __name__ == "__main__":
    train(sys.argv[1:])
