"""What a pipeline is drawn with besides its own parts: another sampler, another denoiser's weights, adapters (LoRA),
ControlNets, and pictures to begin with.

Everything is read from safetensors on disk; the classes are diffusers' own. A sampler is made from the configuration of
the pipeline's own, so that it follows what the model was trained for; one that cannot is refused, because it would
silently draw wrong pictures.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from sd_training.config.schema import PartConfig
from sd_training.errors import ConfigError
from sd_training.models.families import sets_noise_levels
from sd_training.models.load import check_params, load_part
from sd_training.models.schedulers import FLOW_SAMPLER, UNET_FLOW_SAMPLER

_CONTROLNETS = {"StableDiffusion3": "SD3ControlNetModel", "Flux": "FluxControlNetModel"}
"""Begins the pipeline's name → class; others have a UNet."""


@dataclass(frozen=True)
class Additions:
    """Files and folders, with the weight of each."""

    denoiser: Path | None = None
    """Safetensors file of the UNet or transformer, with the names of diffusers."""
    loras: Sequence[tuple[Path, float]] = ()
    """Safetensors files of adapters."""
    controlnets: Sequence[tuple[Path, float]] = ()
    """Folders in diffusers' layout."""
    has_init_images: bool = False
    """Whether pictures begin with others (image-to-image)."""

    def pipeline_class(self, name: str) -> Any:
        """The class of diffusers that draws so, for a text-to-image pipeline of class `name`; None if there is none."""
        if not self.controlnets and not self.has_init_images:
            return getattr(diffusers, name, None)
        task = "ControlNet" * bool(self.controlnets) + "Img2Img" * self.has_init_images
        return getattr(diffusers, f"{name.removesuffix('Pipeline')}{task}Pipeline", None)

    def extend(self, pipeline: Any) -> Any:
        """The pipeline that draws so, of the parts of a text-to-image pipeline, which are changed in place.

        Raises:
            ConfigError: a file or folder is damaged, or does not fit the pipeline; names the option of
                scripts/generate_examples.py.
        """
        name, dtype = type(pipeline).__name__, pipeline.dtype
        if self.denoiser is not None:
            _load_denoiser(pipeline, self.denoiser)
        if self.loras:
            _load_loras(pipeline, self.loras)
        kind = self.pipeline_class(name)
        if kind is type(pipeline):
            return pipeline
        target = next((target for begin, target in _CONTROLNETS.items() if name.startswith(begin)), "ControlNetModel")
        nets = [
            load_part("controlnet", PartConfig(pretrained=str(path), target=target), seed=0, option="--controlnet")
            for path, _ in self.controlnets
        ]
        for net, (path, _) in zip(nets, self.controlnets, strict=True):
            _check_controlnet(pipeline, net, path)
        extra = {"controlnet": nets if len(nets) > 1 else nets[0]} if nets else {}
        return kind.from_pipe(pipeline, torch_dtype=dtype, **extra)

    def options(self) -> dict[str, Any]:
        """Arguments for `draw_images`."""
        scales = [scale for _, scale in self.controlnets]
        return {"controlnet_conditioning_scale": scales if len(scales) > 1 else scales[0]} if scales else {}


def _denoiser(pipeline: Any) -> Any:
    return pipeline.components.get("unet") or pipeline.transformer


def _check_controlnet(pipeline: Any, net: Any, path: Path) -> None:
    """Raises ConfigError where its settings are not those of the denoiser that it works beside."""
    for key in ("in_channels", "cross_attention_dim", "block_out_channels"):
        own, other = _denoiser(pipeline).config.get(key), net.config.get(key)
        if own is not None and other is not None and own != other:
            where = f"the denoiser of {type(pipeline).__name__}"
            raise ConfigError(f"--controlnet: {path} has {key}={other}, and {where} has {own}")


def _load_denoiser(pipeline: Any, path: Path) -> None:
    network = _denoiser(pipeline)
    try:
        network.load_state_dict(load_file(path))
    except (OSError, SafetensorError, RuntimeError) as error:
        raise _misfit("--denoiser", path, network, error) from error


def _load_loras(pipeline: Any, loras: Sequence[tuple[Path, float]]) -> None:
    names = [f"lora_{i}" for i in range(len(loras))]
    for name, (path, _) in zip(names, loras, strict=True):
        options = {"weight_name": path.name, "local_files_only": True, "use_safetensors": True}
        try:
            pipeline.load_lora_weights(str(path.parent), adapter_name=name, **options)
            if not any(name in own for own in pipeline.get_list_adapters().values()):
                raise ValueError("none of its tensors is of a part of it")
        except Exception as error:  # files of other models make it raise many kinds
            raise _misfit("--lora", path, pipeline, error) from error
    with torch.no_grad():
        pipeline.set_adapters(names, [weight for _, weight in loras])


