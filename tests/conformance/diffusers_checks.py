"""diffusers as second opinion. Where it does not say what the paper says, the figure stands beside the bound."""

import numpy as np
import torch
from diffusers import DDPMScheduler, EDMEulerScheduler, FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from diffusers.training_utils import (
    compute_density_for_timestep_sampling,
    compute_loss_weighting_for_sd3,
    compute_snr,
)

from sd_training.config.objective_schema import ObjectiveConfig, ShiftConfig, TimestepDensityConfig
from tests.conformance import reference
from tests.conformance.cases import draws_of, numbers, objective_for, options_of, tensor
from tests.conformance.density_checks import FLOW, distance
from tests.conformance.reference import BETAS, SCHEDULES, Setting

_SHAPE = (6, 2, 2, 2)
_X0, _EPS = numbers(21, *_SHAPE), numbers(22, *_SHAPE)
_U = np.array([0.0005, 0.1005, 0.4505, 0.7005, 0.9505, 0.9995])


def _ddpm(schedule: str) -> DDPMScheduler:
    is_zero = schedule.startswith("zero_snr")
    return DDPMScheduler(**BETAS[schedule.removeprefix("zero_snr_")], rescale_betas_zero_snr=is_zero)


def check_noise_schedule(schedule: str) -> None:
    """add_noise, get_velocity and compute_snr of the same settings."""
    setting = Setting(prediction="v_prediction", schedule=schedule)
    made = objective_for(setting).draw(tensor(_X0), draws_of(_U, _EPS))
    theirs, timesteps = _ddpm(schedule), made.timesteps
    noisy = theirs.add_noise(tensor(_X0), tensor(_EPS), timesteps)
    velocity = theirs.get_velocity(tensor(_X0), tensor(_EPS), timesteps)
    torch.testing.assert_close(made.noised_latents, noisy, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(made.target, velocity, rtol=1e-5, atol=1e-5)
    snr = (made.signal / made.sigma).square()
    # 1 - ᾱ of float32: 10⁻³ of itself at the cosine schedule's first step, 10⁻⁴ at Stable Diffusion's. With zero SNR
    # their last steps go through β = 1 - ᾱ_t / ᾱ_{t-1} and back: 4·10⁻³ at the cosine schedule's last but one.
    bound = 2e-2 if schedule == "zero_snr_cosine" else 2e-3
    torch.testing.assert_close(snr, compute_snr(theirs, timesteps), rtol=bound, atol=1e-9)


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
    """√ᾱ of every step: ours within float32's 10⁻⁷ of itself, diffusers' within 3·10⁻⁷ in absolute terms.

    Relative to itself theirs is off by up to 2·10⁻⁵ where zero SNR is near.
    """
    for schedule in SCHEDULES:
        exact = np.sqrt(reference.alpha_bar(schedule))[:-1]
        theirs = _ddpm(schedule).alphas_cumprod.double().sqrt().numpy()[:-1]
        np.testing.assert_allclose(theirs, exact, rtol=0, atol=4e-7)
        setting = Setting(prediction="v_prediction", schedule=schedule)
        u = (np.arange(len(exact)) + 0.5) / (len(exact) + 1)
        ours = objective_for(setting, options_of(setting)).schedule.levels(tensor(u)).signal.double().numpy()
        np.testing.assert_allclose(ours, exact, rtol=2e-7)
