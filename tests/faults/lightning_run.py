"""The bar beside the trainer: a plain LightningModule saved by Lightning's own ModelCheckpoint, killed the same way."""

import os
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.faults.watched_run import begin, watch_saves


class Plain(pl.LightningModule):
    """One layer with as many numbers as asked for, trained by AdamW."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """A loss that every weight takes part in."""
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """As the trainer's default."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def train(words: list[str]) -> None:
    """Goes on from the newest checkpoint in the folder. Words: folder, width, steps, steps between saves."""
    marks = begin()
    folder, width, steps, every = Path(words[0]), *map(int, words[1:])
    watch_saves(marks, pl.Trainer, lambda trainer: trainer.global_step, ModelCheckpoint, "on_train_batch_end")
    torch.manual_seed(0)
    saving = ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=every, save_top_k=-1)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=steps,
        callbacks=[saving],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(TensorDataset(torch.randn(8 * steps, width)), batch_size=8)
    saved = sorted(folder.glob("step=*.ckpt"), key=os.path.getmtime)
    whole = [path for path in saved if not problem_of(path)]
    trainer.fit(Plain(width), loader, ckpt_path=whole[-1] if whole else None)


def problem_of(path: Path) -> Any:
    """Why torch cannot read a file, or null."""
    try:
        torch.load(path, weights_only=True, mmap=True)
    except Exception as error:  # whatever it is: a run could not go on from this file
        return error
    return None
