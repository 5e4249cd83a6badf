"""Which family a config means, and that family with its parts loaded or made."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from diffusers import DiffusionPipeline
from diffusers.utils import logging as diffusers_logging

from sd_training.config.schema import (
    FAMILY_PARTS,
    ConditioningConfig,
    FamilyName,
    ModelConfig,
    ObjectiveConfig,
    family_of_parts,
)
from sd_training.errors import Checks, ConfigError
from sd_training.hub import hub_problem
from sd_training.models.families.flux import Flux
from sd_training.models.families.mmdit import MMDiT
from sd_training.models.families.pixart import PixArtSigma
from sd_training.models.families.sd3 import StableDiffusion3
from sd_training.models.families.sdxl import StableDiffusionXL
from sd_training.models.families.stable_diffusion import StableDiffusion
from sd_training.models.family import Family
from sd_training.models.load import effective_part, load_network, make_tokenizer
from sd_training.models.schedulers import load_schedulers

FAMILIES: Mapping[FamilyName, type[Family]] = {
    family.name: family for family in (StableDiffusion, StableDiffusionXL, StableDiffusion3, PixArtSigma, Flux, MMDiT)
}
_BY_PIPELINE: Mapping[str, FamilyName] = {family.pipeline_class.__name__: name for name, family in FAMILIES.items()}
"""Class in `model_index.json` → family."""


def load_family(
    model: ModelConfig,
    objective: ObjectiveConfig,
    conditioning: ConditioningConfig,
    *,
    seed: int,
    meta: bool = False,
) -> Family:
    """A family with all parts loaded or made, checked to fit together.

    Args:
        seed: of random weights.
        meta: make networks without weights, for counting.

    Raises:
        ConfigError: naming every option that is wrong.
    """
    index = _model_index(model)
    cls, checks = FAMILIES[_family_name(model, index)], Checks()
    is_unet = cls.denoiser_part == "unet"
    schedulers = checks.run(lambda: load_schedulers(model, objective, has_unet=is_unet, allowed=cls.predictions))
    null_is_zeros = checks.run(lambda: _null_is_zeros(cls, model, conditioning, index))

    def load(part: str) -> Any:
        default = cls.class_of_part(part, index)
        if part.startswith("tokenizer"):
            return make_tokenizer(part, effective_part(model, part), default)
        # Once a check has failed, networks are made without weights, which takes no time.
        return load_network(model, part, seed=seed, meta=meta or bool(checks.errors), default=default)

    parts = checks.run(lambda: cls.listed_parts(model, index, seed=seed, meta=meta or bool(checks.errors))) or {}
    for part in [*FAMILY_PARTS[cls.name], *cls.optional_parts(model, index)]:
        if part not in parts:
            parts[part] = checks.run(partial(load, part))
    checks.finish()
    assert schedulers is not None and null_is_zeros is not None, "no check has failed"
    family = cls(parts, schedulers, null_is_zeros)
    if problems := family.class_problems() or family.fit_problems():
        raise ConfigError(problems)
    return family


def _model_index(model: ModelConfig) -> Mapping[str, Any]:
    """`model_index.json` of `model.pretrained`; empty without one."""
    if model.pretrained is None:
        return {}
    if problem := hub_problem(model.pretrained, model.revision, "model.pretrained"):
        raise ConfigError(problem)
    verbosity = diffusers_logging.get_verbosity()
    diffusers_logging.set_verbosity_error()
    try:
        index: Mapping[str, Any] = DiffusionPipeline.load_config(model.pretrained, revision=model.revision)
        return index
    except (OSError, ValueError) as error:
        said = str(error).strip().splitlines()[0]
        where = "is no pipeline folder" if Path(model.pretrained).exists() else "is no pipeline on the hub"
        raise ConfigError(f"model.pretrained: {model.pretrained!r} {where}: {said}") from error
    finally:
        diffusers_logging.set_verbosity(verbosity)


def _family_name(model: ModelConfig, index: Mapping[str, Any]) -> FamilyName:
    pipeline = index.get("_class_name")
    if pipeline is None:
        return family_of_parts(model)
    stored = _BY_PIPELINE.get(str(pipeline))
    if stored is None:
        raise ConfigError(
            f"model.pretrained: {model.pretrained!r} is a {pipeline}; one of {', '.join(_BY_PIPELINE)} is needed"
        )
    if model.family not in (None, stored):
        raise ConfigError(f"model.family: is {model.family}, but model.pretrained {model.pretrained!r} is {stored}")
    return stored


def _null_is_zeros(
    cls: type[Family], model: ModelConfig, conditioning: ConditioningConfig, index: Mapping[str, Any]
) -> bool:
    """Whether dropped captions are zeros.

    Raises:
        ConfigError: the family does not read or know an option of its conditioning.
    """
    problems = []
    if conditioning.null_text == "zeros" and not cls.may_null_be_zeros:
        problems.append(f"conditioning.null_text: zeros is only known by sdxl, not by {cls.name}; use empty")
    if model.train_text_encoder and not cls.may_train_text:
        problems.append(f"model.train_text_encoder: is only known for stable_diffusion and sdxl, not for {cls.name}")
    for name in ("size_dropout_prob", "crop_dropout_prob"):
        if getattr(conditioning, name) > 0 and not cls.has_micro_conditioning:
            problems.append(f"conditioning.{name}: is only read by sdxl, not by {cls.name}; remove it")
    if problems:
        raise ConfigError(problems)
    stored = cls.may_null_be_zeros and index.get("force_zeros_for_empty_prompt", False)
    return bool(stored) if conditioning.null_text is None else conditioning.null_text == "zeros"