def _misfit(option: str, path: Path, owner: Any, error: Exception) -> ConfigError:
    return ConfigError(f"{option}: {path} does not fit {type(owner).__name__} ({' '.join(str(error).split())[:300]})")


_FLOW_SIGMAS = ("DPMSolverMultistepScheduler", UNET_FLOW_SAMPLER)
"""Samplers of discrete schedules that can sample flow models as well."""
_NAMES = "DDIM DDPM EulerAncestralDiscrete EulerDiscrete HeunDiscrete LMSDiscrete PNDM"
_DISCRETE = (*(f"{name}Scheduler" for name in _NAMES.split()), *_FLOW_SIGMAS)
_FLOW = (FLOW_SAMPLER, "FlowMatchHeunDiscreteScheduler", *_FLOW_SIGMAS)
_EDM = ("EDMDPMSolverMultistepScheduler", "EDMEulerScheduler")
_FEW_STEPS = ("LCMScheduler",)
"""Samplers that only draw with what was distilled for them (Luo et al. 2023, arXiv:2310.04378): they take every answer
for a finished picture, and add new noise to it."""
_SCALING = ("StableDiffusionPipeline", "StableDiffusionXLPipeline", "PixArtSigmaPipeline")
"""Pipelines that call `scale_model_input`, which the samplers of flow models alone do not have."""
SAMPLERS = tuple(sorted({*_DISCRETE, *_FLOW, *_EDM, *_FEW_STEPS}))
"""The allow-list; names are diffusers' class names."""

_MUST_FOLLOW = {"prediction_type": "epsilon", "rescale_betas_zero_snr": False, "trained_betas": None}
"""Settings of the model (with the value that every sampler knows) that a sampler may not drop."""

NO_PARAMS: Mapping[str, Any] = {}


def samplers_for(config: Mapping[str, Any], pipeline: str = "") -> tuple[str, ...]:
    """The samplers that can follow a model whose own scheduler has this configuration, in a pipeline of this class."""
    if not _is_flow(config):
        return _EDM if "sigma_data" in config else (*_DISCRETE, *_FEW_STEPS)
    if config.get("use_dynamic_shifting"):  # a shift by tokens
        return (FLOW_SAMPLER,)
    if sets_noise_levels(pipeline):
        return (FLOW_SAMPLER, UNET_FLOW_SAMPLER)
    return _FLOW_SIGMAS if pipeline in _SCALING else _FLOW


def _is_flow(config: Mapping[str, Any]) -> bool:
    return bool(config.get("use_flow_sigmas")) or "shift" in config


def make_sampler(
    config: Mapping[str, Any], name: str, pipeline: str = "", params: Mapping[str, Any] = NO_PARAMS, num_steps: int = 10
) -> Any:
    """A sampler of class `name` for the noise schedule and prediction type in `config`.

    Args:
        config: configuration of the pipeline's own scheduler.
        name: one of `SAMPLERS`.
        pipeline: class of the pipeline that it is for.
        params: settings of the class that replace those in `config`.
        num_steps: denoising steps that it must be able to make.

    Raises:
        ConfigError: unknown name or parameter, or that sampler cannot follow this model, so that it would silently draw
            wrong pictures.
    """
    if name not in (known := samplers_for(config, pipeline)):
        raise ConfigError(f"scheduler {name}: is none of those that can follow this model: {', '.join(known)}")
    kind = getattr(diffusers, name)
    check_params("--scheduler-", kind, params)
    settings = {**(_as_flow(config, name) if _is_flow(config) else config), **params}
    options = inspect.signature(kind.__init__).parameters
    dropped = [key for key, usual in _MUST_FOLLOW.items() if settings.get(key, usual) != usual and key not in options]
    if dropped:
        raise ConfigError(f"scheduler {name}: cannot follow this model's {', '.join(dropped)}; choose another one")
    try:
        sampler = kind.from_config(settings, **params)  # of a dict alone it leaves out what its owner had by default
        if not settings.get("use_dynamic_shifting"):  # which asks for the size of a picture
            sampler.set_timesteps(num_steps)
        return sampler
    except Exception as error:  # wrong values make them raise many kinds
        raise ConfigError(f"scheduler {name}: {' '.join(str(error).split())}") from error


def _as_flow(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The settings of a flow model under the names of the chosen class: diffusers has two names for each."""
    factor = config["shift"] if "shift" in config else config.get("flow_shift")
    if name in _FLOW_SIGMAS:
        count = {"num_train_timesteps": config.get("num_train_timesteps", 1000)}
        return {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": factor or 1.0, **count}
    plain = {key: value for key, value in config.items() if key != "prediction_type"}
    return {**plain, "shift": factor or 1.0}
