"""Distances against implementations written in another way: a matrix root by scipy, sums over pairs in loops."""

import itertools
import math

import numpy as np
import pytest
import scipy.linalg
import scipy.stats
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchmetrics.image.fid import FrechetInceptionDistance
from torchmetrics.image.kid import KernelInceptionDistance

from sd_training.evaluation import distances
from sd_training.evaluation.distances import Estimate, cmmd, fid, fid_infinity, kid, precision, recall

AGREEMENT = 1e-6
"""Relative."""


def feature_sets(drawn: int = 60, real: int = 75, width: int = 12, shift: float = 0.4) -> tuple[Tensor, Tensor]:
    """Correlated, not normal, of different scale; float32 as networks give them."""
    generator = np.random.default_rng(7)
    mixing = generator.standard_normal((width, width))
    first = generator.standard_normal((drawn, width)) @ mixing
    second = generator.exponential(size=(real, width)) @ mixing.T * 0.8 + shift
    return torch.from_numpy(first).float(), torch.from_numpy(second).float()


def arrays(*tensors: Tensor) -> list[NDArray[np.float64]]:
    return [tensor.double().numpy() for tensor in tensors]


def frechet_by_roots(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    cov_x, cov_y = (np.cov(each, rowvar=False) for each in (x, y))
    root = scipy.linalg.sqrtm(cov_x @ cov_y).real
    return float(((x.mean(0) - y.mean(0)) ** 2).sum() + np.trace(cov_x + cov_y - 2 * root))


def frechet_by_singular_values(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    """The trace of the root of AᵀA BᵀB is the sum of the singular values of A Bᵀ, also with fewer rows than columns."""
    a, b = ((each - each.mean(0)) / math.sqrt(len(each) - 1) for each in (x, y))
    cross = np.linalg.svd(a @ b.T, compute_uv=False).sum()
    return float(((x.mean(0) - y.mean(0)) ** 2).sum() + (a**2).sum() + (b**2).sum() - 2 * cross)


def mmd_by_loops(x: NDArray[np.float64], y: NDArray[np.float64], kernel: object) -> float:
    assert callable(kernel)
    own = 0.0
    for each in (x, y):
        pairs = [kernel(a, b) for a, b in itertools.permutations(each, 2) if (a != b).any()]
        own += math.fsum(pairs) / len(pairs)
    return own - 2 * math.fsum(kernel(a, b) for a in x for b in y) / (len(x) * len(y))


def test_frechet_distance() -> None:
    drawn, real = feature_sets()
    assert fid(drawn, real).value == pytest.approx(frechet_by_roots(*arrays(drawn, real)), rel=AGREEMENT)


def test_frechet_distance_of_fewer_pictures_than_features() -> None:
    drawn, real = feature_sets(drawn=9, real=20, width=30)
    expected = frechet_by_singular_values(*arrays(drawn, real))
    assert fid(drawn, real).value == pytest.approx(expected, rel=AGREEMENT)
    assert fid(real, drawn).value == pytest.approx(expected, rel=AGREEMENT)


def test_frechet_distance_of_a_set_to_itself_is_nothing() -> None:
    drawn, _ = feature_sets()
    assert abs(fid(drawn, drawn).value) < 1e-9


def test_features_that_never_vary() -> None:
    """Corners of the digits are always black."""
    drawn, real = feature_sets()
    drawn[:, 3], real[:, 3], real[:, 5] = 0.0, 0.0, 1.0
    expected = frechet_by_singular_values(*arrays(drawn, real))
    assert fid(drawn, real).value == pytest.approx(expected, rel=AGREEMENT)


def test_torchmetrics_agrees() -> None:
    """Its own distances, of features instead of pictures. Its KID is over random subsets: here one, of all pictures."""
    drawn, real = (each.double() for each in feature_sets(drawn=75, real=75))
    metrics = (FrechetInceptionDistance(Features()), KernelInceptionDistance(Features(), subsets=1, subset_size=75))
    for metric, ours in zip(metrics, (fid, kid), strict=True):
        metric.set_dtype(torch.float64)
        metric.update(real, real=True)
        metric.update(drawn, real=False)
        theirs = metric.compute()
        value = theirs if isinstance(theirs, Tensor) else theirs[0]
        assert ours(drawn, real).value == pytest.approx(float(value), rel=AGREEMENT)


class Features(torch.nn.Module):
    """Takes them for pictures, as torchmetrics wants."""

    num_features = 12

    def forward(self, features: Tensor) -> Tensor:
        return features


def test_kernel_distances(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, real = feature_sets(drawn=23, real=31)
    x, y = arrays(drawn, real)
    expected_kid = mmd_by_loops(x, y, lambda a, b: (float(a @ b) / len(a) + 1) ** 3)
    u, v = (each / np.linalg.norm(each, axis=1, keepdims=True) for each in (x, y))
    expected_cmmd = 1000 * mmd_by_loops(u, v, lambda a, b: math.exp(-float(((a - b) ** 2).sum()) / 200))
    for rows in (1024, 23, 7):  # of a block
        monkeypatch.setattr(distances, "_ROWS", rows)
        assert kid(drawn, real).value == pytest.approx(expected_kid, rel=AGREEMENT)
        assert cmmd(drawn, real).value == pytest.approx(expected_cmmd, rel=AGREEMENT)


def test_a_resample_is_a_set_with_repetitions() -> None:
    """Counts give what the repeated pictures themselves would give, but for pairs of equal pictures."""
    drawn, real = (each.double() for each in feature_sets(drawn=20, real=15))
    counts = torch.from_numpy(np.random.default_rng(1).multinomial(20, np.full(20, 1 / 20), 3)).double()
    repeated = [drawn.repeat_interleave(row.long(), dim=0) for row in counts]
    x_y = [arrays(each, real) for each in repeated]
    frechet = distances._frechet(drawn, real, counts)
    assert frechet.tolist() == pytest.approx([frechet_by_singular_values(*each) for each in x_y], rel=AGREEMENT)
    found = distances._squared_mmd(drawn, real, counts, lambda a, b: (a @ b.T / a.shape[1] + 1) ** 3)
    expected = [mmd_by_loops(*each, lambda a, b: (float(a @ b) / len(a) + 1) ** 3) for each in x_y]
    assert found.tolist() == pytest.approx(expected, rel=AGREEMENT)


def test_precision_and_recall(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distances, "_ROWS", 16)
    drawn, real = feature_sets(drawn=40, real=50, width=3)

    def share(points: NDArray[np.float64], centres: NDArray[np.float64]) -> float:
        inside = 0
        radii = [sorted(float(np.linalg.norm(c - other)) for other in centres)[3] for c in centres]
        for point in points:
            inside += any(np.linalg.norm(point - c) <= radius for c, radius in zip(centres, radii, strict=True))
        return inside / len(points)

    x, y = arrays(drawn, real)
    assert 0 < share(x, y) < 1 and 0 < share(y, x) < 1 and share(x, y) != share(y, x)
    assert (precision(drawn, real).value, recall(drawn, real).value) == (share(x, y), share(y, x))


def test_the_interval_of_a_share() -> None:
    """Where the share is p, the binomial's mean is z standard deviations away from both ends (Wilson's equation)."""
    drawn, real = feature_sets(drawn=40, real=50, width=3)
    found = precision(drawn, real)
    for end in edges(found):
        assert abs(found.value - end) == pytest.approx(scipy.stats.norm.ppf(0.975) * math.sqrt(end * (1 - end) / 40))
    high, low = edges(precision(drawn, drawn))
    assert high == pytest.approx(1) and 0.9 < low < 1


def test_too_few_pictures_for_neighbours() -> None:
    with pytest.raises(ValueError, match="3 pictures"):
        recall(torch.randn(3, 2), torch.randn(5, 2))


def test_clip_score() -> None:
    images = torch.tensor([[1.0, 0.0], [3.0, 4.0], [-1.0, 0.0]])
    texts = torch.tensor([[2.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    assert distances.clip_score(images, texts).value == pytest.approx(100 * (1 + 0.8 + 0) / 3)


def test_extrapolation_removes_the_bias_of_few_pictures() -> None:
    """Two sets of one distribution: the distance is 0 but for the bias, D (D + 1) / 4 N to first order for each set."""
    generator = torch.Generator().manual_seed(0)
    drawn, real = torch.randn(2000, 20, generator=generator), torch.randn(40_000, 20, generator=generator)
    assert fid(drawn, real).value > 0.04
    assert abs(fid_infinity(drawn, real).value) < 0.02
    with pytest.raises(ValueError, match="3 pictures are too few for a line"):
        fid_infinity(drawn[:3], real)


def test_intervals_are_as_wide_as_sets_differ() -> None:
    """The mean width is that of a normal distribution with the standard deviation over independent sets."""
    generator = torch.Generator().manual_seed(3)
    real = torch.randn(400, 4, generator=generator)
    sets = [torch.randn(150, 4, generator=generator) * 1.3 + 0.2 for _ in range(60)]
    for distance in (fid, fid_infinity, kid):
        estimates = [distance(drawn, real) for drawn in (sets[:25] if distance is fid_infinity else sets)]
        deviation = np.std([estimate.value for estimate in estimates], ddof=1)
        width = np.mean([high - low for high, low in map(edges, estimates)])
        assert 0.7 < width / (2 * 1.96 * deviation) < 1.3
        assert all(low < estimate.value < high for estimate in estimates for high, low in [edges(estimate)])


def edges(estimate: Estimate) -> tuple[float, float]:
    return estimate.high, estimate.low


def test_intervals_are_the_same_every_time() -> None:
    drawn, real = feature_sets()
    state = torch.random.get_rng_state()
    assert fid(drawn, real) == fid(drawn, real)
    assert torch.equal(state, torch.random.get_rng_state())
