"""The list of broken variants: each replaces one name of the project and names the checks that must catch it."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from sd_training import diffusion
from sd_training.data.samples import sample as dataset
from sd_training.diffusion import DiscreteSchedule, FlowSchedule, Objective, SigmaSchedule
from sd_training.models import schedulers
from tests.conformance import density_checks, diffusers_checks, endpoint_checks, product_checks, sampler_checks
from tests.conformance.mutations import (
    Apply,
    Mutation,
    changed_levels,
    cosine_betas_from_zero,
    edm_sampler_with_default_data,
    edm_target_swapped,
    flow_sampler_unshifted,
    one_step_early,
    per_target_of_epsilon,
    rescaled_alpha_bar,
    settings_without,
    swap,
    target_without_offset,
    unscaled_root,
    weights_of_unrescaled,
)
from tests.conformance.reference import SCHEDULES
from tests.conformance.sampler_checks import EXPORTS


def _product(*product: str) -> "partial[None]":
    return partial(product_checks.check_product, *product)


def _second_opinion(schedule: str) -> "partial[None]":
    return partial(diffusers_checks.check_noise_schedule, schedule)


def _density(name: str) -> "partial[None]":
    return partial(density_checks.check_density, name)


def _export(name: str) -> "partial[None]":
    (export,) = (export for export in EXPORTS if export.name == name)
    return partial(sampler_checks.check_gaussian, export)


def _one_step(name: str) -> "partial[None]":
    export = next(export for export, _ in sampler_checks.one_steps() if export.name == name)
    return partial(sampler_checks.check_one_step, export, 5)


def _target(kind: str, broken: Callable[..., Any]) -> Apply:
    """Another target for one prediction type."""

    def target(original: Any, given: str, *rest: Any) -> Any:
        return broken(partial(original, given), *rest) if given == kind else original(given, *rest)

    return swap(diffusion, "target_of", target)


EPSILON = _product("epsilon", "scaled_linear", "constant")
V = _product("v_prediction", "scaled_linear", "constant")
V_MIN_SNR = _product("v_prediction", "scaled_linear", "min_snr")
FLOW = _product("flow_prediction", "flow", "constant")
EDM = _product("edm", "edm", "edm")
X0 = partial(product_checks.check_x0_is_found)
PUBLISHED = partial(product_checks.check_published_weights)
MASKED = partial(product_checks.check_masked_loss)
STATIC_SHIFT = partial(density_checks.check_static_shift)
TOKEN_SHIFT = partial(density_checks.check_token_shift)
STRATIFIED = partial(density_checks.check_stratified)
PRECONDITIONING = partial(diffusers_checks.check_edm_preconditioning)
ALPHA_BAR = partial(diffusers_checks.check_alpha_bar)
FLOW_LEVELS = partial(sampler_checks.check_levels_of_flow_samplers)


_NOISING: list[Mutation] = [
    Mutation(
        "alpha_bar_without_root",
        swap(DiscreteSchedule, "levels", changed_levels(lambda at: at._replace(signal=at.signal.square()))),
        (EPSILON, _second_opinion("scaled_linear"), ALPHA_BAR),
    ),
    Mutation(
        "alpha_bar_of_the_step_before",
        swap(schedulers, "discrete_schedule_of", one_step_early),
        (EPSILON, *(_second_opinion(schedule) for schedule in SCHEDULES), ALPHA_BAR),
    ),
    Mutation(
        "timestep_off_by_one",
        swap(DiscreteSchedule, "levels", changed_levels(lambda at: at._replace(model_time=at.model_time + 1))),
        (EPSILON, _one_step("v_prediction-scaled_linear-DDIMScheduler")),
    ),
    Mutation(
        "scaled_linear_without_root",
        swap(diffusion, "betas_of", lambda f, c: f({**c, "beta_schedule": "linear"})),
        (EPSILON, _one_step("epsilon-scaled_linear-EulerDiscreteScheduler"), _second_opinion("scaled_linear")),
    ),
    Mutation(
        "cosine_without_offset",
        swap(diffusion, "_cosine_betas", cosine_betas_from_zero),
        (_product("epsilon", "cosine", "constant"), _second_opinion("cosine"), ALPHA_BAR),
    ),
    Mutation(
        "zero_snr_on_alpha_bar_instead_of_its_root",
        swap(diffusion, "rescale_zero_terminal_snr", rescaled_alpha_bar),
        (_product("v_prediction", "zero_snr_scaled_linear", "constant"), _second_opinion("zero_snr_scaled_linear")),
    ),
    Mutation(
        "zero_snr_without_scaling_back",
        swap(diffusion, "rescale_zero_terminal_snr", unscaled_root),
        (_product("v_prediction", "zero_snr_linear", "constant"), _second_opinion("zero_snr_linear")),
    ),
    Mutation(
        "zero_snr_forgotten",
        swap(diffusion, "rescale_zero_terminal_snr", lambda _, alphas: alphas),
        (partial(endpoint_checks.check_zero_snr_targets),),
    ),
    Mutation(
        "flow_runs_backwards",
        swap(FlowSchedule, "levels", changed_levels(lambda at: at._replace(signal=at.noise, noise=at.signal))),
        (FLOW, partial(diffusers_checks.check_flow_noising)),
    ),
    Mutation(
        "flow_time_not_times_1000",
        swap(FlowSchedule, "levels", changed_levels(lambda at: at._replace(model_time=at.noise))),
        (FLOW, _one_step("flow_prediction-flow-usual")),
    ),
    Mutation(
        "edm_time_without_quarter",
        swap(SigmaSchedule, "levels", changed_levels(lambda at: at._replace(model_time=at.model_time * 4))),
        (EDM, PRECONDITIONING),
    ),
    Mutation("edm_without_c_in", swap(diffusion, "input_scale", lambda *_: 1.0), (EDM, X0, PRECONDITIONING)),
    Mutation(
        "signal_and_sigma_swapped",
        swap(diffusion, "noised", lambda f, x0, eps, a, s: f(x0, eps, s, a)),
        (EPSILON, FLOW, X0),
    ),
]
_TARGETS: list[Mutation] = [
    Mutation("v_sign", _target("v_prediction", lambda f, *a: -f(*a)), (V, X0)),
    Mutation("v_swapped", _target("v_prediction", lambda f, x, e, a, s, d: f(x, e, s, a, d)), (V, X0)),
    Mutation("flow_sign", _target("flow_prediction", lambda f, *a: -f(*a)), (FLOW, X0)),
    Mutation("c_skip_and_c_out_swapped", swap(diffusion, "target_of", edm_target_swapped), (EDM, X0, PRECONDITIONING)),
    Mutation(
        "sigma_data_ignored",
        swap(diffusion, "target_of", lambda f, *a: f(*a[:-1], 1.0)),
        (EDM, PRECONDITIONING),
    ),
    Mutation("offset_noise_not_in_the_target", swap(Objective, "draw", target_without_offset), (EPSILON,)),
    Mutation(
        "offset_noise_per_cell",
        swap(Objective, "_offset", lambda f, self, draws, *a: draws.noise + 0.3 * draws.input_noise),
        (EPSILON,),
    ),
    Mutation(
        "input_perturbation_in_the_target",
        swap(
            Objective,
            "_offset",
            lambda f, self, draws, *a: f(self, draws, *a) + self.config.input_perturbation * draws.input_noise,
        ),
        (partial(product_checks.check_target_ignores_perturbation), EPSILON),
    ),
]
_WEIGHTS: list[Mutation] = [
    Mutation(
        "snr_of_before_zero_snr",
        swap(diffusion, "loss_weights", weights_of_unrescaled),
        (
            _product("v_prediction", "zero_snr_scaled_linear", "min_snr"),
            _product("sample", "zero_snr_scaled_linear", "debiased"),
        ),
    ),
    Mutation(
        "gamma_and_snr_swapped",
        swap(diffusion, "min_snr", lambda _, a, s, gamma: torch.maximum(a, gamma * s)),
        (V_MIN_SNR, PUBLISHED),
    ),
    Mutation(
        "epsilon_weight_for_v",
        swap(diffusion, "_per_target", per_target_of_epsilon),
        (
            V_MIN_SNR,
            partial(diffusers_checks.check_min_snr_weights),
        ),
    ),
    Mutation(
        "weight_of_sigma_and_alpha_swapped",
        swap(diffusion, "loss_weights", lambda f, c, p, a, s, d: f(c, p, s, a, d)),
        (V_MIN_SNR, PUBLISHED),
    ),
    Mutation(
        "soft_min_snr_is_min_snr",
        swap(diffusion, "soft_min_snr", lambda _, a, s, g: diffusion.min_snr(a, s, g)),
        (_product("epsilon", "linear", "soft_min_snr"), PUBLISHED),
    ),
    Mutation(
        "p2_without_k",
        swap(diffusion, "p2", lambda f, a, s, gamma, k: f(a, s, gamma, 1.0)),
        (_product("epsilon", "scaled_linear", "p2"), PUBLISHED),
    ),
    Mutation(
        "debiased_without_root",
        swap(diffusion, "debiased", lambda _, a, s: a * s),
        (_product("sample", "scaled_linear", "debiased"), PUBLISHED),
    ),
    Mutation("edm_weight_missing_c_out", swap(diffusion, "_per_target", lambda f, k, a, s, d: 1.0 / s), (EDM,)),
]
_LOSSES: list[Mutation] = [
    Mutation(
        "mean_over_the_batch",
        swap(Objective, "loss", lambda f, *a, **o: f(*a, **o).mean().expand(len(a[1]))),
        (EPSILON,),
    ),
    Mutation("mask_ignored", swap(diffusion, "latent_mask", lambda f, *a: torch.ones_like(f(*a))), (MASKED,)),
    Mutation("huber_without_factor", swap(diffusion, "pseudo_huber", lambda f, e, d: f(e, d) / 2), (EPSILON,)),
    Mutation(
        "huber_sigma_and_alpha_swapped",
        swap(diffusion, "huber_delta", lambda f, c, a, s, t: f(c, s, a, t)),
        (
            EPSILON,
            FLOW,
        ),
    ),
    Mutation("huber_time_reversed", swap(diffusion, "huber_delta", lambda f, c, a, s, t: f(c, a, s, 1 - t)), (V, FLOW)),
]
_DENSITIES: list[Mutation] = [
    Mutation(
        "logit_normal_without_sigmoid",
        swap(diffusion, "logit_normal", lambda f, *a: torch.logit(f(*a))),
        (_density("logit_normal"),),
    ),
    Mutation(
        "logit_normal_mean_sign",
        swap(diffusion, "logit_normal", lambda f, u, mean, std: f(u, -mean, std)),
        (_density("logit_normal_moved"),),
    ),
    Mutation("mode_sign", swap(diffusion, "mode", lambda f, u, scale: f(u, -scale)), (_density("mode"),)),
    Mutation("cosmap_over_half", swap(diffusion, "cosmap", lambda f, u: f(u / 2)), (_density("cosmap"),)),
    Mutation(
        "p_mean_ignored",
        swap(diffusion, "log_normal", lambda f, u, mean, std: f(u, 0.0, std)),
        (partial(density_checks.check_log_normal), EDM),
    ),
    Mutation(
        "shift_inverted",
        swap(diffusion, "shifted", lambda f, t, factor: f(t, 1 / factor)),
        (STATIC_SHIFT, TOKEN_SHIFT, partial(diffusers_checks.check_shifts)),
    ),
    Mutation(
        "shift_is_mu_instead_of_its_exponential",
        swap(diffusion, "shift_for_tokens", lambda f, *a: float(torch.tensor(f(*a)).log())),
        (TOKEN_SHIFT,),
    ),
    Mutation(
        "patches_ignored",
        swap(Objective, "times", lambda f, self, *a: f(replace(self, latents_per_token=1), *a)),
        (TOKEN_SHIFT, FLOW_LEVELS),
    ),
    Mutation("stratified_off_by_one", swap(dataset, "_strata", lambda f, *a: f(*a) + 1), (STRATIFIED,)),
    Mutation(
        "strata_never_shuffled_again", swap(dataset, "_strata", lambda f, seed, _, n: f(seed, 0, n)), (STRATIFIED,)
    ),
]
_EXPORTED: list[Mutation] = [
    Mutation(
        "prediction_type_not_exported",
        swap(schedulers, "_discrete_settings", settings_without("prediction_type")),
        (
            _export("v_prediction-scaled_linear-DDIMScheduler"),
            _one_step("sample-scaled_linear-DPMSolverMultistepScheduler"),
        ),
    ),
    Mutation(
        "betas_not_exported",
        swap(schedulers, "_discrete_settings", settings_without("beta_schedule")),
        (
            _export("epsilon-cosine-DDIMScheduler"),
            _one_step("epsilon-scaled_linear-EulerDiscreteScheduler"),
        ),
    ),
    Mutation(
        "zero_snr_not_exported",
        swap(schedulers, "_discrete_settings", settings_without("rescale_betas_zero_snr")),
        (_one_step("v_prediction-zero_snr_scaled_linear-DDIMScheduler"),),
    ),
    Mutation("shift_not_exported", swap(schedulers, "_sampler", flow_sampler_unshifted), (FLOW_LEVELS,)),
    Mutation(
        "sigma_data_not_exported",
        swap(schedulers, "_sampler", edm_sampler_with_default_data),
        (
            _export("edm-edm-1-EDMEulerScheduler"),
            _one_step("edm-edm-0.5-usual_unet"),
        ),
    ),
]
MUTATIONS = [*_NOISING, *_TARGETS, *_WEIGHTS, *_LOSSES, *_DENSITIES, *_EXPORTED]
