"""`python train.py` that also writes which samples each rank saw, and can wait at a step until it is sent a signal.

The folder for what is written is in WATCH_DIR. WATCH_HOLD=`step:rank`: before the micro-batch after that many optimizer
steps this rank writes its process id to `held` and waits until a signal was noted; `step:rank:forever` writes it to
`noted` then, and waits on.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

import train
from sd_training.signals import StopSignals

# As `python train.py`: the warning of the time limit is noted before the seconds in which torch is imported.
SIGNALS = StopSignals()
SIGNALS.expect_warning()

import pytorch_lightning as pl

from sd_training.build import run as building
from sd_training.callbacks.preemption import Preemption
from sd_training.cli import run_cli
from tests.integration.record_ids import RecordIds

HOLDS_S = 600
"""A test that went wrong ends after this [s]."""


class Hold(pl.Callback):
    """Waits for a signal once."""

    def __init__(self, folder: Path, when: str) -> None:
        step, rank, *rest = when.split(":")
        self.step, self.rank, self.is_for_ever = int(step), rank, rest == ["forever"]
        self.folder = folder

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step != self.step or self.rank not in (str(trainer.global_rank), "all"):
            return
        (preemption,) = [callback for callback in trainer.callbacks if isinstance(callback, Preemption)]  # type: ignore[attr-defined]
        (self.folder / "held").write_text(str(os.getpid()))
        print(f"rank {trainer.global_rank} waits for a signal after {trainer.global_step} optimizer steps", flush=True)
        end_s = time.monotonic() + HOLDS_S
        signals = preemption.signals
        while not (signals.status or signals.num_saves_asked) and time.monotonic() < end_s:
            time.sleep(0.02)
        if self.is_for_ever:
            (self.folder / "noted").write_text(str(os.getpid()))
            time.sleep(HOLDS_S)


def main() -> None:
    """Trains, watched."""
    folder = Path(os.environ["WATCH_DIR"])
    build_run = building.build_run

    def build_watched(*given: Any) -> building.Run:
        run = build_run(*given)
        run.trainer.callbacks.append(RecordIds(folder))  # type: ignore[attr-defined]
        if os.environ.get("WATCH_HOLD"):
            run.trainer.callbacks.append(Hold(folder, os.environ["WATCH_HOLD"]))  # type: ignore[attr-defined]
        return run

    train.StopSignals = lambda: SIGNALS  # type: ignore[assignment,misc]
    building.build_run = build_watched
    train.main()


if __name__ == "__main__":
    print(f"python {' '.join(sys.argv)}", flush=True)
    run_cli(main)
