"""diffusers as second opinion. Where it does not say what the paper says, the figure stands beside the bound."""

from dataclasses import dataclass

import numpy as np
import torch
from diffusers import DDPMScheduler, EDMEulerScheduler, FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from diffusers.training_utils import (
    compute_density_for_timestep_sampling,
    compute_loss_weighting_for_sd3,
    compute_snr,
)
from numpy.typing import NDArray

from sd_training.config.schema import ObjectiveConfig, ShiftConfig, TimestepDensityConfig
from tests.conformance import reference
from tests.conformance.cases import draws_of, numbers, objective_for, options_of, tensor
from tests.conformance.density_checks import FLOW, distance
from tests.conformance.reference import BETAS, SCHEDULES, Array, Setting

_SHAPE = (6, 2, 2, 2)
_X0, _EPS = numbers(21, *_SHAPE), numbers(22, *_SHAPE)
_ROUNDING = 2.0**-24
"""float32's unit roundoff: the largest relative error of one operation that is rounded correctly."""
_ROOT = 2 * _ROUNDING
"""The largest relative error of a vectorised square root: one unit in the last place."""
_U = np.array([0.0005, 0.1005, 0.4505, 0.7005, 0.9505, 0.9995])


def _ddpm(schedule: str) -> DDPMScheduler:
    is_zero = schedule.startswith("zero_snr")
    return DDPMScheduler(**BETAS[schedule.removeprefix("zero_snr_")], rescale_betas_zero_snr=is_zero)


@dataclass(frozen=True)
class _Levels:
    """α, σ and the SNR of a schedule in float64, and how far two float32 computations of each can lie apart."""

    alpha: Array
    sigma: Array
    snr: Array
    alpha_error: Array
    sigma_error: Array
    snr_error: Array


def root_error(schedule: str) -> Array:
    """[T] largest |√ᾱ_t - exact| of diffusers' float32 tables, on any CPU, before a square root of their ᾱ_t is taken.

    With u = 2⁻²⁴, float32's unit roundoff, ᾱ_t is off relative to itself by

    - 8u Σ β_s / (1 - β_s): `linspace` rounds its ends, its step, a product and a sum, and `scaled_linear` squares that.
      The rounded step is shared, so these errors have one sign; which of them are fused depends on the CPU;
    - the rounding of each 1 - β_s, half a unit in its last place: independent errors (Higham & Mary 2019), whose sum is
      taken at 6 standard deviations, each 1/√3 of the largest. The product itself is accumulated in double precision;
    - u for the rounding of the product to float32.

    `rescale_zero_terminal_snr` then takes roots, which a vector library gives within one unit in the last place, 2u
    (MKL's code, and so the last bit, depends on the maker of the CPU); subtracts the last root, so that absolute errors
    of both stay while the value shrinks; scales, squares, and goes through β = 1 - ᾱ_t / ᾱ_{t-1}. The quotients are
    rounded and multiplied up once more; the subtractions from 1 are exact but for β of quotients below ½.
    """
    betas = reference.betas(schedule.removeprefix("zero_snr_"))
    kept, plain = 1 - betas, np.sqrt(reference.alpha_bar(schedule.removeprefix("zero_snr_")))
    shared = 8 * _ROUNDING * np.cumsum(betas / kept)
    relative = (shared + _accumulated(_half_unit(kept) / kept) + _ROUNDING) / 2
    if not schedule.startswith("zero_snr_"):
        return plain * relative
    absolute = plain * (relative + _ROOT)
    moved = (plain - plain[-1])[:-1]  # the last one is 0 on both sides
    scale = (absolute[0] + absolute[-1]) / moved[0] + absolute[0] / plain[0] + 2 * _ROUNDING
    squared = 2 * ((absolute[:-1] + absolute[-1]) / moved + scale + 2 * _ROUNDING) + _ROUNDING
    exact = reference.alpha_bar(schedule)[:-1]
    ratio = exact / np.concatenate([[1.0], exact[:-1]])
    each = np.hypot(_half_unit(ratio), np.where(ratio < 0.5, _half_unit(1 - ratio), 0)) / ratio
    return np.append(np.sqrt(exact) * (squared + _accumulated(each) + _ROUNDING) / 2, 0.0)


def _half_unit(values: Array) -> Array:
    return np.spacing(np.abs(values).astype(np.float32)).astype(np.float64) / 2


def _accumulated(largest: Array) -> Array:
    """[T] what the first t of independent rounding errors add up to, at 6 standard deviations."""
    return 6 * np.sqrt(np.cumsum(largest**2) / 3)


