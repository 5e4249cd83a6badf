"""What every rank has, on every rank."""

from typing import Any

import pytorch_lightning as pl
from torch import Tensor


def gathered(trainer: pl.Trainer, tensor: Tensor) -> Tensor:
    """Collective: [ranks, ...] the tensor of every rank, of one shape everywhere, on the CPU."""
    if trainer.world_size == 1:
        return tensor[None].cpu()
    strategy: Any = trainer.strategy
    everyone: Tensor = strategy.all_gather(tensor.to(strategy.root_device))
    return everyone.cpu()
