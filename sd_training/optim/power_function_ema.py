"""Power-function averages of weights, and the weights that rebuild one of them from snapshots of others.

Karras et al. 2024 (EDM2), "Analyzing and Improving the Training Dynamics of Diffusion Models", arXiv:2312.02696,
section 3 and appendix C. After t optimizer steps the average is the integral of the weights θ(τ) over the profile

    p(τ) = (γ + 1) τ^γ / t^(γ + 1),   0 ≤ τ ≤ t.

Its width is a constant share of the training, `sigma_rel` = standard deviation of p / t; the larger the exponent γ, the
shorter the average. The profile is 0 at τ = 0, so the initial weights are forgotten without a warm-up.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MAX_SIGMA_REL = 12**-0.5
"""0.2887: γ = 0, the plain mean of the whole training. Wider would mean more weight on the beginning."""
LARGE_RESIDUAL = 0.02
"""Relative residual above which a reconstruction is rough. Below it, averages of weights on a random walk came within
1e-3 of those that were kept directly (tests/unit/optim/test_power_function_ema.py)."""
_CUT_OFF = 1e-14
"""Directions of the Gram matrix with a smaller share than this are rounding errors (of float64)."""

Vector = NDArray[np.float64]
Matrix = NDArray[np.float64]


@dataclass(frozen=True)
class Profile:
    """How an average weighs the training that lies behind it."""

    step: int
    """Optimizer steps completed when it was taken, t."""
    gamma: float
    """Exponent γ ≥ 0."""


@dataclass(frozen=True)
class Reconstruction:
    """The best sum of known averages for a wanted one."""

    weights: Vector
    """[N] a weight for every known average; they sum to 1."""
    residual: float
    """Norm of (wanted profile - profile of the sum), divided by the norm of the wanted one; 0 is exact."""


def is_sigma_rel(value: float) -> bool:
    """Whether an average of this width exists: above 0, at most `MAX_SIGMA_REL`."""
    return 0.0 < value <= MAX_SIGMA_REL


def gamma_of(sigma_rel: float) -> float:
    """Exponent of the average with this width (algorithm 2): the largest root of
    γ³ + 7 γ² + (16 - σ⁻²) γ + 12 - σ⁻² = 0.

    Raises:
        ValueError: there is no such average.
    """
    if not is_sigma_rel(sigma_rel):
        raise ValueError(f"sigma_rel is {sigma_rel}; it must be above 0 and at most {MAX_SIGMA_REL:.4f}")
    inverse_square = float(sigma_rel) ** -2
    roots = np.roots([1.0, 7.0, 16.0 - inverse_square, 12.0 - inverse_square])
    return max(0.0, float(roots.real.max()))


def decay(step: int, gamma: float, update_every: int = 1) -> float:
    """Decay β of the update after `step` optimizer steps; average ← β · average + (1 - β) · weights.

    A snapshot of the weights stands for the k = `update_every` steps up to it, hence it gets the profile's integral
    over them, 1 - ((t - k) / t)^(γ + 1), and what is left of the older ones is

        β = (1 - k / t)^(γ + 1),

    the paper's β(t) for k = 1. The products telescope: whatever k is, the weights of step j have the profile's
    integral from j - k to j in the average at t, to the last bit of the arithmetic.

    Args:
        step: optimizer steps completed, t; a multiple of `update_every`.
        gamma: exponent.
        update_every: optimizer steps between updates, k.

    Returns:
        In [0, 1); 0 at the first update, where the average starts as the weights.
    """
    if step <= update_every:
        return 0.0
    return math.exp((gamma + 1) * math.log1p(-update_every / step))


def inner_products(rows: Sequence[Profile], columns: Sequence[Profile]) -> Matrix:
    """[R, C] integrals of the products of two profiles over the training (algorithm 3).

    With s the shorter and t the longer training, (γs + 1) (γt + 1) (s / t)^γt / ((γs + γt + 1) t). The power is taken
    through logarithms of float64, so a large γ gives 0, not an overflow.
    """
    row_steps, row_gammas = np.array([(row.step, row.gamma) for row in rows], dtype=np.float64).T[..., None]
    steps, gammas = np.array([(column.step, column.gamma) for column in columns], dtype=np.float64).T
    log_ratio = np.log(row_steps) - np.log(steps)
    log_power = np.where(log_ratio < 0, gammas * log_ratio, -row_gammas * log_ratio)
    longer = np.maximum(row_steps, steps)
    return (row_gammas + 1) * (gammas + 1) * np.exp(log_power) / ((row_gammas + gammas + 1) * longer)


def reconstruct(known: Sequence[Profile], wanted: Profile) -> Reconstruction:
    """Weights whose sum of known averages is nearest to the wanted one: least squares over profiles (algorithm 3).

    The weights sum to 1, so that a weight of the network that never moved comes back exactly. (The paper's solution
    has a sum near 1; its code divides by the sum afterwards. Here the sum is a condition of the fit.)

    Args:
        known: profiles of the snapshots; at least one.
        wanted: the profile to rebuild.
    """
    norms = np.sqrt(np.diagonal(inner_products(known, known)))
    norm = math.sqrt(inner_products([wanted], [wanted])[0, 0])
    # Profiles of length 1, weighted by y = x · norms / norm: all entries lie in [0, 1] whatever t and γ are.
    gram = inner_products(known, known) / np.outer(norms, norms)
    match = inner_products(known, [wanted])[:, 0] / (norms * norm)
    sums = norm / norms  # Σ x = sums · y = 1
    free, shift = np.linalg.lstsq(gram, np.stack([match, sums], axis=1), rcond=_CUT_OFF)[0].T
    scaled = free + shift * (1.0 - sums @ free) / (sums @ shift)
    residual_square = 1.0 - 2.0 * scaled @ match + scaled @ gram @ scaled
    return Reconstruction(scaled * sums, math.sqrt(max(0.0, float(residual_square))))
