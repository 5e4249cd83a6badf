"""diffusers' noise schedulers and the objective: what training reads from one, and how the sampler is configured.

The sampler is written from the objective (contract 7), so the exported pipeline samples what was
trained.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from sd_training.config.check import objective_problems
from sd_training.config.schema import ModelConfig, ObjectiveConfig, PartConfig, PredictionType, is_set, with_preset
from sd_training.diffusion import FlowSchedule, NoiseSchedule, Objective, SigmaSchedule, discrete_schedule_of
from sd_training.errors import ConfigError
from sd_training.models.load import class_of, effective_part, load_noise_scheduler

_SAMPLER = "noise_scheduler_inference"
# What sampling must share with training; everything else (spacing, order, thresholds) is the sampler's own.
_TRAINING_KEYS = ("num_train_timesteps", "beta_start", "beta_end", "beta_schedule", "trained_betas")
_SHIFT_KEYS = {
    "base_tokens": "base_image_seq_len",
    "max_tokens": "max_image_seq_len",
    "base_shift": "base_shift",
    "max_shift": "max_shift",
}
_EDM_LOG_RATIO = -1.2 - math.log(0.5)
"""Mean of ln(σ / σ_data) (Karras et al. 2022, arXiv:2206.00364, table 1)."""
FLOW_SAMPLER = "FlowMatchEulerDiscreteScheduler"
EDM_SAMPLER = "EDMEulerScheduler"
UNET_FLOW_SAMPLER = "UniPCMultistepScheduler"
"""Pipelines of UNets ask their scheduler to scale the model's input, which flow schedulers proper cannot."""


@dataclass(frozen=True)
class Schedulers:
    """What training and sampling agree on."""

    objective: Objective
    """Its options have nothing left to a preset or to a scheduler."""
    sampler: Any
    """The diffusers scheduler of previews and of the exported pipeline."""


def load_schedulers(
    model: ModelConfig, objective: ObjectiveConfig, *, has_unet: bool, allowed: Sequence[PredictionType] | None = None
) -> Schedulers:
    """Both noise schedulers of a config, agreeing with its objective.

    Args:
        has_unet: whether the pipeline is one of a UNet.
        allowed: what the pipeline can sample; None: anything.

    Raises:
        ConfigError: they do not go with the objective.
    """
    training = load_noise_scheduler(model, "noise_scheduler_training")
    config, resolved, static = training.config, _resolved(with_preset(objective), training), 1.0
    prediction = resolved.prediction_type
    assert prediction is not None, "is filled in"
    if allowed is not None and prediction not in allowed:
        raise ConfigError(
            f"objective.prediction_type: {prediction} cannot be sampled by the pipeline of this family; "
            f"use {' or '.join(allowed)} (a training noise scheduler of that kind, or an objective.preset)"
        )
    if problems := objective_problems(resolved):
        raise ConfigError(problems)
    schedule: NoiseSchedule
    count = int(config.get("num_train_timesteps", 1000))
    match prediction:
        case "flow_prediction":
            # A null `shift` is none, as an early FlowMatchEulerDiscreteScheduler stores it.
            schedule, static = FlowSchedule(count), float(config.get("shift") or config.get("flow_shift") or 1.0)
        case "edm":
            schedule = SigmaSchedule(count)
        case _:
            schedule = discrete_schedule_of({**config, "rescale_betas_zero_snr": resolved.rescale_betas_zero_snr})
    made = Objective(resolved, schedule, static)
    return Schedulers(made, _sampler(model, made, config, has_unet))


def prediction_warning(model: ModelConfig, denoiser: str, prediction: PredictionType) -> str | None:
    """A warning where pretrained weights predict something else than the run trains; None where they agree.

    Args:
        model: options of the model.
        denoiser: name of the trained part.
        prediction: what the run trains.
    """
    part = effective_part(model, denoiser)
    if part.pretrained is None:
        return None
    root = Path(part.pretrained)
    if (root / "config.json").is_file():  # the folder of the part alone; the pipeline's is around it
        root = root.absolute().parent
    beside = ModelConfig(noise_scheduler_training=PartConfig(pretrained=str(root), revision=part.revision))
    try:
        before = _stored_prediction(load_noise_scheduler(beside, "noise_scheduler_training"))
    except ConfigError:
        return None
    if before == prediction:
        return None
    option = "model.pretrained" if part.pretrained == model.pretrained else f"model.{denoiser}.pretrained"
    return (
        f"objective.prediction_type: the run trains {prediction}, but the weights of {option} answer {before}, as the "
        "scheduler stored with them says; they have to be trained anew for it. If that is not meant, remove what sets "
        "it: objective.prediction_type, objective.preset or model.noise_scheduler_training"
    )


def _stored_prediction(scheduler: Any) -> Any:
    name, config = type(scheduler).__name__, scheduler.config
    if name.startswith("FlowMatch") or config.get("use_flow_sigmas"):
        return "flow_prediction"
    return "edm" if name.startswith("EDM") else config.get("prediction_type") or "epsilon"