def _levels(schedule: str, timesteps: NDArray[np.int64]) -> _Levels:
    """Ours rounds the exact ᾱ_t to float32; then both take 1 - ᾱ_t, two roots, a quotient and a square."""
    alpha_bar, theirs = reference.alpha_bar(schedule)[timesteps], root_error(schedule)[timesteps]
    alpha, noise = np.sqrt(alpha_bar), 1 - alpha_bar
    sigma, snr = np.sqrt(noise), alpha_bar / noise
    noise_error = 2 * alpha * theirs + _ROUNDING * alpha_bar + 2 * _half_unit(noise)
    alpha_error = theirs + (_ROUNDING / 2 + 2 * _ROOT) * alpha
    sigma_error = noise_error / (2 * sigma) + 2 * _ROOT * sigma
    snr_error = 2 * (alpha * alpha_error / noise + snr * sigma_error / sigma + 2 * _ROUNDING * snr)
    return _Levels(alpha, sigma, snr, alpha_error, sigma_error, snr_error)


def _expect_close(ours: torch.Tensor, theirs: torch.Tensor, bound: Array, name: str) -> None:
    error = np.abs(ours.double().numpy() - theirs.double().numpy())
    assert (error <= bound).all(), f"{name}: off by {error.max():g}, {np.max(error / bound):.2f} times the bound"


def check_noise_schedule(schedule: str) -> None:
    """add_noise, get_velocity and compute_snr of the same settings."""
    setting = Setting(prediction="v_prediction", schedule=schedule)
    made = objective_for(setting).draw(tensor(_X0), draws_of(_U, _EPS))
    theirs, timesteps = _ddpm(schedule), made.timesteps
    at = _levels(schedule, timesteps.numpy())
    a, s, a_error, s_error = (
        each[:, None, None, None] for each in (at.alpha, at.sigma, at.alpha_error, at.sigma_error)
    )
    for name, of_alpha, of_sigma, ours, second in (
        ("noised latents", _X0, _EPS, made.noised_latents, theirs.add_noise),
        ("velocity", _EPS, _X0, made.target, theirs.get_velocity),
    ):
        # Two products and a sum on either side.
        rounded = 4 * _ROUNDING * (a * np.abs(of_alpha) + s * np.abs(of_sigma))
        bound = a_error * np.abs(of_alpha) + s_error * np.abs(of_sigma) + rounded
        _expect_close(ours, second(tensor(_X0), tensor(_EPS), timesteps), bound, name)
    _expect_close((made.signal / made.sigma).square(), compute_snr(theirs, timesteps), at.snr_error, "SNR")


def check_min_snr_weights() -> None:
    """The weights that diffusers' training scripts make of compute_snr: min(SNR, γ) / SNR, and / (SNR + 1) for v."""
    for prediction in ("epsilon", "v_prediction"):
        setting = Setting(prediction=prediction, weighting="min_snr", gamma=5.0)
        made = objective_for(setting).draw(tensor(_X0), draws_of(_U, _EPS))
        snr = compute_snr(_ddpm("scaled_linear"), made.timesteps)
        scripts = snr.clamp(max=5.0) / (snr if prediction == "epsilon" else snr + 1)
        torch.testing.assert_close(made.weight, scripts, rtol=2e-3, atol=0)


def check_densities() -> None:
    """compute_density_for_timestep_sampling, as distributions.

    The training scripts take its result as an index: sigmas[(u · 1000).long()] of a table that falls from 1 to 0.001.
    So theirs is u = 1 - σ, quantised to 1000 entries (levels are off by up to 0.001), and m of `logit_normal` has the
    opposite sign of the paper's eq. 19, where t is σ. With m = 0 it is symmetric, as `mode` is, and the two agree.
    """
    generator = torch.Generator().manual_seed(5)
    for name, options in (("logit_normal", {"mean": 0.0, "std": 1.0}), ("mode", {"mode_scale": 1.29})):
        theirs = compute_density_for_timestep_sampling(
            name, 200_000, logit_mean=0.0, logit_std=1.0, mode_scale=1.29, generator=generator
        ).numpy()
        density = TimestepDensityConfig(name=name, **options)  # type: ignore[arg-type]
        chosen = ObjectiveConfig(prediction_type="flow_prediction", timestep_density=density)
        ours = objective_for(FLOW, chosen).times((torch.arange(200_000) + 0.5) / 200_000, 64).sort().values.numpy()
        quantiles = (np.arange(200_000) + 0.5) / 200_000
        assert distance(theirs, lambda t, o=ours, q=quantiles: np.asarray(np.interp(t, o, q))) < 1.95 / 200_000**0.5, (
            name
        )
        table = FlowMatchEulerDiscreteScheduler().sigmas.numpy()
        used = table[(theirs * 1000).astype(int)]
        assert np.abs(used - (1 - theirs)).max() <= 0.001 + 1e-6


