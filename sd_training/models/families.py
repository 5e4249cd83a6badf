"""Families by name; which one a config means; a family with its parts loaded or made."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from diffusers import DiffusionPipeline
from diffusers.utils import logging as diffusers_logging

from sd_training.config.model_schema import FAMILY_PARTS, FamilyName, ModelConfig, family_of_parts
from sd_training.config.objective_schema import ObjectiveConfig
from sd_training.config.schema import ConditioningConfig
from sd_training.errors import Checks, ConfigError
from sd_training.hub import hub_problem
from sd_training.models.family import Family
from sd_training.models.flux import Flux
from sd_training.models.load import load_network, load_tokenizer
from sd_training.models.mmdit import MMDiT
from sd_training.models.pixart import PixArtSigma
from sd_training.models.schedulers import load_schedulers
from sd_training.models.sd3 import StableDiffusion3
from sd_training.models.sdxl import StableDiffusionXL
from sd_training.models.stable_diffusion import StableDiffusion

FAMILIES: Mapping[FamilyName, type[Family]] = {
    family.name: family for family in (StableDiffusion, StableDiffusionXL, StableDiffusion3, PixArtSigma, Flux, MMDiT)
}
_PIPELINES: Mapping[str, FamilyName] = {
    "StableDiffusionPipeline": "stable_diffusion",
    "StableDiffusionXLPipeline": "sdxl",
    "StableDiffusion3Pipeline": "sd3",
    "PixArtSigmaPipeline": "pixart",
    "FluxPipeline": "flux",
    "MMDiTRopePipeline": "mmdit_rope",
}
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
    null_is_zeros = checks.run(lambda: _null_is_zeros(cls, conditioning, index))
    checks.run(lambda: _check_conditioning(cls, model, conditioning))
    parts = _load_parts(cls, model, index, seed=seed, meta=meta, checks=checks)
    checks.finish()
    assert schedulers is not None and null_is_zeros is not None, "no check has failed"
    family = cls(parts, schedulers, null_is_zeros)
    if problems := family.class_problems() or family.fit_problems():
        raise ConfigError(problems)
    return family


def _load_parts(
    cls: type[Family], model: ModelConfig, index: Mapping[str, Any], *, seed: int, meta: bool, checks: Checks
) -> dict[str, Any]:
    """Networks and tokenizers by name. Once a check has failed, the others are made without weights, which takes no
    time: only what is wrong with them is still wanted."""
    made = checks.run(lambda: cls.listed_parts(model, index, seed=seed, meta=meta or bool(checks.errors)))
    parts = {} if made is None else made

    def load(part: str) -> Any:
        default = cls.class_of_part(part, index)
        if part.startswith("tokenizer"):
            return load_tokenizer(model, part, default=default)
        return load_network(model, part, seed=seed, meta=meta or bool(checks.errors), default=default)

    names = [*FAMILY_PARTS[cls.name], *cls.optional_parts(model, index)]
    for part in (name for name in names if name not in parts):
        parts[part] = checks.run(partial(load, part))
    return parts


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
    stored = _PIPELINES.get(str(pipeline))
    if stored is None:
        raise ConfigError(
            f"model.pretrained: {model.pretrained!r} is a {pipeline}; one of {', '.join(_PIPELINES)} is needed"
        )
    if model.family not in (None, stored):
        raise ConfigError(f"model.family: is {model.family}, but model.pretrained {model.pretrained!r} is {stored}")
    return stored


def _null_is_zeros(cls: type[Family], conditioning: ConditioningConfig, index: Mapping[str, Any]) -> bool:
    if conditioning.null_text == "zeros" and not cls.may_null_be_zeros:
        raise ConfigError(f"conditioning.null_text: zeros is only known by sdxl, not by {cls.name}; use empty")
    if conditioning.null_text is not None or not cls.may_null_be_zeros:
        return conditioning.null_text == "zeros"
    return bool(index.get("force_zeros_for_empty_prompt", False))


def _check_conditioning(cls: type[Family], model: ModelConfig, conditioning: ConditioningConfig) -> None:
    """Options that the family does not read or know."""
    problems = []
    if model.train_text_encoder and not cls.may_train_text:
        problems = [f"model.train_text_encoder: is only known for stable_diffusion and sdxl, not for {cls.name}"]
    if not cls.has_micro_conditioning:
        problems += [
            f"conditioning.{name}: is only read by sdxl, not by {cls.name}; remove it"
            for name in ("size_dropout_prob", "crop_dropout_prob")
            if getattr(conditioning, name) > 0
        ]
    if problems:
        raise ConfigError(problems)