def _resolved(objective: ObjectiveConfig, training: Any) -> ObjectiveConfig:
    """What options and preset leave open, as the training noise scheduler has it."""
    prediction, config = objective.prediction_type or _stored_prediction(training), training.config
    shift, zero_snr = objective.shift, objective.rescale_betas_zero_snr
    place = "model.noise_scheduler_training"
    if prediction not in (known := get_args(PredictionType)):
        raise ConfigError(f"{place}: its prediction_type {prediction!r} is none of {', '.join(known)}")
    if shift.mode == "scheduler" and config.get("use_dynamic_shifting") and prediction == "flow_prediction":
        if (kind := config.get("time_shift_type", "exponential")) != "exponential":
            raise ConfigError(f"{place}: time_shift_type {kind!r} is not known; set objective.shift.mode to static")
        shift = shift.replace(mode="tokens", **{ours: config[theirs] for ours, theirs in _SHIFT_KEYS.items()})
    if zero_snr is None:
        is_discrete = prediction not in ("flow_prediction", "edm")
        zero_snr = bool(config.get("rescale_betas_zero_snr", False)) and is_discrete
    resolved = objective.replace(shift=shift, prediction_type=prediction, rescale_betas_zero_snr=zero_snr)
    if prediction != "edm":
        return resolved
    # EDM's own density and weighting, where no other is given; P_mean is that of the paper for its σ_data of 0.5.
    sigma_data = objective.sigma_data or float(config.get("sigma_data", 1.0))
    filled = with_preset(resolved.replace(preset="edm", sigma_data=sigma_data))
    density = filled.timestep_density
    if density.name == "log_normal" and density.mean is None:
        density = density.replace(mean=_EDM_LOG_RATIO + math.log(sigma_data))
    return filled.replace(preset=objective.preset, timestep_density=density)


def _sampler(model: ModelConfig, objective: Objective, config: Mapping[str, Any], has_unet: bool) -> Any:
    """The sampler of the options, or else of the training noise scheduler, set to what is trained.

    Raises:
        ConfigError: it cannot sample what is trained, and was chosen.
    """
    chosen, prediction = effective_part(model, _SAMPLER), objective.prediction_type
    sampler = load_noise_scheduler(model, _SAMPLER if is_set(chosen) else "noise_scheduler_training")
    name = type(sampler).__name__

    def usual(usual_name: str) -> Any:
        """Takes the place of a class that was not chosen and cannot sample the prediction type."""
        if chosen.target is not None:
            problem = f"{chosen.target} cannot sample prediction_type={prediction} here; use {usual_name}"
            raise ConfigError(f"model.{_SAMPLER}.target: {problem}")
        return class_of(_SAMPLER, usual_name)()

    if prediction == "edm":
        sampler = sampler if name.startswith("EDM") else usual(EDM_SAMPLER)
        # Their word for EDM's own c_out is epsilon.
        settings: dict[str, Any] = {"sigma_data": objective.sigma_data, "prediction_type": "epsilon"}
    elif prediction == "flow_prediction":
        if "use_flow_sigmas" not in sampler.config and (has_unet or not name.startswith("FlowMatch")):
            sampler = usual(UNET_FLOW_SAMPLER if has_unet else FLOW_SAMPLER)
        settings = _flow_settings(sampler, objective, config)
    else:
        settings = _discrete_settings(sampler, objective.config, config)
        if "clip_sample" in chosen.params:
            settings.pop("clip_sample", None)
    return type(sampler).from_config(sampler.config, **settings)


def _discrete_settings(sampler: Any, objective: ObjectiveConfig, config: Mapping[str, Any]) -> dict[str, Any]:
    name, prediction = type(sampler).__name__, objective.prediction_type
    zero_snr = bool(objective.rescale_betas_zero_snr)
    no_sample = prediction == "sample" and name in ("PNDMScheduler", "EulerAncestralDiscreteScheduler")
    if "prediction_type" not in sampler.config or name.startswith("EDM") or no_sample:
        raise ConfigError(f"model.{_SAMPLER}: {name} cannot sample prediction_type={prediction}; use DDIMScheduler")
    if zero_snr and "rescale_betas_zero_snr" not in sampler.config:
        usable = "DDIMScheduler or EulerDiscreteScheduler"
        raise ConfigError(f"model.{_SAMPLER}: {name} cannot sample a zero-terminal-SNR model; use {usable}")
    shared = {key: config[key] for key in _TRAINING_KEYS if key in config}
    shared |= {"prediction_type": prediction, "rescale_betas_zero_snr": zero_snr, "clip_sample": False}
    if zero_snr:  # Only trailing spacing starts at the true last step (Lin et al. 2023, section 3.3).
        shared["timestep_spacing"] = "trailing"
    return {key: value for key, value in shared.items() if key in sampler.config}


def _flow_settings(sampler: Any, objective: Objective, config: Mapping[str, Any]) -> dict[str, Any]:
    shift = objective.config.shift
    factor, by_tokens = shift.value if shift.mode == "static" else objective.static_shift, shift.mode == "tokens"
    settings: dict[str, Any] = {"num_train_timesteps": int(config.get("num_train_timesteps", 1000))}
    if type(sampler).__name__ == FLOW_SAMPLER:
        settings |= {"shift": factor, "use_dynamic_shifting": by_tokens}
        if by_tokens:
            settings |= {theirs: getattr(shift, ours) for ours, theirs in _SHIFT_KEYS.items()}
            settings["time_shift_type"] = "exponential"
        return settings
    if by_tokens:
        raise ConfigError(
            f"objective.shift.mode: tokens needs {FLOW_SAMPLER} and a transformer; use static with this pipeline"
        )
    if "use_flow_sigmas" not in sampler.config:  # Heun's
        return settings | {"shift": factor}
    return settings | {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": factor}
