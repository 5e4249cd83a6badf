"""Finite, and right, at SNR 0 and at SNR ∞."""

import pytest

from tests.conformance import endpoint_checks
from tests.conformance.cases import is_valid
from tests.conformance.reference import PREDICTIONS, WEIGHTINGS

ENDS = [
    (prediction, weighting, extreme)
    for prediction in PREDICTIONS
    for weighting in WEIGHTINGS
    for extreme in endpoint_checks.EXTREMES
    if is_valid(prediction, weighting, "plain")
]


@pytest.mark.parametrize("product", ENDS, ids="-".join)
def test_everything_is_finite(product: tuple[str, str, str]) -> None:
    endpoint_checks.check_finite(*product)


def test_weights_go_to_their_limits() -> None:
    endpoint_checks.check_limits()


def test_zero_terminal_snr_is_pure_noise() -> None:
    endpoint_checks.check_zero_snr_targets()


def test_edm_target_is_exact_at_extreme_sigma() -> None:
    endpoint_checks.check_edm_precision()


def test_huber_of_small_errors_is_their_square() -> None:
    endpoint_checks.check_small_huber_errors()
