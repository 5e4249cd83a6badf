"""Distribution functions of the timestep densities, in float64, with scipy alone.

Each is written from the published density or from the distribution itself, not from the inverse that is sampled.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
from scipy.stats import norm

from tests.conformance.reference import Array

Cdf = Callable[[Array], Array]


def uniform(t: Array) -> Array:
    """F(t) = t."""
    return np.clip(t, 0, 1)


def logit_normal(mean: float, std: float, t: Array) -> Array:
    """logit t ~ N(m, s²) (Esser et al. 2024, eq. 19)."""
    with np.errstate(divide="ignore"):
        return np.asarray(norm.cdf((np.log(t) - np.log1p(-t) - mean) / std))


def mode(scale: float, t: Array) -> Array:
    """Density |d/dt f⁻¹(t)| of f(u) = 1 - u - s(cos²(πu/2) - 1 + u) (Esser et al. 2024, eq. 20 and 21), tabulated."""
    u = np.linspace(0, 1, 1 << 20)
    f = 1 - u - scale * (np.cos(np.pi / 2 * u) ** 2 - 1 + u)  # falls from 1 to 0
    return 1 - np.interp(t, f[::-1], u[::-1])


def cosmap(t: Array) -> Array:
    """∫ 2 / (π - 2πt + 2πt²) dt (Esser et al. 2024, section 3.1): ½ + (2/π) arctan(2t - 1)."""
    return 0.5 + 2 / np.pi * np.arctan(2 * t - 1)


def log_normal(mean: float, std: float, log_sigma: Array) -> Array:
    """ln σ ~ N(P_mean, P_std²) (Karras et al. 2022, table 1)."""
    return np.asarray(norm.cdf((log_sigma - mean) / std))


def squeezed(low: float, high: float, cdf: Cdf, t: Array) -> Array:
    """F of low + (high - low) t."""
    return cdf(np.clip((t - low) / (high - low), 0, 1))


def shifted(factor: float, cdf: Cdf, t: Array) -> Array:
    """F of aσ / (1 + (a - 1)σ) (Esser et al. 2024, eq. 23): signal-to-noise ratio divided by a²."""
    odds = t / np.maximum(1 - t, 1e-300) / factor  # σ / (1 - σ) is multiplied by a
    return cdf(odds / (1 + odds))


def token_shift(num_tokens: int, base_tokens: int, max_tokens: int, base_shift: float, max_shift: float) -> float:
    """a = e^μ, μ on the line through (base_tokens, base_shift) and (max_tokens, max_shift)."""
    share = (num_tokens - base_tokens) / (max_tokens - base_tokens)
    return float(np.exp((1 - share) * base_shift + share * max_shift))


DENSITIES: dict[str, tuple[dict[str, object], Cdf, float]] = {
    # name → options of timestep_density, distribution function, largest Kolmogorov-Smirnov distance of equally spaced
    # draws. 1/N of 200,000 draws is 5·10⁻⁶; float32 adds 6·10⁻⁸.
    "uniform": ({}, uniform, 1e-5),
    "uniform_part": ({"low": 0.2, "high": 0.7}, partial(squeezed, 0.2, 0.7, uniform), 1e-5),
    "logit_normal": ({"name": "logit_normal"}, partial(logit_normal, 0.0, 1.0), 2e-5),
    "logit_normal_moved": ({"name": "logit_normal", "mean": -0.8, "std": 1.7}, partial(logit_normal, -0.8, 1.7), 2e-5),
    "logit_normal_part": (
        {"name": "logit_normal", "mean": 0.5, "low": 0.1, "high": 0.9},
        partial(squeezed, 0.1, 0.9, partial(logit_normal, 0.5, 1.0)),
        2e-5,
    ),
    "mode": ({"name": "mode"}, partial(mode, 1.29), 2e-5),
    "mode_flat": ({"name": "mode", "mode_scale": 0.0}, uniform, 1e-5),
    "mode_tails": ({"name": "mode", "mode_scale": -0.8}, partial(mode, -0.8), 2e-5),
    "mode_largest": ({"name": "mode", "mode_scale": 1.75}, partial(mode, 1.75), 1e-4),
    "cosmap": ({"name": "cosmap"}, cosmap, 1e-5),
}