def check_sd3_weights() -> None:
    """compute_loss_weighting_for_sd3: `sigma_sqrt` is σ⁻² there too; ours stops at σ = 10⁻³, the end of their table."""
    for name in ("sigma_sqrt", "cosmap"):
        setting = Setting(prediction="flow_prediction", schedule="flow", weighting=name)
        made = objective_for(setting).draw(tensor(_X0), draws_of(np.append(_U[1:], 0.0011), _EPS))
        torch.testing.assert_close(made.weight, compute_loss_weighting_for_sd3(name, made.sigma), rtol=1e-5, atol=0)


def check_edm_preconditioning() -> None:
    """EDMEulerScheduler.precondition_inputs, _noise and _outputs: the right answer is denoised to x_0."""
    for sigma_data in (0.5, 1.0):
        setting = Setting(prediction="edm", schedule="edm", sigma_data=sigma_data, log_mean=-0.5, log_std=1.2)
        made = objective_for(setting).draw(tensor(_X0), draws_of(_U, _EPS))
        sigma = made.sigma[:, None, None, None]
        noisy = tensor(_X0) + sigma * tensor(_EPS)
        theirs = EDMEulerScheduler(sigma_data=sigma_data)
        torch.testing.assert_close(made.noised_latents, theirs.precondition_inputs(noisy, sigma), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(made.timesteps, theirs.precondition_noise(made.sigma), rtol=1e-5, atol=1e-6)
        denoised = theirs.precondition_outputs(noisy, made.target, sigma)
        torch.testing.assert_close(denoised, tensor(_X0), rtol=1e-5, atol=1e-5)


def check_flow_noising() -> None:
    """FlowMatchEulerDiscreteScheduler.scale_noise; it looks levels up, so only those of its table of 1000 exist."""
    u = np.array([0.001, 0.25, 0.5, 0.75, 0.999, 1.0])
    made = objective_for(FLOW).draw(tensor(_X0), draws_of(u, _EPS))
    theirs = FlowMatchEulerDiscreteScheduler()
    on_table = theirs.timesteps[torch.tensor([999, 750, 500, 250, 1, 0])]
    torch.testing.assert_close(made.timesteps, on_table, rtol=1e-6, atol=0)
    noisy = theirs.scale_noise(tensor(_X0), on_table, tensor(_EPS))
    torch.testing.assert_close(made.noised_latents, noisy, rtol=1e-6, atol=1e-6)


def check_shifts() -> None:
    """The static shift of FlowMatchEulerDiscreteScheduler, and calculate_shift of pipelines with dynamic shifting."""
    draws = torch.linspace(0.001, 1.0, 1000)
    static = objective_for(FLOW, ObjectiveConfig(prediction_type="flow_prediction", shift=_static(3.0)))
    theirs = FlowMatchEulerDiscreteScheduler(shift=3.0).sigmas.flip(0)
    torch.testing.assert_close(static.times(draws, 64), theirs, rtol=1e-5, atol=1e-6)
    options = ObjectiveConfig(prediction_type="flow_prediction", shift=ShiftConfig(mode="tokens"))
    by_tokens = objective_for(FLOW, options, patch_size=2)
    dynamic = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    for tokens in (256, 1024, 4096, 9216):
        mu = calculate_shift(tokens, 256, 4096, 0.5, 1.15)
        ours = by_tokens.times(draws, 4 * tokens)
        torch.testing.assert_close(ours, dynamic.time_shift(mu, 1.0, draws), rtol=1e-5, atol=1e-6)


def _static(value: float) -> ShiftConfig:
    return ShiftConfig(mode="static", value=value)


def check_alpha_bar() -> None:
    """√ᾱ of every step: diffusers' within what its float32 tables allow (5·10⁻⁷ to 10⁻⁶ at the worst step), and ours
    within one rounding of ᾱ and one square root, u/2 + 2u = 1.5·10⁻⁷ of itself."""
    for schedule in SCHEDULES:
        exact = np.sqrt(reference.alpha_bar(schedule))
        theirs = _ddpm(schedule).alphas_cumprod
        error, bound = np.abs(np.sqrt(theirs.double().numpy()) - exact), root_error(schedule)
        assert (error <= bound).all(), f"{schedule}: {error.max():g} at step {error.argmax()}"
        setting = Setting(prediction="v_prediction", schedule=schedule)
        u = (np.arange(len(exact)) + 0.5) / len(exact)
        ours = objective_for(setting, options_of(setting)).schedule.levels(tensor(u)).signal.double().numpy()
        np.testing.assert_allclose(ours, exact, rtol=2.6 * _ROUNDING)
