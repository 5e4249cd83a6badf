"""Where divisions by zero hide: SNR 0 and SNR ∞."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from sd_training.diffusion import DiscreteSchedule, Objective
from tests.conformance import reference
from tests.conformance.cases import draws_of, numbers, objective_for, settings, tensor, varied
from tests.conformance.reference import DISCRETE, Array, Setting

_SHAPE = (2, 3, 2, 2)
_X0, _EPS, _XI, _ANSWER = (numbers(seed, *_SHAPE) for seed in (11, 12, 13, 14))
_ETA = numbers(15, *_SHAPE[:2])
_LOG_EXTREMES = np.log([1e-6, 1e6])
EXTREMES = ("snr_0", "snr_infinity")


def _at_extreme(base: Objective, setting: Setting, extreme: str) -> tuple[Objective, Array]:
    """The objective, and uniform draws that lead it to the extreme."""
    is_noise = extreme == "snr_0"
    if setting.prediction == "edm":
        log_sigma = float(_LOG_EXTREMES[int(is_noise)])
        density = base.config.timestep_density.replace(mean=log_sigma)
        return replace(base, config=base.config.replace(timestep_density=density)), np.full(2, 0.5)
    if setting.prediction in DISCRETE and not is_noise:
        # No usual schedule has a step without noise; a trained β_0 of 0 has one.
        assert isinstance(base.schedule, DiscreteSchedule)
        base = replace(base, schedule=DiscreteSchedule(torch.tensor([1.0, 0.5])))
    return base, np.full(2, 1.0 if is_noise else 0.0)


def _schedule(prediction: str, extreme: str) -> str:
    if prediction in ("flow_prediction", "edm"):
        return prediction.removesuffix("_prediction")
    return "zero_snr_scaled_linear" if extreme == "snr_0" and prediction != "epsilon" else "scaled_linear"


def check_finite(prediction: str, weighting: str, extreme: str) -> None:
    """Example, loss and gradient of every loss and noise are finite at the extreme."""
    base = None
    for setting in settings(prediction, _schedule(prediction, extreme), weighting):
        base = objective_for(setting) if base is None else base
        objective, u = _at_extreme(varied(base, setting), setting, extreme)
        made = objective.draw(tensor(_X0), draws_of(u, _EPS, _ETA, _XI))
        _expect_extreme(setting, made.signal, made.sigma, extreme)
        answer = tensor(_ANSWER).requires_grad_()
        loss = objective.loss(answer, made)
        (gradient,) = torch.autograd.grad(loss.sum(), answer)
        values = {name: value for name, value in vars(made).items() if value is not None}
        for name, value in {**values, "loss": loss, "gradient": gradient}.items():
            assert value.isfinite().all(), f"{name} of {setting} is {value.flatten()[:4].tolist()}"
        assert (made.weight >= 0).all()


def _expect_extreme(setting: Setting, signal: torch.Tensor, sigma: torch.Tensor, extreme: str) -> None:
    ratio = float((signal / sigma)[0]) if float(sigma[0]) else float("inf")
    if setting.prediction == "epsilon" and extreme == "snr_0":
        assert ratio < 0.1  # zero terminal SNR is refused; the last step of Stable Diffusion is as far as it goes
    else:
        assert ratio < 2e-6 if extreme == "snr_0" else ratio > 0.9e6


def limits() -> Iterator[tuple[str, str, str, float]]:
    """Prediction, weighting, extreme → the limit of the weight of the answer (γ = 3, p2: γ = 0.7, k = 1.3)."""
    yield "v_prediction", "min_snr", "snr_0", 0.0
    yield "v_prediction", "min_snr", "snr_infinity", 0.0  # γ / (SNR + 1)
    yield "v_prediction", "debiased", "snr_0", 0.0
    yield "epsilon", "min_snr", "snr_infinity", 0.0  # γ / SNR
    yield "epsilon", "p2", "snr_infinity", 0.0
    yield "sample", "min_snr", "snr_0", 0.0
    yield "sample", "min_snr", "snr_infinity", 3.0
    yield "sample", "soft_min_snr", "snr_infinity", 3.0
    yield "flow_prediction", "min_snr", "snr_0", 0.0
    yield "flow_prediction", "min_snr", "snr_infinity", 0.0
    yield "flow_prediction", "cosmap", "snr_0", 2 / np.pi
    yield "flow_prediction", "cosmap", "snr_infinity", 2 / np.pi
    yield "edm", "edm", "snr_0", 1.0
    yield "edm", "edm", "snr_infinity", 1.0
    yield "edm", "min_snr", "snr_infinity", 0.0
    for prediction in reference.PREDICTIONS:
        for extreme in EXTREMES:
            yield prediction, "constant", extreme, 1.0


def check_limits() -> None:
    """Finite is not enough: weights go to their limits."""
    for prediction, weighting, extreme, limit in limits():
        setting = settings(prediction, _schedule(prediction, extreme), weighting)[0]
        objective, u = _at_extreme(objective_for(setting), setting, extreme)
        made = objective.draw(tensor(_X0), draws_of(u, _EPS))
        np.testing.assert_allclose(made.weight, limit, atol=1e-5, err_msg=f"{prediction} {weighting} {extreme}")


def check_zero_snr_targets() -> None:
    """At zero SNR the denoiser sees pure noise and v is -x_0 (Lin et al. 2023, section 3.2)."""
    for schedule in ("zero_snr_linear", "zero_snr_scaled_linear", "zero_snr_cosine", "zero_snr_trained"):
        setting = Setting(prediction="v_prediction", schedule=schedule)
        made = objective_for(setting).draw(tensor(_X0), draws_of(np.full(2, 1 - 2.0**-24), _EPS))
        assert torch.equal(made.noised_latents, tensor(_EPS)), schedule
        assert torch.equal(made.target, tensor(-_X0)), schedule


def check_edm_precision() -> None:
    """F's target where x_0 - c_skip x_t cancels: c_out is 10⁻⁶, and float32 keeps 6·10⁻⁸ of x_0."""
    setting: Any = settings("edm", "edm", "edm")[0]
    for extreme in EXTREMES:
        objective, u = _at_extreme(objective_for(setting), setting, extreme)
        made = objective.draw(tensor(_X0), draws_of(u, _EPS))
        sigma = np.exp(_LOG_EXTREMES[int(extreme == "snr_0")])
        wanted = reference.target("edm", _X0, _EPS, np.array(1.0), np.array(sigma), setting.sigma_data)
        np.testing.assert_allclose(made.target, wanted, atol=1e-4)


def check_small_huber_errors() -> None:
    """2δ(√(e² + δ²) - δ) ≈ e² where e is small: √(e² + δ²) - δ cancels in float32."""
    for delta in (0.1, 1.0):
        setting = replace(settings("epsilon", "scaled_linear", "constant")[0], loss="huber_constant", huber_delta=delta)
        objective = objective_for(setting)
        made = objective.draw(tensor(_X0), draws_of(np.full(2, 0.5), _EPS))
        errors = np.array([1e-4, 1e-2])
        answer = made.target + tensor(errors)[:, None, None, None]
        given = (answer - made.target).double().numpy().reshape(2, -1)
        wanted = 2 * delta * given**2 / (np.sqrt(given**2 + delta**2) + delta)
        np.testing.assert_allclose(objective.loss(answer, made), wanted.mean(axis=1), rtol=1e-3)
