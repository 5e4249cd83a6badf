"""Samplers by name, for a model that was trained on a given noise schedule."""

import inspect
from collections.abc import Mapping
from typing import Any

import diffusers

from sd_training.errors import ConfigError

_DISCRETE = (
    "DDIMScheduler",
    "DDPMScheduler",
    "DPMSolverMultistepScheduler",
    "EulerAncestralDiscreteScheduler",
    "EulerDiscreteScheduler",
    "HeunDiscreteScheduler",
    "LMSDiscreteScheduler",
    "PNDMScheduler",
    "UniPCMultistepScheduler",
)
_FLOW_SIGMAS = ("DPMSolverMultistepScheduler", "UniPCMultistepScheduler")
"""Samplers of discrete schedules that know flow models as well."""
_FLOW = ("FlowMatchEulerDiscreteScheduler", "FlowMatchHeunDiscreteScheduler", *_FLOW_SIGMAS)
_EDM = ("EDMDPMSolverMultistepScheduler", "EDMEulerScheduler")
_CUSTOM_SIGMAS = ("FlowMatchEulerDiscreteScheduler", "UniPCMultistepScheduler")
"""What FluxPipeline can run, which chooses the noise levels itself."""
_SCALING = ("StableDiffusionPipeline", "StableDiffusionXLPipeline", "PixArtSigmaPipeline")
"""Pipelines that call `scale_model_input`."""
SAMPLERS = tuple(sorted({*_DISCRETE, *_FLOW, *_EDM}))
"""The allow-list; names are diffusers' class names."""

_MUST_FOLLOW = {"prediction_type": "epsilon", "rescale_betas_zero_snr": False, "trained_betas": None}
"""Settings of the model (with the value that every sampler knows) that a sampler may not drop."""


def samplers_for(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The samplers that can follow a model whose own scheduler has this configuration."""
    if is_flow(config):
        return _FLOW
    return _EDM if "sigma_data" in config else _DISCRETE


def is_flow(config: Mapping[str, Any]) -> bool:
    """Whether a scheduler's configuration is one of a flow model."""
    return bool(config.get("use_flow_sigmas")) or "shift" in config


def make_sampler(config: Mapping[str, Any], name: str, pipeline: str = "") -> Any:
    """A sampler of class `name` for the noise schedule and prediction type in `config`.

    Args:
        config: configuration of the pipeline's own scheduler.
        name: one of `SAMPLERS`.
        pipeline: class of the pipeline that it is for.

    Raises:
        ConfigError: unknown name, or that sampler cannot follow this model, so that it would silently draw wrong
            pictures.
    """
    if name not in SAMPLERS:
        raise ConfigError(f"scheduler {name!r} is not one of {', '.join(SAMPLERS)}")
    if name not in samplers_for(config):
        raise ConfigError(f"scheduler {name}: cannot follow this model; use one of {', '.join(samplers_for(config))}")
    if pipeline == "FluxPipeline" and name not in _CUSTOM_SIGMAS:
        raise ConfigError(
            f"scheduler {name}: FluxPipeline gives it levels of its own; use {' or '.join(_CUSTOM_SIGMAS)}"
        )
    kind = getattr(diffusers, name)
    if pipeline in _SCALING and not hasattr(kind, "scale_model_input"):
        raise ConfigError(
            f"scheduler {name}: {pipeline} has its scheduler scale what the denoiser sees, which this one cannot; use "
            f"{' or '.join(_FLOW_SIGMAS)}"
        )
    options = inspect.signature(kind.__init__).parameters
    settings = _as_flow(config, name) if is_flow(config) else dict(config)
    dropped = [key for key, known in _MUST_FOLLOW.items() if settings.get(key, known) != known and key not in options]
    if dropped:
        raise ConfigError(f"scheduler {name}: cannot follow this model's {', '.join(dropped)}; choose another one")
    try:
        return kind.from_config(settings)
    except (ImportError, NotImplementedError, ValueError) as error:
        raise ConfigError(f"scheduler {name}: {' '.join(str(error).split())}") from error


def _as_flow(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The settings of a flow model in the words of the chosen class: they have two for everything."""
    if config.get("use_dynamic_shifting") and name != "FlowMatchEulerDiscreteScheduler":
        raise ConfigError(
            f"scheduler {name}: cannot follow this model's shift by tokens; use FlowMatchEulerDiscreteScheduler"
        )
    factor = config["shift"] if "shift" in config else config.get("flow_shift")
    if name in _FLOW_SIGMAS:
        count = {"num_train_timesteps": config.get("num_train_timesteps", 1000)}
        return {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": factor or 1.0, **count}
    plain = {key: value for key, value in config.items() if key != "prediction_type"}
    return {**plain, "shift": factor or 1.0}
