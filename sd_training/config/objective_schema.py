"""The options of the training objective: a product of noise schedule, prediction type, density, weighting and loss.

Objectives by name: settings that go together.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from sd_training.config.value_types import (
    SCHEMA,
    NonNegative,
    Number,
    Positive,
    PositiveInt,
    Probability,
    read_with,
)

PredictionType = Literal["epsilon", "v_prediction", "sample", "flow_prediction", "edm"]
DensityName = Literal["uniform", "logit_normal", "mode", "cosmap", "beta", "log_normal"]
WeightingName = Literal[
    "constant", "min_snr", "soft_min_snr", "p2", "debiased", "sigma_sqrt", "cosmap", "edm", "learned_uncertainty"
]
PresetName = Literal["sd", "sd_v", "sdxl", "sd3", "edm"]
_NORMAL = read_with("name", "logit_normal", "log_normal")
_LEVELS = read_with("name", None, "uniform", "logit_normal", "mode", "cosmap", "beta")
_BETA = read_with("name", "beta")
_TOKENS = read_with("mode", "tokens")
_HUBER = read_with("name", "huber")
_DISCRETE = read_with("prediction_type", None, "epsilon", "v_prediction", "sample")


@dataclass(config=SCHEMA, kw_only=True)
class TimestepDensityConfig:
    """How often each noise level is trained. Noise levels run from 0 (clean) to 1 (pure noise)."""

    name: DensityName | None = None
    """`uniform`; of Esser et al. 2024 (arXiv:2403.03206, section 3.1) `logit_normal`, `mode`, `cosmap`; `beta`; and
    for EDM `log_normal` (Karras et al. 2022, arXiv:2206.00364, table 1). null: the preset's, or uniform."""
    mean: Annotated[Number | None, _NORMAL] = None
    """`logit_normal`: m; `log_normal`: mean of ln σ. null: 0; of `log_normal` −1.2 + ln(2 σ_data),
    as EDM."""
    std: Annotated[Positive | None, _NORMAL] = None
    """`logit_normal`: s; `log_normal`: standard deviation of ln σ. null: the preset's, or 1."""
    mode_scale: Annotated[Number, Field(ge=-1, le=2 / (math.pi - 2)), read_with("name", "mode")] = 1.29
    """`mode`: s; flat at 0, peaked in the middle above. Beyond 2 / (π − 2) levels would run backwards."""
    alpha: Annotated[Positive, _BETA] = 1.0
    """`beta`: α."""
    beta: Annotated[Positive, _BETA] = 1.0
    """`beta`: β."""
    low: Annotated[Probability, _LEVELS] = 0.0
    """The density is squeezed into low..high."""
    high: Annotated[Probability, _LEVELS] = 1.0
    """See `low`."""
    bias: Annotated[Literal["none", "later", "earlier", "range"], read_with("name", None, "uniform")] = "none"
    """`uniform`: train a part of the noise levels `bias_multiplier` times as often: the noisiest `bias_portion`, the
    cleanest, or `bias_range`."""
    bias_multiplier: Annotated[Positive, read_with("bias", "later", "earlier", "range")] = 1.0
    """See `bias`."""
    bias_portion: Annotated[Probability, read_with("bias", "later", "earlier")] = 0.25
    """See `bias`."""
    bias_range: Annotated[list[Probability], Field(min_length=2, max_length=2), read_with("bias", "range")] = Field(
        default_factory=lambda: [0.0, 1.0], json_schema_extra={"allowed": "[from, to] with numbers from 0 to 1"}
    )
    """See `bias`."""
    stratified: bool = False
    """Draw one noise level from each of G equal parts of the density at every optimizer step of G samples, instead of
    independently: the same density, less variance."""


@dataclass(config=SCHEMA, kw_only=True)
class ShiftConfig:
    """Flow models: σ' = aσ / (1 + (a − 1)σ) (Esser et al. 2024, eq. 23), in training and in the exported sampler."""

    mode: Annotated[Literal["scheduler", "static", "tokens"], read_with("prediction_type", None, "flow_prediction")] = (
        "scheduler"
    )
    """`scheduler`: as the training noise scheduler says. `static`: a = `value`. `tokens`: a = exp(μ), μ linear in the
    image tokens, as in FLUX."""
    value: Annotated[Positive, read_with("mode", "static")] = 1.0
    """`static`: a; 1 is no shift."""
    base_tokens: Annotated[PositiveInt, _TOKENS] = 256
    """`tokens`: μ is `base_shift` here [count]."""
    max_tokens: Annotated[PositiveInt, _TOKENS] = 4096
    """`tokens`: μ is `max_shift` here [count]."""
    base_shift: Annotated[Number, _TOKENS] = 0.5
    """See `base_tokens`."""
    max_shift: Annotated[Number, _TOKENS] = 1.15
    """See `max_tokens`."""


