"""Power-function averages against the recursion in float64, numerical integrals and averages that were kept."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.integrate import quad

from scripts.posthoc_ema import LARGE_RESIDUAL, Profile, inner_products, reconstruct
from sd_training.callbacks.ema import MAX_SIGMA_REL, gamma_of, track_decay

WIDTHS = [0.001, 0.01, 0.05, 0.1, 0.15, 0.25, MAX_SIGMA_REL]


def density(profile: Profile, moment: float) -> float:
    """The profile at a moment of the training."""
    if not 0 < moment <= profile.step:
        return 0.0
    return (profile.gamma + 1) / profile.step * math.exp(profile.gamma * math.log(moment / profile.step))


def integral(function: Callable[[float], float], ends: tuple[float, ...]) -> float:
    """Piece by piece, because profiles jump at their ends."""
    return sum(quad(function, low, high, epsabs=0, epsrel=1e-10, limit=400)[0] for low, high in pairwise(ends))


@pytest.mark.parametrize("width", WIDTHS)
def test_the_profile_is_as_wide_as_was_asked(width: float) -> None:
    profile = Profile(1000, gamma_of(width))
    ends = (0.0, 900.0, 990.0, 1000.0)
    assert integral(lambda t: density(profile, t), ends) == pytest.approx(1, rel=1e-9)
    mean = integral(lambda t: t * density(profile, t), ends)
    variance = integral(lambda t: (t - mean) ** 2 * density(profile, t), ends)
    assert math.sqrt(variance) / 1000 == pytest.approx(width, rel=1e-8)
    gamma = profile.gamma
    assert math.sqrt((gamma + 1) / (gamma + 3)) / (gamma + 2) == pytest.approx(width, rel=1e-10)


def test_exponents_of_the_paper() -> None:
    assert gamma_of(0.05) == pytest.approx(16.97, abs=0.005)
    assert gamma_of(0.10) == pytest.approx(6.94, abs=0.005)
    assert gamma_of(MAX_SIGMA_REL) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("width", [0.0, -0.1, 0.289, 1.0, math.nan, math.inf])
def test_no_average_is_that_wide(width: float) -> None:
    with pytest.raises(ValueError, match=r"above 0 and at most 0\.2887"):
        gamma_of(width)


def weights_of_steps(num_steps: int, gamma: float, every: int) -> NDArray[np.float64]:
    """[updates] weight of the network's weights at every update in the average, by the recursion."""
    weights = np.zeros(num_steps // every)
    for update in range(num_steps // every):
        beta = track_decay((update + 1) * every, gamma, every)
        weights *= beta
        weights[update] += 1 - beta
    return weights


@pytest.mark.parametrize("every", [1, 3, 10])
@pytest.mark.parametrize("width", [0.02, 0.05, 0.1, 0.25])
def test_the_recursion_gives_the_integral_of_the_profile(width: float, every: int) -> None:
    gamma, num_steps = gamma_of(width), 300
    ends = np.arange(0, num_steps + 1, every, dtype=np.float64)
    expected = np.diff((ends / num_steps) ** (gamma + 1))
    np.testing.assert_allclose(weights_of_steps(num_steps, gamma, every), expected, rtol=1e-10, atol=1e-300)


def test_the_decay_is_that_of_the_paper() -> None:
    assert [track_decay(step, 2.0) for step in (1, 2, 10)] == pytest.approx([0, 1 / 8, 0.9**3], rel=1e-14)
    assert [track_decay(step, 2.0, 4) for step in (4, 8, 40)] == pytest.approx([0, 1 / 8, 0.9**3], rel=1e-14)
    # Rare updates forget as much as frequent ones.
    assert track_decay(40, 5.0, 4) == pytest.approx(
        math.prod(track_decay(step, 5.0) for step in (37, 38, 39, 40)), rel=1e-14
    )
    assert 1 - track_decay(10**9, gamma_of(0.05)) == pytest.approx((gamma_of(0.05) + 1) / 1e9, rel=1e-6)


@pytest.mark.parametrize("steps", [(100, 100), (100, 70), (70, 100), (1_000_000, 999_000), (3, 1000)])
@pytest.mark.parametrize("widths", [(0.05, 0.1), (0.1, 0.05), (0.2, 0.2), (MAX_SIGMA_REL, 0.03)])
def test_inner_products(steps: tuple[int, int], widths: tuple[float, float]) -> None:
    one, other = (Profile(step, gamma_of(width)) for step, width in zip(steps, widths, strict=True))
    low, high = sorted(steps)
    ends = sorted({0.0, 0.5 * low, 0.9 * low, float(low), float(high)})
    expected = integral(lambda t: density(one, t) * density(other, t), tuple(ends))
    assert inner_products([one], [other])[0, 0] == pytest.approx(expected, rel=1e-8)


def test_inner_products_of_many_at_extreme_steps() -> None:
    profiles = [Profile(1, gamma_of(0.001)), Profile(10**12, gamma_of(0.001)), Profile(10**12, 0.0)]
    products = inner_products(profiles, profiles)
    assert np.isfinite(products).all() and np.array_equal(products, products.T)
    assert products[0, 1] == 0.0  # as small as float64 gets
    assert products[2, 2] == pytest.approx(1e-12, rel=1e-12)
    assert inner_products(profiles[:2], profiles).shape == (2, 3)


def tracks(widths: tuple[float, ...], every: int, num_steps: int) -> list[Profile]:
    return [Profile(step, gamma_of(w)) for step in range(every, num_steps + 1, every) for w in widths]


def test_a_kept_average_is_itself() -> None:
    known = tracks((0.05, 0.1), 50, 1000)
    for index in (0, 7, len(known) - 1):
        found = reconstruct(known, known[index])
        np.testing.assert_allclose(found.weights, np.eye(len(known))[index], atol=1e-10)
        assert found.residual < 1e-7


def test_the_fit_is_the_best_one_whose_weights_sum_to_one() -> None:
    known, wanted = tracks((0.05, 0.1), 100, 1000), Profile(1000, gamma_of(0.25))
    found = reconstruct(known, wanted)

    def distance(weights: NDArray[np.float64]) -> float:
        """Relative, by midpoints."""
        moments = (np.arange(200_000) + 0.5) / 200
        wanted_values, difference = ((w.gamma + 1) / w.step * (moments / w.step) ** w.gamma for w in (wanted, wanted))
        for weight, p in zip(weights, known, strict=True):
            profile = np.where(moments <= p.step, (p.gamma + 1) / p.step * (moments / p.step) ** p.gamma, 0)
            difference = difference - weight * profile
        return float(np.linalg.norm(difference) / np.linalg.norm(wanted_values))

    assert found.weights.sum() == pytest.approx(1, abs=1e-12)
    assert found.residual == pytest.approx(distance(found.weights), rel=1e-3)
    chance = np.random.default_rng(0)
    for _ in range(10):
        change = chance.normal(size=len(known)) * 1e-2
        assert distance(found.weights + change - change.mean()) > found.residual


def test_one_snapshot_and_equal_snapshots() -> None:
    wanted = Profile(1000, gamma_of(0.1))
    assert reconstruct([Profile(900, gamma_of(0.05))], wanted).weights == pytest.approx([1])
    twice = reconstruct([wanted, wanted, Profile(500, gamma_of(0.05))], wanted)
    assert twice.weights == pytest.approx([0.5, 0.5, 0], abs=1e-9) and twice.residual < 1e-7


def test_a_million_steps_with_a_thousand_snapshots() -> None:
    found = reconstruct(tracks((0.05, 0.1), 2000, 1_000_000), Profile(1_000_000, gamma_of(0.075)))
    assert found.residual < 1e-5 and np.linalg.norm(found.weights) < 2


@dataclass
class Walk:
    """Weights on a random walk with averages of all widths, kept directly in float64."""

    final: NDArray[np.float64]
    kept: dict[float, NDArray[np.float64]]
    snapshots: list[tuple[Profile, NDArray[np.float64]]]


def walk(known: tuple[float, ...], wanted: tuple[float, ...], *, snapshot_every: int, every: int = 1) -> Walk:
    chance = np.random.default_rng(1)
    weights, num_steps, snapshots = chance.normal(size=200), 3000, []
    kept = {width: np.zeros(200) for width in (*known, *wanted)}
    for step in range(1, num_steps + 1):
        weights = weights + 0.01 * chance.normal(size=200)
        for width, average in kept.items():
            if step % every == 0:
                beta = track_decay(step, gamma_of(width), every)
                kept[width] = beta * average + (1 - beta) * weights
        if step % snapshot_every == 0:
            snapshots += [(Profile(step, gamma_of(width)), kept[width]) for width in known]
    return Walk(weights, kept, snapshots)


def error_of(run: Walk, width: float) -> tuple[float, float, float]:
    """Residual, error relative to the average, error relative to the average's distance from the weights."""
    fit = reconstruct([profile for profile, _ in run.snapshots], Profile(3000, gamma_of(width)))
    rebuilt = sum(weight * average for weight, (_, average) in zip(fit.weights, run.snapshots, strict=True))
    error = float(np.linalg.norm(rebuilt - run.kept[width]))
    lag = run.kept[width] - run.final
    return fit.residual, error / float(np.linalg.norm(run.kept[width])), error / float(np.linalg.norm(lag))


@pytest.mark.parametrize("every", [1, 5])
def test_a_track_is_rebuilt_from_snapshots_of_two_others(every: int) -> None:
    run = walk((0.05, 0.1), (0.075, 0.15), snapshot_every=100, every=every)
    for width in (0.075, 0.15):
        residual, relative, to_lag = error_of(run, width)
        assert residual < 3e-3 and relative < 2e-5 and to_lag < 1e-3


def test_below_the_warning_an_average_is_within_a_thousandth() -> None:
    widths = (0.03, 0.06, 0.075, 0.15, 0.2, 0.25)
    runs = [walk((0.05, 0.1), widths, snapshot_every=every) for every in (20, 50, 100, 300, 1000)]
    errors = [error_of(run, width)[:2] for run in runs for width in widths]
    good = [relative for residual, relative in errors if residual <= LARGE_RESIDUAL]
    poor = [relative for residual, relative in errors if residual > LARGE_RESIDUAL]
    assert len(good) > 15 and max(good) < 1e-3
    assert len(poor) > 5 and max(poor) > 1e-2
