"""Samplers by name, for a model that was trained on a given noise schedule."""

import inspect
from collections.abc import Mapping
from typing import Any

import diffusers

from sd_training.errors import ConfigError

SAMPLERS = (
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
"""The allow-list; names are diffusers' class names."""

_MUST_FOLLOW = {"prediction_type": "epsilon", "rescale_betas_zero_snr": False, "trained_betas": None}
"""Settings of the model (with the value that every sampler knows) that a sampler may not drop."""


def make_sampler(config: Mapping[str, Any], name: str) -> Any:
    """A sampler of class `name` for the noise schedule and prediction type in `config`.

    Args:
        config: configuration of the pipeline's own scheduler.
        name: one of `SAMPLERS`.

    Raises:
        ConfigError: unknown name, or that sampler cannot follow this model, so that it would silently draw wrong
            pictures.
    """
    if name not in SAMPLERS:
        raise ConfigError(f"scheduler {name!r} is not one of {', '.join(SAMPLERS)}")
    kind = getattr(diffusers, name)
    options = inspect.signature(kind.__init__).parameters
    dropped = [key for key, known in _MUST_FOLLOW.items() if config.get(key, known) != known and key not in options]
    if dropped:
        raise ConfigError(f"scheduler {name}: cannot follow this model's {', '.join(dropped)}; choose another one")
    try:
        return kind.from_config(dict(config))
    except (ImportError, NotImplementedError, ValueError) as error:
        raise ConfigError(f"scheduler {name}: {' '.join(str(error).split())}") from error
