"""Pictures from a pipeline, each a function of its prompt and seed alone; and samplers by name for a given model."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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
    the batch size, the device's own generator or the process; the global generators are left as they are. Between
    batches the pipeline is as the caller left it (training mode, progress bar).

    Args:
        pipeline: any text-to-image pipeline of diffusers, already on its device. (Typed as Any: the names that
            diffusers exports are placeholders to a type checker.)
        prompts: one per picture.
        seeds: one per picture.
        height: [pixels]; None is the pipeline's own size.
        width: [pixels]; None is the pipeline's own size.
        num_inference_steps: denoising steps.
        guidance_scale: classifier-free guidance, 1 is off.
        batch_size: pictures per call of the pipeline.
    """
    for start in range(0, len(prompts), batch_size):
        generators = [torch.Generator("cpu").manual_seed(seed) for seed in seeds[start : start + batch_size]]
        with _quiet_evaluation(pipeline):
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


@contextmanager
def _quiet_evaluation(pipeline: Any) -> Iterator[None]:
    """Evaluation mode (dropout would draw from the global generator) and no progress bar; both put back after."""
    modules = [m for part in pipeline.components.values() if isinstance(part, torch.nn.Module) for m in part.modules()]
    modes = [(module, module.training) for module in modules]
    bar: dict[str, Any] | None = getattr(pipeline, "_progress_bar_config", None)
    try:
        for module in modules:
            module.training = False
        pipeline.set_progress_bar_config(**{**(bar or {}), "disable": True})
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        pipeline.set_progress_bar_config(**(bar or {}))


_FLOW_SIGMAS = ("DPMSolverMultistepScheduler", "UniPCMultistepScheduler")
"""Samplers of discrete schedules that can sample flow models as well."""
_NAMES = "DDIM DDPM EulerAncestralDiscrete EulerDiscrete HeunDiscrete LMSDiscrete PNDM"
_DISCRETE = (*(f"{name}Scheduler" for name in _NAMES.split()), *_FLOW_SIGMAS)
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
    if _is_flow(config):
        return _FLOW
    return _EDM if "sigma_data" in config else _DISCRETE


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
    settings = _as_flow(config, name) if _is_flow(config) else dict(config)
    dropped = [key for key, known in _MUST_FOLLOW.items() if settings.get(key, known) != known and key not in options]
    if dropped:
        raise ConfigError(f"scheduler {name}: cannot follow this model's {', '.join(dropped)}; choose another one")
    try:
        return kind.from_config(settings)
    except (ImportError, NotImplementedError, ValueError) as error:
        raise ConfigError(f"scheduler {name}: {' '.join(str(error).split())}") from error


def _as_flow(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The settings of a flow model under the names of the chosen class: diffusers has two names for each."""
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
