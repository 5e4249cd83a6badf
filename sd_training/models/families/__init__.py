"""Which family a config means, and that family with its parts loaded or made."""

import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

from diffusers import DiffusionPipeline

from sd_training.config.schema import ConditioningConfig, FamilyName, ModelConfig, ObjectiveConfig, family_of_parts
from sd_training.errors import Checks, ConfigError
from sd_training.hub import hub_problem
from sd_training.models.families.dits import Flux, PixArtSigma, StableDiffusion3
from sd_training.models.families.flux2 import Flux2Klein
from sd_training.models.families.mmdit import MMDiT
from sd_training.models.families.qwen_image import QwenImage
from sd_training.models.families.sana import Sana
from sd_training.models.families.unets import StableDiffusion, StableDiffusionXL
from sd_training.models.families.z_image import ZImage
from sd_training.models.family import Family
from sd_training.models.load import first_line, load_part
from sd_training.models.schedulers import FLOW_SAMPLER, UNET_FLOW_SAMPLER, load_schedulers

FAMILIES: Mapping[FamilyName, type[Family]] = {
    family.name: family
    for family in (
        StableDiffusion,
        StableDiffusionXL,
        StableDiffusion3,
        PixArtSigma,
        Flux,
        MMDiT,
        Sana,
        ZImage,
        QwenImage,
        Flux2Klein,
    )
}
_BY_PIPELINE: Mapping[str, FamilyName] = {family.pipeline_class.__name__: name for name, family in FAMILIES.items()}
"""Class in `model_index.json` → family."""


def sets_noise_levels(pipeline: str) -> bool:
    """Whether a pipeline of this class gives the sampler its noise levels (`Family.sets_noise_levels`)."""
    name = _BY_PIPELINE.get(pipeline)
    return name is not None and FAMILIES[name].sets_noise_levels


def load_family(
    model: ModelConfig,
    objective: ObjectiveConfig,
    conditioning: ConditioningConfig,
    *,
    seed: int,
    meta: bool = False,
    has_denoiser: bool = True,
) -> Family:
    """A family with all parts loaded or made, checked to fit together.

    Args:
        seed: of random weights.
        meta: make networks without weights, for counting.
        has_denoiser: whether the denoiser has weights; the encoders alone need none.

    Raises:
        ConfigError: naming every option that is wrong.
    """
    index = _model_index(model)
    cls, checks = FAMILIES[_family_name(model, index)], Checks()
    is_unet = cls.denoiser_part == "unet"
    schedulers = checks.run(lambda: load_schedulers(model, objective, has_unet=is_unet, allowed=cls.predictions))
    problems = []
    if model.trains_text and not is_unet:
        problems.append(f"{model.text_option}: is only known for stable_diffusion and sdxl, not for {cls.name}")
    other = "transformer" if is_unet else "unet"
    if model.pretrained is not None and getattr(model, other).pretrained is not None:
        problems.append(f"model.{other}: {cls.name} has none; its denoiser is model.{cls.denoiser_part}")
    if model.single_file_config is not None and not is_unet:
        problems.append(f"model.single_file_config: is only known for stable_diffusion and sdxl, not for {cls.name}")
    if schedulers is not None and cls.sets_noise_levels:
        name, takes = type(schedulers.sampler).__name__, inspect.signature(schedulers.sampler.set_timesteps).parameters
        if "sigmas" not in takes:
            other = f"cannot sample {cls.name}; use {FLOW_SAMPLER} or {UNET_FLOW_SAMPLER}"
            problems.append(f"model.noise_scheduler_inference.target: {name} {other}")
    for name, unread in (("null_text", (None, "empty")), ("size_dropout_prob", (0,)), ("crop_dropout_prob", (0,))):
        is_read = cls.has_zero_text if name == "null_text" else cls.has_size_numbers
        if not is_read and (value := getattr(conditioning, name)) not in unread:
            readers = "sdxl and mmdit_rope" if name == "null_text" else "sdxl"
            problems.append(f"conditioning.{name}: {value} is only read by {readers}, not by {cls.name}; remove it")
    if problems:
        checks.errors.append(ConfigError(problems))
    parts = {}
    for part, (option, config) in (checks.run(lambda: cls.part_configs(model, index)) or {}).items():
        # Once a check has failed, networks are made without weights, which takes no time.
        is_empty = meta or bool(checks.errors) or (part == cls.denoiser_part and not has_denoiser)
        load = partial(load_part, part, config, seed=seed, meta=is_empty, option=option)
        parts[part] = checks.run(load)
    checks.finish()
    assert schedulers is not None, "no check has failed"
    family = cls(parts, schedulers, cls.settings_of(model, conditioning, index))
    problems, encoders = family.fit_problems(), family.text_encoders()
    for name, encoder in encoders.items() if model.trains_text else ():
        if not type(encoder).__name__.startswith("CLIP"):  # others have parameters that nothing is read from
            problems.append(f"{model.text_option}: only CLIP is trained; model.{name} is a {type(encoder).__name__}")
    if isinstance(rates := conditioning.encoder_dropout_prob, dict) and (unknown := sorted({*rates} - {*encoders})):
        problems.append(f"conditioning.encoder_dropout_prob: has no {unknown[0]}; there are {', '.join(encoders)}")
    if problems:
        raise ConfigError(problems)
    return family


def _model_index(model: ModelConfig) -> Mapping[str, Any]:
    """`model_index.json` of `model.pretrained`; empty without one."""
    if model.pretrained is None:
        return {}
    option = "model.pretrained" if model.single_file_config is None else "model.single_file_config"
    place = model.single_file_config or model.pretrained
    if problem := hub_problem(place, model.revision, option):
        raise ConfigError(problem)
    try:
        return DiffusionPipeline.load_config(place, revision=model.revision)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{option}: {place!r} is no pipeline: {first_line(error)}") from error


def _family_name(model: ModelConfig, index: Mapping[str, Any]) -> FamilyName:
    pipeline = index.get("_class_name")
    if pipeline is None:
        return family_of_parts(model)
    stored = _BY_PIPELINE.get(str(pipeline))
    if stored is None:
        known = ", ".join(_BY_PIPELINE)
        raise ConfigError(f"model.pretrained: {model.pretrained!r} is a {pipeline}; one of {known} is needed")
    if model.family not in (None, stored):
        raise ConfigError(f"model.family: is {model.family}, but model.pretrained {model.pretrained!r} is {stored}")
    return stored
