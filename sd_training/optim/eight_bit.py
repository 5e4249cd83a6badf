"""AdamW with 8-bit state (Dettmers et al. 2022, arXiv:2110.02861) from bitsandbytes."""

from typing import Any

import torch

from sd_training.errors import ConfigError
from sd_training.optim.skipped_steps import SkippingOptimizer


def require_cuda() -> None:
    """8-bit kernels are made for GPUs; on the CPU they would be many times slower than fp32 ones.

    Raises:
        ConfigError: there is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise ConfigError("optimizer.name: adamw_8bit needs a CUDA device, and there is none; use optimizer.name=adamw")


def eight_bit_adamw(library: Any) -> Any:
    """`AdamW8bit` as a class that skips marked steps and calls the hooks of `load_state_dict`.

    Args:
        library: the module `bitsandbytes.optim`.
    """

    class AdamW8bit(SkippingOptimizer, library.AdamW8bit):
        """The library's own loading calls no hooks."""

        def update(self) -> None:
            library.AdamW8bit.step(self)

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            super().load_state_dict(state_dict)
            for hook in self._optimizer_load_state_dict_post_hooks.values():
                hook(self)

    return AdamW8bit
