"""A run whose processes meet an exception after step 5; started by torchrun in tests.

python -m tests.integration.dying_run RANKS OPTION=VALUE …

RANKS: those that meet it, such as 0,1.
"""

import os
import sys
from typing import Any

import pytorch_lightning as pl
import torch

from tests.integration.training import prepare


class Defect(pl.Callback):
    """Raises in the processes that it is for."""

    def __init__(self, ranks: str) -> None:
        self.is_mine = os.environ["RANK"] in ranks.split(",")

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if self.is_mine and trainer.global_step == 5:
            raise RuntimeError("a defect")


def main() -> None:
    run = prepare(sys.argv[2:])
    run.trainer.callbacks.insert(0, Defect(sys.argv[1]))  # type: ignore[attr-defined]
    run.trainer.fit(run.module, datamodule=run.data)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
