"""Optimizers by name."""

from collections.abc import Iterable

import torch
from torch import nn

from sd_training.config.schema import OptimizerConfig


def make_optimizer(
    config: OptimizerConfig, parameters: Iterable[nn.Parameter], *, learning_rate: float, fused: bool
) -> torch.optim.Optimizer:
    """The optimizer that `config` describes.

    Args:
        learning_rate: peak learning rate; the schedule scales it before every step.
        fused: one kernel for all tensors. It also skips a step whose `found_inf` is set, on the device. Not with a
            gradient scaler: the fused kernel unscales by itself, after the gradient was clipped.
    """
    params = config.params
    return torch.optim.AdamW(
        parameters,
        lr=learning_rate,
        betas=(params.beta1, params.beta2),
        eps=params.epsilon,
        weight_decay=params.weight_decay,
        fused=fused,
    )
