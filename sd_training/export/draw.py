"""Pictures from a pipeline, each a function of its prompt and seed alone; and samplers by name for a given model."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import diffusers
import torch
from PIL import Image

from sd_training.errors import ConfigError


def draw_images(
    pipeline: Any,
    prompts: Sequence[str],
    seeds: Sequence[int],
    *,
    height: int | None,
    width: int | None,
    num_inference_steps: int,
    guidance_scale: float,
    batch_size: int,
) -> Iterator[Image.Image]:
    """Draws one picture per prompt, in order, `batch_size` at a time.

    All noise comes from one CPU generator per picture, so a picture depends on its seed and not on its neighbours,
    the batch size, the device's own generator or the process; the global generators are left as they are. The
    pipeline's progress bar is disabled.

    Args:
        pipeline: any text-to-image pipeline of diffusers, on its device and in evaluation mode, as `load_pipeline`
            gives it: dropout would draw from the global generator. (Typed as Any: the names that diffusers exports are
            placeholders to a type checker.)
        prompts: one per picture.
        seeds: one per picture.
        height: [pixels]; None is the pipeline's own size.
        width: [pixels]; None is the pipeline's own size.
        num_inference_steps: denoising steps.
        guidance_scale: classifier-free guidance, 1 is off.
        batch_size: pictures per call of the pipeline.
    """
    pipeline.set_progress_bar_config(disable=True)
    for start in range(0, len(prompts), batch_size):
        generators = [torch.Generator("cpu").manual_seed(seed) for seed in seeds[start : start + batch_size]]
        result = pipeline(
            prompt=list(prompts[start : start + batch_size]),
            generator=generators,
            height=height,
            width=width,
            num_inference_steps=num_inference_steps,
            **_guidance(pipeline, guidance_scale),
        )
        yield from result.images


def _guidance(pipeline: Any, scale: float) -> dict[str, Any]:
    """Arguments of the pipeline for classifier-free guidance and for the requested sizes."""
    match type(pipeline).__name__:
        case "FluxPipeline" if not pipeline.transformer.config.guidance_embeds:
            return {"true_cfg_scale": scale, "negative_prompt": "" if scale > 1 else None}
        case "PixArtSigmaPipeline":
            return {"guidance_scale": scale, "use_resolution_binning": False, "clean_caption": False}
        case _:  # a guidance-distilled FLUX takes it as an input of the transformer
            return {"guidance_scale": scale}


_FLOW_SIGMAS = ("DPMSolverMultistepScheduler", "UniPCMultistepScheduler")
"""Samplers of discrete schedules that can sample flow models as well."""
_NAMES = "DDIM DDPM EulerAncestralDiscrete EulerDiscrete HeunDiscrete LMSDiscrete PNDM"
_DISCRETE = (*(f"{name}Scheduler" for name in _NAMES.split()), *_FLOW_SIGMAS)
_FLOW = ("FlowMatchEulerDiscreteScheduler", "FlowMatchHeunDiscreteScheduler", *_FLOW_SIGMAS)
_EDM = ("EDMDPMSolverMultistepScheduler", "EDMEulerScheduler")
_SCALING = ("StableDiffusionPipeline", "StableDiffusionXLPipeline", "PixArtSigmaPipeline")
"""Pipelines that call `scale_model_input`, which the samplers of flow models alone do not have."""
SAMPLERS = tuple(sorted({*_DISCRETE, *_FLOW, *_EDM}))
"""The allow-list; names are diffusers' class names."""

_MUST_FOLLOW = {"prediction_type": "epsilon", "rescale_betas_zero_snr": False, "trained_betas": None}
"""Settings of the model (with the value that every sampler knows) that a sampler may not drop."""


def samplers_for(config: Mapping[str, Any], pipeline: str = "") -> tuple[str, ...]:
    """The samplers that can follow a model whose own scheduler has this configuration, in a pipeline of this class."""
    if not _is_flow(config):
        return _EDM if "sigma_data" in config else _DISCRETE
    if config.get("use_dynamic_shifting"):  # a shift by tokens
        return _FLOW[:1]
    if pipeline == "FluxPipeline":  # it chooses the noise levels itself
        return (_FLOW[0], "UniPCMultistepScheduler")
    return _FLOW_SIGMAS if pipeline in _SCALING else _FLOW


def _is_flow(config: Mapping[str, Any]) -> bool:
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
    if name not in (known := samplers_for(config, pipeline)):
        raise ConfigError(f"scheduler {name}: is none of those that can follow this model: {', '.join(known)}")
    kind = getattr(diffusers, name)
    options = inspect.signature(kind.__init__).parameters
    settings = _as_flow(config, name) if _is_flow(config) else dict(config)
    dropped = [key for key, usual in _MUST_FOLLOW.items() if settings.get(key, usual) != usual and key not in options]
    if dropped:
        raise ConfigError(f"scheduler {name}: cannot follow this model's {', '.join(dropped)}; choose another one")
    try:
        return kind.from_config(settings)
    except (ImportError, NotImplementedError, ValueError) as error:
        raise ConfigError(f"scheduler {name}: {' '.join(str(error).split())}") from error


def _as_flow(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The settings of a flow model under the names of the chosen class: diffusers has two names for each."""
    factor = config["shift"] if "shift" in config else config.get("flow_shift")
    if name in _FLOW_SIGMAS:
        count = {"num_train_timesteps": config.get("num_train_timesteps", 1000)}
        return {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": factor or 1.0, **count}
    plain = {key: value for key, value in config.items() if key != "prediction_type"}
    return {**plain, "shift": factor or 1.0}
