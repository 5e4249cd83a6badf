"""How often each noise level is trained, against analytic distribution functions."""

import pytest

from tests.conformance import density_checks
from tests.conformance.densities import DENSITIES


@pytest.mark.parametrize("name", DENSITIES)
def test_density_has_its_distribution(name: str) -> None:
    density_checks.check_density(name)


@pytest.mark.parametrize("name", ["uniform", "logit_normal", "mode", "cosmap"])
def test_timesteps_of_discrete_schedules(name: str) -> None:
    density_checks.check_timestep_histogram(name)


def test_log_normal() -> None:
    density_checks.check_log_normal()


def test_static_shift() -> None:
    density_checks.check_static_shift()


def test_shift_by_tokens() -> None:
    density_checks.check_token_shift()


def test_stratified_draws_have_the_same_density() -> None:
    density_checks.check_stratified()
