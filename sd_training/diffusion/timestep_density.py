"""How often each noise level is trained: uniform draws u in [0, 1) → time, each the inverse of a distribution function.

The draws come from the loader, one per sample, so a density never touches a generator. Time is what
`NoiseSchedule.levels` takes: in [0, 1] from clean to pure noise, or ln σ.
"""

import math

import numpy as np
import torch
from scipy.special import betaincinv
from torch import Tensor

_OPEN = 2.0**-25
"""Draws are kept this far from 0 and 1, where normal quantiles are infinite."""
_QUANTILES = 8193


def _normal_quantile(draw: Tensor) -> Tensor:
    return torch.special.ndtri(draw.clamp(_OPEN, 1.0 - _OPEN))


def logit_normal(draw: Tensor, mean: float, std: float) -> Tensor:
    """sigmoid(m + s Φ⁻¹(u)) (Esser et al. 2024, arXiv:2403.03206, section 3.1)."""
    return torch.sigmoid(mean + std * _normal_quantile(draw))


def log_normal(draw: Tensor, mean: float, std: float) -> Tensor:
    """ln σ = P_mean + P_std Φ⁻¹(u) (Karras et al. 2022, arXiv:2206.00364, table 1)."""
    return mean + std * _normal_quantile(draw)


def mode(draw: Tensor, scale: float) -> Tensor:
    """1 - u - s (cos²(πu/2) - 1 + u) (Esser et al. 2024, section 3.1)."""
    return 1.0 - draw - scale * ((math.pi / 2 * draw).cos().square() - 1.0 + draw)


def cosmap(draw: Tensor) -> Tensor:
    """1 - 1 / (tan(πu/2) + 1) (Esser et al. 2024, section 3.1)."""
    return 1.0 - 1.0 / ((math.pi / 2 * draw).tan() + 1.0)


def beta_quantiles(alpha: float, beta: float) -> Tensor:
    """[n] float32 quantiles of Beta(α, β) at equal steps of probability, for `from_quantiles`."""
    return torch.from_numpy(betaincinv(alpha, beta, np.linspace(0.0, 1.0, _QUANTILES))).float()


def from_quantiles(draw: Tensor, quantiles: Tensor) -> Tensor:
    """The inverse of a distribution function given at equal steps, linear in between."""
    place = draw * (len(quantiles) - 1)
    below = place.long().clamp_(max=len(quantiles) - 2)
    return torch.lerp(quantiles[below], quantiles[below + 1], place - below)


def biased(draw: Tensor, low: float, high: float, multiplier: float) -> Tensor:
    """Uniform over [0, 1], but `multiplier` times as dense between `low` and `high`."""
    inside = multiplier * (high - low)
    total = 1.0 - (high - low) + inside
    mass = draw * total
    within = low + (mass - low) / multiplier
    after = high + (mass - low - inside)
    return torch.where(mass < low, mass, torch.where(mass < low + inside, within, after)).clamp(0.0, 1.0)


def shifted(time: Tensor, factor: float) -> Tensor:
    """aσ / (1 + (a - 1)σ) (Esser et al. 2024, eq. 23)."""
    return factor * time / (1.0 + (factor - 1.0) * time)


def shift_for_tokens(num_tokens: int, base_tokens: int, max_tokens: int, base_shift: float, max_shift: float) -> float:
    """a = e^μ with μ linear in the image tokens, as FLUX and diffusers' `calculate_shift`."""
    slope = (max_shift - base_shift) / (max_tokens - base_tokens)
    return math.exp(base_shift + slope * (num_tokens - base_tokens))
