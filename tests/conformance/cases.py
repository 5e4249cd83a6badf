"""References' settings as options of the project, and the objective that the options make."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from sd_training.build.models import objective_of
from sd_training.config.schema import (
    LossConfig,
    LossWeightingConfig,
    ModelConfig,
    ObjectiveConfig,
    PartConfig,
    TimestepDensityConfig,
    with_preset,
)
from sd_training.diffusion import Objective
from sd_training.models.schedulers import Schedulers, load_schedulers
from tests.conformance.reference import BETAS, DISCRETE, PREDICTIONS, SCHEDULES, WEIGHTINGS, Array, Setting

LOSSES = ("l2", "huber_constant", "huber_snr", "huber_exponential")
NOISES: dict[str, dict[str, Any]] = {
    "plain": {},
    "offset": {"offset_noise": 0.3},
    "perturbed": {"input_perturbation": 0.2},
    "both": {"offset_noise": 0.3, "input_perturbation": 0.2},
}
SIGMA_DATA = 0.7


def schedules_of(prediction: str) -> tuple[str, ...]:
    """The schedules that a prediction type is defined on; ε says nothing about the picture at zero SNR."""
    if prediction in ("flow_prediction", "edm"):
        return (prediction.removesuffix("_prediction"),)
    return tuple(name for name in SCHEDULES if prediction != "epsilon" or not name.startswith("zero_snr"))


def is_valid(prediction: str, weighting: str, noise: str) -> bool:
    """Which products make sense, from the maths and not from the code."""
    only = {"sigma_sqrt": "flow_prediction", "cosmap": "flow_prediction", "edm": "edm"}
    if only.get(weighting, prediction) != prediction:
        return False
    # Samplers of flow models start from plain noise, which would then never have been trained.
    return prediction != "flow_prediction" or "offset_noise" not in NOISES[noise]


def products() -> Iterator[tuple[str, str, str]]:
    """Prediction type, schedule, weighting of all valid products."""
    for prediction in PREDICTIONS:
        for schedule in schedules_of(prediction):
            yield from ((prediction, schedule, w) for w in WEIGHTINGS if is_valid(prediction, w, "plain"))


def settings(prediction: str, schedule: str, weighting: str) -> list[Setting]:
    """The valid products of these three with every loss and noise."""
    is_edm = prediction == "edm"
    return [
        Setting(
            prediction=prediction,
            schedule=schedule,
            weighting=weighting,
            loss=loss,
            noise=NOISES[noise],
            gamma=3.0,
            p2_gamma=0.7,
            p2_k=1.3,
            huber_delta=0.2,
            sigma_data=SIGMA_DATA if is_edm else 1.0,
            log_mean=-0.6 if is_edm else 0.0,
            log_std=1.3 if is_edm else 1.0,
        )
        for loss in LOSSES
        for noise in NOISES
        if is_valid(prediction, weighting, noise)
    ]


def options_of(setting: Setting) -> ObjectiveConfig:
    """The same as options, leaving alone what nothing reads."""
    density = TimestepDensityConfig()
    if setting.prediction == "edm":
        density = TimestepDensityConfig(name="log_normal", mean=setting.log_mean, std=setting.log_std)
    weighting = LossWeightingConfig(name=setting.weighting)  # type: ignore[arg-type]
    if setting.weighting in ("min_snr", "soft_min_snr"):
        weighting = weighting.replace(gamma=setting.gamma)
    elif setting.weighting == "p2":
        weighting = weighting.replace(p2_gamma=setting.p2_gamma, p2_k=setting.p2_k)
    loss = LossConfig()
    if setting.loss != "l2":
        huber_schedule: Any = setting.loss.removeprefix("huber_")
        loss = LossConfig(name="huber", huber_delta=setting.huber_delta, huber_schedule=huber_schedule)
    return ObjectiveConfig(
        prediction_type=setting.prediction,  # type: ignore[arg-type]
        rescale_betas_zero_snr=setting.schedule.startswith("zero_snr") or None,
        timestep_density=density,
        loss_weighting=weighting,
        loss=loss,
        sigma_data=setting.sigma_data if setting.prediction == "edm" else None,
        **setting.noise,
    )


def training_part(setting: Setting, **changes: Any) -> PartConfig:
    """The training noise scheduler of a setting."""
    if setting.prediction == "flow_prediction":
        return PartConfig(target="FlowMatchEulerDiscreteScheduler", params=changes)
    if setting.prediction == "edm":
        return PartConfig(target="EDMEulerScheduler", params=changes)
    return PartConfig(params={**BETAS[setting.schedule.removeprefix("zero_snr_")], **changes})


def schedulers_for(
    setting: Setting,
    sampler: str | None = None,
    options: ObjectiveConfig | None = None,
    *,
    has_unet: bool | None = None,
    **sampler_params: Any,
) -> Schedulers:
    """What `load_schedulers` makes of a setting, exported as `sampler`."""
    chosen = PartConfig(target=sampler, params=sampler_params)
    model = ModelConfig(noise_scheduler_training=training_part(setting), noise_scheduler_inference=chosen)
    if has_unet is None:
        has_unet = setting.prediction in DISCRETE
    return load_schedulers(model, options or options_of(setting), has_unet=has_unet)


@dataclass(frozen=True)
class Parts:
    """The part of a model family that its objective is made from."""

    schedulers: Schedulers
    patch_size: int = 1

    @property
    def objective(self) -> ObjectiveConfig:
        """The resolved options."""
        return self.schedulers.objective.config


def objective_for(setting: Setting, options: ObjectiveConfig | None = None, patch_size: int = 1) -> Objective:
    """The objective on the same way as a run makes it."""
    parts: Any = Parts(schedulers_for(setting, options=options), patch_size)
    return objective_of(parts)


def varied(base: Objective, setting: Setting) -> Objective:
    """The same objective with another weighting, loss and noise; it saves loading the schedulers again."""
    return replace(base, config=with_preset(options_of(setting)))


def numbers(seed: int, *shape: int) -> Array:
    """Standard normal numbers that float32 holds without rounding, so that both sides get the same."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32).astype(np.float64)


def tensor(array: Array) -> torch.Tensor:
    """Float32."""
    return torch.tensor(array, dtype=torch.float32)


def draws_of(
    u: Array, eps: Array, eta: Array | None = None, xi: Array | None = None, mask: NDArray[np.uint8] | None = None
) -> Any:
    """A batch's random numbers, and the mask of its pixels, as the loader hands them over."""
    nothing = torch.empty(len(u), 0)
    return SimpleNamespace(
        timestep_draw=tensor(u),
        noise=tensor(eps),
        offset_noise=nothing if eta is None else tensor(eta),
        input_noise=nothing if xi is None else tensor(xi),
        mask=nothing if mask is None else torch.from_numpy(mask),
    )
