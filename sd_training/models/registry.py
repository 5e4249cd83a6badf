"""The classes a config may name. Nothing outside this list is ever constructed or loaded."""

import difflib
import inspect
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import diffusers
import transformers

from sd_training.errors import ConfigError
from sd_training.models.families.mmdit_rope import MMDiTRope


def _named(library: ModuleType, *names: str) -> dict[str, type]:
    return {name: getattr(library, name) for name in names}


_SCHEDULERS = _named(
    diffusers,
    "DDIMScheduler",
    "DDPMScheduler",
    "DPMSolverMultistepScheduler",
    "EDMDPMSolverMultistepScheduler",
    "EDMEulerScheduler",
    "EulerAncestralDiscreteScheduler",
    "EulerDiscreteScheduler",
    "FlowMatchEulerDiscreteScheduler",
    "HeunDiscreteScheduler",
    "LMSDiscreteScheduler",
    "PNDMScheduler",
    "UniPCMultistepScheduler",
)
_TEXT_ENCODERS = _named(
    transformers,
    "BertModel",
    "CLIPTextModel",
    "CLIPTextModelWithProjection",
    "Gemma2Model",
    "LlamaModel",
    "ModernBertModel",
    "Qwen2Model",
    "T5EncoderModel",
    "XLMRobertaModel",
)
_TOKENIZERS = _named(
    transformers, "AutoTokenizer", "CLIPTokenizer", "CLIPTokenizerFast", "T5Tokenizer", "T5TokenizerFast"
)
_TRANSFORMERS = {
    **_named(diffusers, "FluxTransformer2DModel", "PixArtTransformer2DModel", "SD3Transformer2DModel"),
    "MMDiTRope": MMDiTRope,
}

ALLOWED: Mapping[str, Mapping[str, type]] = {
    "vae": {"AutoencoderKL": diffusers.AutoencoderKL},
    "unet": {"UNet2DConditionModel": diffusers.UNet2DConditionModel},
    "transformer": _TRANSFORMERS,
    "text_encoder": _TEXT_ENCODERS,
    "text_encoder_2": _TEXT_ENCODERS,
    "text_encoder_3": _TEXT_ENCODERS,
    "tokenizer": _TOKENIZERS,
    "tokenizer_2": _TOKENIZERS,
    "tokenizer_3": _TOKENIZERS,
    "noise_scheduler_training": _SCHEDULERS,
    "noise_scheduler_inference": _SCHEDULERS,
}

DEFAULT_TARGET: Mapping[str, str] = {
    "vae": "AutoencoderKL",
    "unet": "UNet2DConditionModel",
    "transformer": "SD3Transformer2DModel",
    "text_encoder": "CLIPTextModel",
    "text_encoder_2": "CLIPTextModelWithProjection",
    "text_encoder_3": "T5EncoderModel",
    "tokenizer": "CLIPTokenizer",
    "tokenizer_2": "CLIPTokenizer",
    "tokenizer_3": "T5TokenizerFast",
    "noise_scheduler_training": "DDPMScheduler",
    "noise_scheduler_inference": "DDIMScheduler",
}


def class_of(part: str, target: str | None) -> type:
    """The class for `model.<part>.target`; null is the part's usual class.

    Args:
        target: class name, with or without `diffusers.` or `transformers.` in front.

    Raises:
        ConfigError: for a class that is not on the list.
    """
    name = target or DEFAULT_TARGET[part]
    bare = name.removeprefix("diffusers.").removeprefix("transformers.")
    allowed = ALLOWED[part]
    if bare not in allowed:
        raise ConfigError(f"model.{part}.target: {name!r} is not allowed; use one of {', '.join(sorted(allowed))}")
    return allowed[bare]


def check_params(part: str, constructor: Callable[..., Any], params: Mapping[str, Any]) -> list[str]:
    """One problem per parameter that the constructor does not take, with the nearest one that it does."""
    accepted = [name for name in inspect.signature(constructor).parameters if name not in {"self", "kwargs"}]
    problems = []
    for name in params:
        if name not in accepted:
            near = difflib.get_close_matches(name, accepted, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; it takes {', '.join(accepted)}"
            problems.append(f"model.{part}.params.{name}: {constructor.__qualname__} has no such parameter{hint}")
    return problems
