"""Which attention kernels a denoiser runs on."""

from typing import Any

import torch
from diffusers import ModelMixin

from sd_training.rank_log import get_logger

log = get_logger(__name__)

_HOOK = "set_use_memory_efficient_attention_xformers"
"""Method of the attention modules that diffusers can switch to xformers; networks have one of this name, too, which
calls those of their modules and does nothing where there is none."""


def xformers_problems(denoiser: Any) -> list[str]:
    """Why `model.xformers` cannot have an effect on this network, on whatever device; empty when it can."""
    if _switchable(denoiser):
        return []
    name = type(denoiser).__name__
    return [
        f"model.xformers: true, but {name} has no attention that diffusers can run on xformers; it runs on PyTorch's "
        "fused attention: set model.xformers=false"
    ]


def use_fast_attention(denoiser: Any, device: torch.device) -> None:
    """xformers attention where it works, PyTorch's fused attention elsewhere; logs which of them runs."""
    reason = "there is no CUDA device"
    if device.type == "cuda":
        try:
            denoiser.enable_xformers_memory_efficient_attention()
            reason = "diffusers has not switched to it"
        except (ImportError, AttributeError, ValueError, NotImplementedError, RuntimeError) as error:
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
    log.info(f"model.xformers: {attention_sentence(denoiser, reason)}")


def attention_sentence(denoiser: Any, reason: str) -> str:
    """What the attention of a network runs on, from the network itself; `reason`: why it is not xformers."""
    modules, name = _switchable(denoiser), type(denoiser).__name__
    switched = sum(_runs_on_xformers(module) for module in modules)
    if switched == 0:
        return f"{name} runs on PyTorch's fused attention instead ({reason})"
    return f"{switched} of {len(modules)} attention modules of {name} run on xformers"


def _switchable(denoiser: Any) -> list[Any]:
    return [module for module in denoiser.modules() if hasattr(module, _HOOK) and not isinstance(module, ModelMixin)]


def _runs_on_xformers(module: Any) -> bool:
    """diffusers either exchanges the processor, or names a backend in it."""
    processor = module.processor
    backend = getattr(processor, "_attention_backend", None)
    return "XFormers" in type(processor).__name__ or getattr(backend, "value", None) == "xformers"