@dataclass(config=SCHEMA, kw_only=True)
class LossWeightingConfig:
    """How much the error at a noise level weighs."""

    name: WeightingName | None = None
    """`min_snr` (arXiv:2303.09556), `soft_min_snr` (arXiv:2401.11605), `p2` (arXiv:2204.00227), `debiased`
    (arXiv:2310.08442); for flow models `sigma_sqrt` and `cosmap` (arXiv:2403.03206); for EDM `edm` (arXiv:2206.00364);
    `learned_uncertainty` (arXiv:2312.02696, eq. 21). null: the preset's, or constant."""
    gamma: Annotated[Positive, read_with("name", "min_snr", "soft_min_snr")] = 5.0
    """`min_snr`, `soft_min_snr`: γ."""
    p2_gamma: Annotated[NonNegative, read_with("name", "p2")] = 1.0
    """`p2`: γ."""
    p2_k: Annotated[Positive, read_with("name", "p2")] = 1.0
    """`p2`: k."""


@dataclass(config=SCHEMA, kw_only=True)
class LossConfig:
    """How large an error is."""

    name: Literal["l2", "huber"] = "l2"
    """Squared error, or pseudo-Huber 2δ(√(e² + δ²) − δ)."""
    huber_delta: Annotated[Positive, _HUBER] = 0.1
    """`huber`: δ; with a schedule its smallest value."""
    huber_schedule: Annotated[Literal["constant", "snr", "exponential"], _HUBER] = "snr"
    """`huber`: δ constant, (1 − δ) / (1 + σ/α)² + δ, or δ^t over the noise levels t (arXiv:2403.16728)."""


@dataclass(config=SCHEMA, kw_only=True)
class ObjectiveConfig:
    """What the denoiser is asked to predict, and how errors are weighted."""

    preset: PresetName | None = None
    """Settings that go together; every option given beside it wins. `sd`: ε. `sd_v`: v with zero terminal SNR. `sdxl`:
    ε with offset noise 0.05. `sd3`: rectified flow, logit-normal. `edm`: EDM preconditioning."""
    prediction_type: PredictionType | None = None
    """Target of the denoiser; null takes the preset's, or the training noise scheduler's. It is written into the
    exported scheduler."""
    rescale_betas_zero_snr: Annotated[bool | None, _DISCRETE] = None
    """Zero terminal SNR (Lin et al. 2023, arXiv:2305.08891, algorithm 1); null takes the preset's, or the training
    noise scheduler's."""
    timestep_density: TimestepDensityConfig = Field(default_factory=TimestepDensityConfig)
    """Timestep density."""
    shift: ShiftConfig = Field(default_factory=ShiftConfig)
    """Resolution-dependent shift."""
    loss_weighting: LossWeightingConfig = Field(default_factory=LossWeightingConfig)
    """Loss weighting."""
    snr_gamma: Positive | None = None
    """Short for `loss_weighting: {name: min_snr, gamma: …}`."""
    loss: LossConfig = Field(default_factory=LossConfig)
    """Loss."""
    offset_noise: NonNegative | None = None
    """s of ε + s·η with one η per channel, which is also what ε-models are asked for; null: the preset's, or 0."""
    offset_noise_by_level: Annotated[bool, read_with("offset_noise")] = False
    """Scale the offset with the noise level √(1 − ᾱ), so that almost clean latents get almost none."""
    input_perturbation: NonNegative = 0.0
    """γ of noising with ε + γξ while the target keeps ε (Ning et al. 2023, arXiv:2301.11706)."""
    input_perturbation_steps: Annotated[PositiveInt | None, read_with("input_perturbation")] = None
    """Let γ fall linearly to 0 over so many optimizer steps; null: it stays."""
    masked_loss: Literal["none", "alpha"] = "none"
    """`alpha`: multiply the error of each latent cell by how opaque the image is there (PNG and WebP with alpha; other
    images count fully). What is transparent is trained as white, with no weight."""
    sigma_data: Annotated[Positive | None, read_with("prediction_type", None, "edm")] = None
    """EDM: standard deviation of the latents; null: the training noise scheduler's, or 1, which scaled latents have."""
    kl_weight: Annotated[NonNegative, read_with("model.train", "vae")] = 1e-6
    """Autoencoder training: weight of the KL term beside the L1 term, both averaged per pixel value."""


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
