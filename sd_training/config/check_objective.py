"""Rules between the options of the objective: what nothing reads, and products that make no sense."""

from collections.abc import Iterator, Mapping
from typing import Any

from sd_training.config.objective_schema import ObjectiveConfig

_OBJECTIVE_READ_BY: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "timestep_density": {
        "mean": ("logit_normal", "log_normal"),
        "std": ("logit_normal", "log_normal"),
        "mode_scale": ("mode",),
        "alpha": ("beta",),
        "beta": ("beta",),
        "low": ("uniform", "logit_normal", "mode", "cosmap", "beta"),
        "high": ("uniform", "logit_normal", "mode", "cosmap", "beta"),
        "bias": ("uniform",),
    },
    "loss_weighting": {"gamma": ("min_snr", "soft_min_snr"), "p2_gamma": ("p2",), "p2_k": ("p2",)},
    "loss": {"huber_delta": ("huber",), "huber_schedule": ("huber",)},
}
"""Option → the names of its group that read it."""
_BY_MODE: Mapping[str, tuple[str, ...]] = {
    "value": ("static",),
    "base_tokens": ("tokens",),
    "max_tokens": ("tokens",),
    "base_shift": ("tokens",),
    "max_shift": ("tokens",),
}
_DEFAULT_NAME = {"timestep_density": "uniform", "loss_weighting": "constant", "loss": "l2"}
_ONLY = {"sigma_sqrt": "flow_prediction", "cosmap": "flow_prediction", "edm": "edm"}
"""Weighting → the prediction type it is defined for."""


def objective_problems(objective: ObjectiveConfig) -> list[str]:
    """Everything that is wrong.

    Args:
        objective: with its preset filled in; rules about the prediction type wait until it is known.
    """
    rules = (_unread_objective, _ranges, _given_twice, _products)
    return [f"objective.{problem}" for rule in rules for problem in rule(objective)]


def _is_group_default(group: Any, name: str) -> bool:
    return bool(getattr(group, name) == getattr(type(group)(), name))


def _unread_objective(objective: ObjectiveConfig) -> Iterator[str]:
    for key, readers in _OBJECTIVE_READ_BY.items():
        group = getattr(objective, key)
        name = group.name or _DEFAULT_NAME[key]
        for option, names in readers.items():
            if name not in names and not _is_group_default(group, option):
                yield f"{key}.{option}: is only read with objective.{key}.name={' or '.join(names)}, not {name}"
    for option, modes in _BY_MODE.items():
        if objective.shift.mode not in modes and not _is_group_default(objective.shift, option):
            yield f"shift.{option}: is only read with objective.shift.mode={modes[0]}, not {objective.shift.mode}"
    if objective.offset_noise_by_level and not objective.offset_noise:
        yield "offset_noise_by_level: is only read with objective.offset_noise above 0"
    if objective.input_perturbation_steps is not None and not objective.input_perturbation:
        yield "input_perturbation_steps: is only read with objective.input_perturbation above 0"
    yield from _unread_bias(objective)


def _unread_bias(objective: ObjectiveConfig) -> Iterator[str]:
    density = objective.timestep_density
    readers = {
        "bias_multiplier": ("later", "earlier", "range"),
        "bias_portion": ("later", "earlier"),
        "bias_range": ("range",),
    }
    for option, kinds in readers.items():
        if density.bias not in kinds and not _is_group_default(density, option):
            yield f"timestep_density.{option}: is only read with bias={' or '.join(kinds)}, not {density.bias}"


def _ranges(objective: ObjectiveConfig) -> Iterator[str]:
    density, shift = objective.timestep_density, objective.shift
    if density.low >= density.high:
        yield f"timestep_density.low: {density.low:g} must be below timestep_density.high, {density.high:g}"
    if len(density.bias_range) != 2 or density.bias_range[0] >= density.bias_range[1]:
        yield f"timestep_density.bias_range: is {density.bias_range}; must be [from, to] with from below to"
    if not -1.0 <= density.mode_scale <= 1.751938393884109:  # 2 / (π - 2) (arXiv:2403.03206, section 3.1)
        yield f"timestep_density.mode_scale: {density.mode_scale:g} must be from -1 to 1.75, or levels run backwards"
    if shift.base_tokens >= shift.max_tokens:
        yield f"shift.base_tokens: {shift.base_tokens} must be below shift.max_tokens, {shift.max_tokens}"
    if objective.loss.huber_schedule == "exponential" and objective.loss.huber_delta > 1:
        yield "loss.huber_delta: must be at most 1 with loss.huber_schedule=exponential, or δ would grow without end"


def _given_twice(objective: ObjectiveConfig) -> Iterator[str]:
    name, gamma = objective.loss_weighting.name, objective.snr_gamma
    if gamma is not None and name not in (None, "min_snr"):
        yield f"snr_gamma: means loss_weighting.name=min_snr, but that is {name}; keep one"
    elif gamma is not None and not _is_group_default(objective.loss_weighting, "gamma"):
        yield "snr_gamma: means loss_weighting.gamma, which is given as well; keep one"


def _products(objective: ObjectiveConfig) -> Iterator[str]:
    prediction, weighting = objective.prediction_type, objective.loss_weighting.name
    density = objective.timestep_density.name or "uniform"
    if prediction is None:
        return
    if weighting in _ONLY and _ONLY[weighting] != prediction:
        yield f"loss_weighting.name: {weighting} is defined for prediction_type={_ONLY[weighting]}, not {prediction}"
    if (density == "log_normal") != (prediction == "edm"):
        yield (
            f"timestep_density.name: {density} does not go with prediction_type={prediction}; EDM draws ln σ from "
            "log_normal, all others a level in [0, 1]"
        )
    if objective.sigma_data is not None and prediction != "edm":
        yield f"sigma_data: is only read with prediction_type=edm, not {prediction}"
    if objective.shift.mode != "scheduler" and prediction != "flow_prediction":
        yield f"shift.mode: {objective.shift.mode} is only read with prediction_type=flow_prediction, not {prediction}"
    if objective.offset_noise and prediction == "flow_prediction":
        yield "offset_noise: must be 0 with flow_prediction: samplers start from plain noise, which it would not train"
    yield from _zero_snr(objective)


def _zero_snr(objective: ObjectiveConfig) -> Iterator[str]:
    if not objective.rescale_betas_zero_snr:
        return
    prediction = objective.prediction_type
    if prediction == "epsilon":
        yield (
            "rescale_betas_zero_snr: true needs prediction_type v_prediction or sample, because at zero SNR the noise "
            "says nothing about the picture"
        )
    elif prediction in ("flow_prediction", "edm"):
        yield f"rescale_betas_zero_snr: is only read with a discrete noise schedule, not prediction_type={prediction}"
