"""What a family costs: parameters and floating-point operations, counted without weights."""

from collections.abc import Mapping

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from sd_training.models.family import Family
from sd_training.types import NoisedBatch


def parameter_counts(networks: Mapping[str, nn.Module]) -> dict[str, int]:
    """Network → parameters."""
    return {name: sum(p.numel() for p in network.parameters()) for name, network in networks.items()}


def forward_flops(family: Family, height: int, width: int) -> int:
    """FLOPs of the denoiser's forward pass for one picture; a multiply-add counts as two.

    Args:
        family: on the meta device, where nothing is computed.
        height, width: [pixels].
    """
    device = torch.device("meta")
    latents = torch.zeros(1, *family.latent_grid().shape(height, width), device=device)
    one = torch.zeros(1, device=device)
    noised = NoisedBatch(latents, one, latents, one, one, one)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        family.predict(family.denoiser, noised, family.blank_conditioning(1, device))
    return int(counter.get_total_flops())
