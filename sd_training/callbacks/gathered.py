"""What every rank has, on every rank."""

from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, distributed


def gathered(trainer: pl.Trainer, tensor: Tensor) -> Tensor:
    """Collective: [ranks, ...] the tensor of every rank, of one shape everywhere, on the CPU."""
    if trainer.world_size == 1:
        return tensor[None].cpu()
    strategy: Any = trainer.strategy
    own = tensor.to(strategy.root_device).contiguous()
    everyone = [torch.empty_like(own) for _ in range(trainer.world_size)]
    distributed.all_gather(everyone, own)
    return torch.stack(everyone).cpu()
