"""The learned uncertainty of each noise level (Karras et al. 2024, arXiv:2312.02696, section 2.2 and eq. 21).

Trained beside the denoiser, it ends at the logarithm of the expected loss, so that every noise level contributes
equally; nothing of it is exported.
"""

import math

import torch
from torch import Tensor, nn

CHANNELS = 128
_TINY = 1e-6


class LevelUncertainty(nn.Module):
    """u(σ): random Fourier features of ¼ ln(σ / α) and one linear map, which starts at 0.

    Args:
        seed: of the features, which are never trained.
    """

    frequencies: Tensor
    phases: Tensor

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.register_buffer("frequencies", 2 * math.pi * torch.randn(CHANNELS, generator=generator))
        self.register_buffer("phases", 2 * math.pi * torch.rand(CHANNELS, generator=generator))
        self.weight = nn.Parameter(torch.zeros(CHANNELS))

    def forward(self, signal: Tensor, sigma: Tensor) -> Tensor:
        """[B] u from α and σ [B]."""
        ratio = sigma.float().clamp(min=_TINY) / signal.float().clamp(min=_TINY)
        features = math.sqrt(2) * torch.cos(torch.outer(ratio.log() / 4, self.frequencies) + self.phases)
        return features @ self.weight / math.sqrt(CHANNELS)
