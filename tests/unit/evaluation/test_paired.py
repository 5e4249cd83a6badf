"""Intervals cover, equal weights are seldom called different, and the number of images that would decide is right."""

import numpy as np
import pytest
from scipy import stats

from sd_training.evaluation.paired import ALPHA, POWER, Vector, compare, half_width, holm

IMAGES, LEVELS, RUNS = 200, 8, 2000


def loss_differences(effect: float, runs: int = RUNS) -> tuple[Vector, float]:
    """[runs, IMAGES, LEVELS + 1] of simulated comparisons, with the mean over the levels last, and their expectation.

    A difference is proportional to how difficult the image is, all levels share a skewed part, and each has a heavy
    tail. Between saves of a real run (digits, 797 images) skewness is at most 1 and excess kurtosis at most 10.
    """
    rng = np.random.default_rng(0)
    shared = rng.exponential(size=(runs, IMAGES, 1)) - 1.0
    own = 0.7 * rng.standard_t(5, size=(runs, IMAGES, LEVELS))
    found = rng.lognormal(sigma=0.5, size=(runs, IMAGES, 1)) * (effect + shared + own)
    return np.concatenate((found, found.mean(axis=2, keepdims=True)), axis=2), effect * float(np.exp(0.5**2 / 2))


@pytest.mark.parametrize("effect", [0.0, 0.2])
def test_intervals_cover_a_known_difference(effect: float) -> None:
    differences, expected = loss_differences(effect)
    whole = differences[..., -1].ravel()
    assert stats.skew(whole) > 2 and stats.kurtosis(whole) > 10
    found = compare(differences)
    covered = ((found.low <= expected) & (expected <= found.high)).mean(axis=0)
    assert np.abs(covered - 0.95).max() <= 0.03


def test_equal_weights_are_called_different_in_at_most_5_percent() -> None:
    found = compare(loss_differences(0.0)[0])
    assert (found.p.min(axis=1) <= ALPHA).mean() > 0.15  # without a correction
    assert 0.01 < found.is_different.any(axis=1).mean() <= 0.05


def test_p_and_interval_are_those_of_the_t_test() -> None:
    differences = loss_differences(0.1, runs=1)[0][0]
    found, expected = compare(differences), stats.ttest_1samp(differences, 0.0)
    low, high = expected.confidence_interval(1.0 - ALPHA)
    assert np.allclose(found.p, expected.pvalue, rtol=1e-9, atol=0.0)
    assert np.allclose([found.low, found.high], [low, high], rtol=1e-9, atol=1e-12)
    assert ((found.p <= ALPHA) == (found.low > 0) | (found.high < 0)).all()
    std = differences.std(axis=0, ddof=1)
    assert np.allclose(half_width(std, len(differences)), (high - low) / 2, rtol=1e-9, atol=0.0)


def test_holm() -> None:
    assert np.allclose(holm(np.array([0.01, 0.04, 0.03, 0.005])), [0.03, 0.06, 0.06, 0.02])
    assert np.allclose(holm(np.array([[0.5, 0.9], [0.03, 0.02]])), [[1.0, 1.0], [0.04, 0.04]])


def test_equal_losses_are_no_difference() -> None:
    found = compare(np.zeros((5, 3)))
    assert (found.p == 1.0).all() and not found.is_different.any()
    assert (found.low == 0.0).all() and (found.high == 0.0).all() and np.isinf(found.images_needed).all()


def test_so_many_images_find_the_difference() -> None:
    """By the distribution of t where there is a difference of d standard deviations: noncentral, d √n. The one test of
    three that is decided already leaves 2 for the correction."""
    for effect in (0.02, 0.05, 0.2, 0.4):
        centred = np.random.default_rng(1).normal(size=20)
        centred = (centred - centred.mean()) / centred.std(ddof=1)
        found = compare(np.stack([centred + 5.0, centred + effect, centred], axis=1))
        assert found.is_different.tolist() == [True, False, False]
        count = float(found.images_needed[1])
        limit = stats.t.ppf(1.0 - ALPHA / 2 / 2, count - 1)
        power = 1.0 - stats.nct.cdf(limit, count - 1, effect * np.sqrt(count))
        assert POWER - 1e-3 <= power <= POWER + 0.02
