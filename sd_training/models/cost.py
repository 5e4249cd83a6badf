"""What a family costs: parameters and floating-point operations, counted without weights."""

from collections.abc import Mapping

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from sd_training.models.family import Family
from sd_training.types import Conditioning, NoisedBatch


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
    noised, conditioning = blank_batch(family, height, width, 1, device)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        family.predict(family.denoiser, noised, conditioning)
    return int(counter.get_total_flops())


def blank_batch(
    family: Family, height: int, width: int, count: int, device: torch.device
) -> tuple[NoisedBatch, Conditioning]:
    """What the denoiser is given for `count` pictures of this size [pixels]; of the right shapes, without meaning."""
    latents = torch.zeros(count, *family.latent_grid().shape(height, width), device=device)
    per_sample = torch.zeros(count, device=device)
    noised = NoisedBatch(latents, per_sample, latents, per_sample, per_sample, per_sample)
    return noised, family.blank_conditioning(count, device)
