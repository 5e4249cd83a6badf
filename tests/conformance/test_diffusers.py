"""diffusers' schedulers and training helpers as second opinion."""

import math
from typing import Any

import pytest
import torch

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


@pytest.mark.parametrize("side", [-math.inf, math.inf], ids=["down", "up"])
def test_agrees_where_square_roots_are_rounded_otherwise(side: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A vector library may give either neighbour of the exact root, and CPUs of other makers give others."""
    of_tensors, powers = torch.Tensor.sqrt, torch.Tensor.__pow__

    def rounded(values: torch.Tensor) -> torch.Tensor:
        exact = of_tensors(values.double())
        if values.dtype != torch.float32:
            return exact.to(values.dtype)
        nearest = exact.float()
        is_other = nearest.double() < exact if side > 0 else nearest.double() > exact
        return torch.where(is_other, torch.nextafter(nearest, torch.tensor(side)), nearest)

    def power(values: torch.Tensor, exponent: Any) -> torch.Tensor:
        return rounded(values) if exponent == 0.5 else powers(values, exponent)

    monkeypatch.setattr(torch.Tensor, "sqrt", rounded)
    monkeypatch.setattr(torch.Tensor, "__pow__", power)
    diffusers_checks.check_alpha_bar()
    for schedule in SCHEDULES:
        diffusers_checks.check_noise_schedule(schedule)
