"""`python train.py` with processes that end on their own after step 5; started by torchrun in tests.

python -m tests.integration.dying_run RANKS HOW OPTION=VALUE …

RANKS: those that end, such as 0,1. HOW: `raise` raises an exception in a callback, `exit` calls `os._exit(3)` there,
`backward` raises inside the backward pass, `taken` raises when another start has the run folder; `kill@3` is the end
by SIGKILL, after step 3.
"""

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

from sd_training.log import quiet_libraries

quiet_libraries()  # before they are imported, as train.py does

import pytorch_lightning as pl
import torch

import train
from sd_training.build import run as building
from sd_training.build.plan import Plan
from sd_training.checkpoint.folder import CLAIM
from sd_training.cli import run_cli
from sd_training.parallel import strategies


class Defect(pl.Callback):
    """Ends the processes that it is for."""

    def __init__(self, ranks: str, how: str, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.is_mine = os.environ.get("RANK", "0") in ranks.split(",")
        self.how, _, step = how.partition("@")
        self.step = int(step or 5)

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
        if not self.is_mine or trainer.global_step != self.step:
            return
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "exit":
            os._exit(3)
        if self.how == "taken":
            (self.run_dir / CLAIM).write_text('{"token": 1}')
        if self.how in ("raise", "taken"):
            raise RuntimeError("a defect")
        *_, last = (part for part in module.modules() if isinstance(part, torch.nn.Conv2d))
        last.register_full_backward_hook(self._fail)

    def _fail(self, *_: Any) -> None:
        raise RuntimeError("a defect")


def main() -> None:
    build_run, (ranks, how) = building.build_run, sys.argv[1:3]
    if "," not in ranks:
        strategies.AGREE_TIMEOUT = timedelta(seconds=5)  # nobody will agree

    def build_dying(plan: Plan, *given: Any) -> building.Run:
        run = build_run(plan, *given)
        run.trainer.callbacks.insert(0, Defect(ranks, how, plan.run_dir))  # type: ignore[attr-defined]
        return run

    building.build_run = build_dying
    del sys.argv[1:3]
    train.main()


if __name__ == "__main__":
    torch.set_num_threads(1)
    run_cli(main)
