"""Which attention kernels a denoiser runs on."""

from typing import Any

import torch

from sd_training.rank_log import get_logger

log = get_logger(__name__)


def use_fast_attention(denoiser: Any, device: torch.device) -> None:
    """xformers attention where it works, PyTorch's fused attention elsewhere; says which in one line."""
    if device.type != "cuda":
        log.info("model.xformers: no CUDA device here, so PyTorch's fused attention is used instead")
        return
    try:
        denoiser.enable_xformers_memory_efficient_attention()
    except (ImportError, ValueError, NotImplementedError, RuntimeError, ModuleNotFoundError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        log.info(
            f"model.xformers: xformers does not work here ({reason}), so PyTorch's fused attention is used instead"
        )
    else:
        log.info("model.xformers: xformers memory-efficient attention is used")
