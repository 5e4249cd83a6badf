"""Confidence intervals of mean losses, and the paired comparison of two sets of weights.

The unit is the image. Losses of one image at several noise levels share its content, caption and noise, so they are not
independent: every test sees one number per image, the mean over all levels included.

Intervals and tests are Student's (1908, "The probable error of a mean"). They agree with each other: an interval leaves
out 0 where its p is below 0.05. Losses are skewed, so both rest on the central limit theorem; how near they come for
losses like real ones is tested (tests/unit/evaluation/test_paired.py). With fewer than about 50 images they are rough.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri, stdtr, stdtrit

ALPHA = 0.05
"""Intervals have 1 - ALPHA confidence. Of comparisons of equal weights at most this share finds a difference."""
POWER = 0.8
"""Probability with which `Comparison.images_needed` find a difference."""

Vector = NDArray[np.float64]


def half_width(std: Vector, count: int) -> Vector:
    """Of the 95 % interval around the mean of `count` independent numbers, 2 or more, of this standard deviation (with
    n - 1 in its denominator)."""
    return np.asarray(stdtrit(count - 1, 1.0 - ALPHA / 2.0) * std / np.sqrt(count), dtype=np.float64)


def holm(p: Vector) -> Vector:
    """[..., T] p values adjusted for T tests (Holm 1979, "A simple sequentially rejective multiple test procedure"):
    where no test has a true difference, the smallest is below ALPHA in at most a share ALPHA of cases, however the
    tests depend on each other."""
    order = np.argsort(p, axis=-1)
    factors = p.shape[-1] - np.arange(p.shape[-1])
    rising = np.maximum.accumulate(np.take_along_axis(p, order, -1) * factors, axis=-1)
    adjusted = np.empty_like(p)
    np.put_along_axis(adjusted, order, np.minimum(rising, 1.0), -1)
    return adjusted


@dataclass(frozen=True)
class Comparison:
    """[..., T] of each test; see `compare`."""

    difference: Vector
    """Mean over the images."""
    low: Vector
    high: Vector
    """Its 95 % interval, of this test alone."""
    p: Vector
    """Of this test alone, two-sided."""
    p_holm: Vector
    """Adjusted for all tests."""
    images_needed: Vector
    """With which this test would find a difference of the size that was observed, with probability `POWER`; infinite
    where none was observed."""

    @property
    def is_different(self) -> NDArray[np.bool_]:
        """Of equal weights in at most a share `ALPHA` of comparisons anywhere."""
        return self.p_holm <= ALPHA


def compare(differences: Vector) -> Comparison:
    """Paired t tests of the hypothesis that the mean difference is 0.

    The number of images is that of a t test whose level is ALPHA divided by the number of tests that found nothing,
    Holm's first step for these: ((z(1 - α/2) + z(POWER)) s / d)² + z(1 - α/2)² / 2 (Guenther 1981, "Sample size
    formulas for normal theory t tests").

    Args:
        differences: [..., N, T] of N ≥ 2 images in T tests: noise levels, and the mean over them. Finite.
    """
    count = differences.shape[-2]
    mean, std = differences.mean(axis=-2), differences.std(axis=-2, ddof=1)
    half = half_width(std, count)
    with np.errstate(divide="ignore", invalid="ignore"):
        t = np.where(mean == 0.0, 0.0, np.abs(mean) / (std / np.sqrt(count)))  # equal weights: 0 / 0
        spread = np.where(mean == 0.0, np.inf, std / np.abs(mean))
    p = 2.0 * stdtr(count - 1, -t)
    p_holm = holm(p)
    num_open = np.maximum((p_holm > ALPHA).sum(axis=-1, keepdims=True), 1)
    z = ndtri(1.0 - ALPHA / 2.0 / num_open)
    images_needed = np.ceil(((z + ndtri(POWER)) * spread) ** 2 + z**2 / 2.0)
    return Comparison(mean, mean - half, mean + half, p, p_holm, images_needed)
