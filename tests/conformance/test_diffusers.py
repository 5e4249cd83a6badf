"""diffusers' schedulers and training helpers as second opinion."""

import pytest

from tests.conformance import diffusers_checks
from tests.conformance.reference import SCHEDULES


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_noise_schedule_agrees(schedule: str) -> None:
    diffusers_checks.check_noise_schedule(schedule)


@pytest.mark.parametrize(
    "check",
    [
        diffusers_checks.check_alpha_bar,
        diffusers_checks.check_min_snr_weights,
        diffusers_checks.check_densities,
        diffusers_checks.check_sd3_weights,
        diffusers_checks.check_edm_preconditioning,
        diffusers_checks.check_flow_noising,
        diffusers_checks.check_shifts,
    ],
    ids=lambda check: check.__name__,
)
def test_agrees(check) -> None:  # type: ignore[no-untyped-def]
    check()
