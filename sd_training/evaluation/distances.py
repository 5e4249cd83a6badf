"""Distances between a set of drawn pictures and a set of real ones, from their features alone, with intervals.

Pure functions in float64, on the device of the features: `drawn` [N, D], `real` [M, D]. torchmetrics has the Fréchet
distance and KID too; its KID takes random subsets of equal size from the global generator, and neither gives the value
of a resample without computing the rest again.

A resample is a row of `counts` [R, N]: how often each drawn picture occurs in it. Row 0 is the set itself.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from scipy.special import stdtrit
from scipy.stats import binomtest
from torch import Tensor

RESAMPLES = 100
"""Of an interval."""
_SEED = 0
_COVERAGE = 0.95
_ROWS = 1024
"""Of a matrix of kernels or distances that is computed at once."""
_EXTRAPOLATION_SIZES, _EXTRAPOLATIONS = 15, 20
_NEIGHBOURS = 3
_CMMD_SIGMA, _CMMD_SCALE = 10.0, 1000.0

Kernel = Callable[[Tensor, Tensor], Tensor]
"""[A, D], [B, D] → [A, B]."""


@dataclass(frozen=True)
class Estimate:
    """A value and its 95 % interval."""

    value: float
    low: float
    high: float


def fid(drawn: Tensor, real: Tensor) -> Estimate:
    """Fréchet distance of the normal distributions of the features (Heusel et al. 2017, arXiv:1706.08500, eq. 6). It is
    biased: the fewer pictures, the larger."""
    return _centred_interval(_frechet(drawn.double(), real.double(), _resamples(drawn)))


def fid_infinity(drawn: Tensor, real: Tensor) -> Estimate:
    """The Fréchet distance of infinitely many drawn pictures, by a line through those of subsets over 1 / size (Chong &
    Forsyth 2020, arXiv:1911.07023, section 3); the bias of a finite `real` stays. The interval is Student's, of the
    deviation over lines through resamples."""
    count, generator = len(drawn), np.random.default_rng(_SEED)
    sizes = np.unique(np.linspace(max(count // 10, 2), count, _EXTRAPOLATION_SIZES).astype(int))
    if len(sizes) < 3:
        raise ValueError(f"{count} pictures are too few for a line; draw 4 or more")
    ends = []
    for pictures in (range(count), *generator.integers(count, size=(_EXTRAPOLATIONS, count))):
        subsets = [np.bincount(generator.permutation(pictures)[:size], minlength=count) for size in sizes]
        counts = torch.from_numpy(np.stack(subsets)).to(drawn.device, torch.float64)
        distances = _frechet(drawn.double(), real.double(), counts).cpu().numpy()
        ends.append(float(np.polynomial.Polynomial.fit(1 / sizes, distances, 1)(0.0)))
    half = float(stdtrit(_EXTRAPOLATIONS - 1, (1 + _COVERAGE) / 2)) * float(np.std(ends[1:], ddof=1))
    return Estimate(ends[0], ends[0] - half, ends[0] + half)


def kid(drawn: Tensor, real: Tensor) -> Estimate:
    """Squared maximum mean discrepancy with the kernel (x · y / D + 1)³, unbiased (Bińkowski et al. 2018,
    arXiv:1801.01401, eq. 3); of all pictures, not of subsets of 1,000."""

    def kernel(x: Tensor, y: Tensor) -> Tensor:
        return (x @ y.T / x.shape[1] + 1) ** 3

    return _centred_interval(_squared_mmd(drawn.double(), real.double(), _resamples(drawn), kernel))


def cmmd(drawn: Tensor, real: Tensor) -> Estimate:
    """1,000 times the squared maximum mean discrepancy with a Gaussian kernel of σ = 10 on CLIP embeddings of length 1,
    unbiased (Jayasumana et al. 2024, arXiv:2401.09603, section 4). Their code keeps the diagonal of the kernel matrices
    and so gives more: by 1,000 · (1 - mean kernel) / N for each set."""

    def kernel(x: Tensor, y: Tensor) -> Tensor:
        squares = x.square().sum(1)[:, None] + y.square().sum(1) - 2 * x @ y.T
        return torch.exp(squares / (-2 * _CMMD_SIGMA**2))

    drawn, real = (torch.nn.functional.normalize(each.double(), dim=1) for each in (drawn, real))
    return _centred_interval(_CMMD_SCALE * _squared_mmd(drawn, real, _resamples(drawn), kernel))


def precision(drawn: Tensor, real: Tensor) -> Estimate:
    """Share of the drawn pictures that lie in one of the balls around real ones, each as large as the distance to the
    third neighbour (Kynkäänniemi et al. 2019, arXiv:1904.06991, eq. 1). The interval is that of a share (Wilson 1927,
    eq. 4), given the balls.

    Raises:
        ValueError: there are too few real pictures.
    """
    inside = _in_balls(drawn.double(), real.double())
    share = binomtest(int(inside.sum()), len(inside))
    return Estimate(share.statistic, *share.proportion_ci(_COVERAGE, "wilson"))


def recall(drawn: Tensor, real: Tensor) -> Estimate:
    """Share of the real pictures that lie in balls around drawn ones (the same, eq. 2); the interval is over real
    pictures."""
    return precision(real, drawn)


def clip_score(images: Tensor, texts: Tensor) -> Estimate:
    """100 · max(cosine, 0) of each picture's CLIP embedding and its prompt's, averaged (Hessel et al. 2021,
    arXiv:2104.08718, eq. 1, with 100 instead of 2.5)."""
    scores = 100 * torch.nn.functional.cosine_similarity(images.double(), texts.double()).clamp(min=0)
    return _centred_interval(_resamples(scores) @ scores / len(scores))


def _resamples(features: Tensor) -> Tensor:
    """[1 + RESAMPLES, N] the set itself, and sets drawn from it with replacement (Efron 1979); always the same ones."""
    count = len(features)
    drawn = np.random.default_rng(_SEED).multinomial(count, np.full(count, 1 / count), RESAMPLES)
    return torch.from_numpy(np.concatenate([np.ones((1, count)), drawn])).to(features.device)


def _centred_interval(values: Tensor) -> Estimate:
    """Of the value and those of resamples. A resample has fewer different pictures, which raises a distance; so what
    counts is how far the resamples lie from their own mean."""
    value, spread = values[0], values[1:] - values[1:].mean()
    edges = spread.new_tensor([(1 - _COVERAGE) / 2, (1 + _COVERAGE) / 2])
    low, high = (value + torch.quantile(spread, edges)).tolist()
    return Estimate(float(value), low, high)


def _frechet(drawn: Tensor, real: Tensor, counts: Tensor) -> Tensor:
    """[R]. The trace of the root of Σ₁Σ₂ is that of Rᵀ Σ₁ R, with R Rᵀ = Σ₂: one symmetric problem per resample.
    Eigenvalues that are rounding errors would add their square roots, so they are left out."""

    def significant(eigenvalues: Tensor) -> Tensor:
        return eigenvalues > eigenvalues.max() * len(eigenvalues) * torch.finfo(torch.float64).eps

    drawn, covariance = drawn - real.mean(0), torch.atleast_2d(real.T.cov())
    eigenvalues, vectors = torch.linalg.eigh(covariance)
    kept = significant(eigenvalues)
    products = drawn @ (vectors[:, kept] * eigenvalues[kept].sqrt())  # of X R: squares come later, for less rounding
    distances = []
    for weights in counts:
        chosen = weights.nonzero()[:, 0]
        total, scale = weights.sum(), weights[chosen, None].sqrt()
        mean = weights @ drawn / total
        own = ((drawn[chosen] - mean) * scale).square().sum() / (total - 1)
        part = (products[chosen] - weights @ products / total) * scale
        gram = part @ part.T if len(part) < part.shape[1] else part.T @ part  # the same eigenvalues; the smaller one
        shared = torch.linalg.eigvalsh(gram / (total - 1))
        cross = shared[significant(shared)].sqrt().sum()
        distances.append(mean.square().sum() + own + covariance.trace() - 2 * cross)
    return torch.stack(distances)


def _squared_mmd(drawn: Tensor, real: Tensor, counts: Tensor, kernel: Kernel) -> Tensor:
    """[R] unbiased (Gretton et al. 2012, eq. 3), in memory for `_ROWS` rows of the kernel matrices."""
    parts = zip(counts.split(_ROWS, dim=1), drawn.split(_ROWS), strict=True)
    cross = sum(weights @ kernel(part, real).sum(1) for weights, part in parts) / (counts.sum(1) * len(real))
    return _mean_of_pairs(drawn, counts, kernel) + _mean_of_pairs(real, torch.ones_like(real.T[:1]), kernel) - 2 * cross


def _mean_of_pairs(features: Tensor, counts: Tensor, kernel: Kernel) -> Tensor:
    """[R] mean of the kernel over the pairs of different pictures of each resample; a picture that occurs twice makes
    no pair with itself."""
    total, parts = torch.zeros_like(counts[:, 0]), zip(counts.split(_ROWS, dim=1), features.split(_ROWS), strict=True)
    for number, (weights, part) in enumerate(parts):
        values = kernel(features, part)
        total += (weights * (counts @ values)).sum(1) - weights.square() @ values.diagonal(-number * _ROWS)
    return total / (counts.sum(1).square() - counts.square().sum(1))


def _in_balls(points: Tensor, centres: Tensor) -> Tensor:
    """[P] whether each point lies in some ball around a centre that reaches to the centre's third neighbour."""
    if len(centres) <= _NEIGHBOURS:
        raise ValueError(f"{len(centres)} pictures have no third neighbour; give {_NEIGHBOURS + 1} or more")
    rows = (torch.cdist(part, centres) for part in centres.split(_ROWS))
    radii = torch.cat([distances.kthvalue(_NEIGHBOURS + 1).values for distances in rows])  # the nearest is itself
    return torch.cat([(torch.cdist(part, centres) <= radii).any(1) for part in points.split(_ROWS)])
