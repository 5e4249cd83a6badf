"""Objectives by name: settings that go together."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sd_training.config.objective_schema import ObjectiveConfig

PRESETS: Mapping[str, Mapping[str, Any]] = {
    # Rombach et al. 2022 (arXiv:2112.10752).
    "sd": {"prediction_type": "epsilon"},
    # Salimans & Ho 2022 (arXiv:2202.00512) with Lin et al. 2023 (arXiv:2305.08891).
    "sd_v": {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True},
    # Podell et al. 2023 (arXiv:2307.01952, section 2.5): the last stage has offset noise 0.05.
    "sdxl": {"prediction_type": "epsilon", "offset_noise": 0.05},
    # Esser et al. 2024 (arXiv:2403.03206, section 5.1): rf/lognorm(0, 1).
    "sd3": {
        "prediction_type": "flow_prediction",
        "timestep_density": {"name": "logit_normal", "mean": 0.0, "std": 1.0},
    },
    # Karras et al. 2022 (arXiv:2206.00364, table 1). P_mean follows from the deviation of the latents.
    "edm": {
        "prediction_type": "edm",
        "timestep_density": {"name": "log_normal", "std": 1.2},
        "loss_weighting": {"name": "edm"},
    },
}


def with_preset(objective: ObjectiveConfig) -> ObjectiveConfig:
    """The options with what they leave null filled in from their preset and from `snr_gamma`."""
    chosen = dict(PRESETS[objective.preset]) if objective.preset else {}
    density = _filled(objective.timestep_density, chosen.pop("timestep_density", {}))
    weighting = _filled(objective.loss_weighting, chosen.pop("loss_weighting", {}))
    if objective.snr_gamma is not None and weighting.name in (None, "min_snr"):
        weighting = replace(weighting, name="min_snr", gamma=objective.snr_gamma)
    return replace(_filled(objective, chosen), timestep_density=density, loss_weighting=weighting)


def _filled(group: Any, settings: Mapping[str, Any]) -> Any:
    """A group with another name of its own takes nothing from the preset's."""
    if getattr(group, "name", None) not in (None, settings.get("name")):
        return group
    return replace(group, **{name: value for name, value in settings.items() if getattr(group, name) is None})
