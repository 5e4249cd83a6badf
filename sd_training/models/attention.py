"""Which attention kernel runs: what a denoiser calls, what torch chooses for it on this device, and the option.

Every family ends in torch's `scaled_dot_product_attention`, so torch's own switch reaches all of them; diffusers'
`set_attention_backend` reaches FLUX alone. Torch chooses by device, type, width of a head and mask, so a forward pass
without data and torch's own answer for the shapes that it saw say what a run will do.
"""

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from diffusers import ModelMixin
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from sd_training.errors import ConfigError
from sd_training.log import get_logger
from sd_training.models.family import AUTOCAST_DTYPE, Family, blank_batch
from sd_training.models.load import first_line

log = get_logger(__name__)

_HOOK = "set_use_memory_efficient_attention_xformers"
"""Method of the attention modules that diffusers can switch to xformers; networks have one of this name, too, which
calls those of their modules and does nothing where there is none."""
# Where the chosen kernel cannot run a call, such as the autoencoder's single wide head, torch tries those below it.
_KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
_in_force = ExitStack()
"""The choice for this process; torch keeps it as global state, which backward passes and recomputation need."""


class AttentionCall(NamedTuple):
    """A call of `scaled_dot_product_attention`, as far as the choice of a kernel depends on it."""

    query: tuple[int, ...]
    """[B, N, L, E]."""
    key: tuple[int, ...]
    """[B, N, M, E]."""
    dtype: torch.dtype
    mask: tuple[int, ...] | None
    """Shape that broadcasts to [B, N, L, M]."""
    mask_dtype: torch.dtype | None

    def __str__(self) -> str:
        words = [str(self.dtype).removeprefix("torch."), f"heads of {self.query[-1]}"]
        return ", ".join([*words, "no mask" if self.mask is None else "a mask"])


class _Recorder(TorchFunctionMode):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype, self.calls = dtype, Counter[AttentionCall]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.__name__ == "scaled_dot_product_attention":
            named = dict(zip(("query", "key", "value", "attn_mask"), args, strict=False)) | kwargs
            query, key, mask = named["query"], named["key"], named.get("attn_mask")
            shape, mask_dtype = None, None
            if mask is not None:
                shape, mask_dtype = tuple(mask.shape), torch.bool if mask.dtype == torch.bool else self.dtype
            self.calls[AttentionCall(tuple(query.shape), tuple(key.shape), self.dtype, shape, mask_dtype)] += 1
        return func(*args, **kwargs)


def attention_calls(family: Family, size: tuple[int, int], precision: str) -> Counter[AttentionCall]:
    """How often the denoiser calls attention in a forward pass, by kind of call. Runs on the meta device.

    Args:
        family: with or without weights; it is not changed.
        size: height and width [pixels].
        precision: autocast's, which has converted the inputs when a kernel is chosen.
    """
    own, blank = family.denoiser, dict[str, torch.Tensor]()
    for name, tensor in (*own.named_parameters(), *own.named_buffers()):
        dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
        blank[name] = torch.empty(tensor.shape, dtype=dtype, device="meta")
    batch = blank_batch(family, *size, 2, torch.device("meta"))
    with torch.no_grad(), _Recorder(AUTOCAST_DTYPE[precision] or torch.float32) as recorder:
        on_meta: Any = lambda *args, **named: functional_call(own, blank, args, named)  # noqa: E731 - an argument
        family.predict(on_meta, *batch)
    return recorder.calls


def chosen_kernel(call: AttentionCall, device: torch.device) -> str:
    """The kernel that torch takes for such a call in training on a device, as it asks itself."""

    def like(shape: tuple[int, ...]) -> torch.Tensor:
        batch, heads, tokens, width = shape
        tensor = torch.empty(batch, tokens, heads, width, dtype=call.dtype, device=device, requires_grad=True)
        return tensor.transpose(1, 2)

    mask = None if call.mask is None else torch.empty(call.mask, dtype=call.mask_dtype, device=device)
    number = torch._fused_sdp_choice(like(call.query), like(call.key), like(call.key), mask)
    return {backend.value: name for name, backend in _KERNELS.items()}.get(number, "none")


def set_attention(option: str) -> None:
    """Makes torch take a kernel wherever it can run, in all networks of this process; `auto` and `xformers`, which is
    the denoiser's own, leave the choice to torch."""
    _in_force.close()
    if option in _KERNELS:
        order = [*_KERNELS.values()]
        _in_force.enter_context(sdpa_kernel(order[order.index(_KERNELS[option]) :], set_priority=True))


def choose_attention(
    family: Family, option: str, sizes: Sequence[tuple[int, int]], precision: str, device: torch.device
) -> None:
    """Puts `model.attention` in force, and logs which kernels the denoiser runs on; not on a CPU that is left to torch,
    which has one fused kernel.

    Args:
        sizes: heights and widths of the run [pixels]; the largest is asked for.
        precision: of the run.

    Raises:
        ConfigError: the kernel can run no attention of this denoiser on this device.
    """
    network = type(family.denoiser).__name__
    set_attention(option)
    if option == "xformers":
        if problem := _xformers_failure(family.denoiser, device):
            raise ConfigError(f"model.attention: xformers cannot run here ({problem}); use auto")
        log.info(f"attention of {network}: xformers")
        return
    if option == "auto" and device.type == "cpu":
        return
    ran, largest = Counter[str](), max(sizes, key=lambda size: size[0] * size[1])
    for call, count in attention_calls(family, largest, precision).items():
        ran[f"{chosen_kernel(call, device)} ({call})"] += count
    used = ", ".join(f"{count} × {kernel}" for kernel, count in ran.most_common())
    if option in _KERNELS and not any(kernel.startswith(f"{option} ") for kernel in ran):
        set_attention("auto")
        raise ConfigError(
            f"model.attention: {option} can run no attention of {network} on {device.type}, where it is "
            f"{used}; use auto"
        )
    log.info(f"attention of {network} on {device.type}, calls per forward pass: {used}")


def xformers_problems(denoiser: Any, option: str = "model.xformers: true") -> list[str]:
    """Why xformers cannot have an effect on this network on any device; empty if it can.

    Args:
        option: name and value of the option that asks for it.
    """
    if any(hasattr(module, _HOOK) and not isinstance(module, ModelMixin) for module in denoiser.modules()):
        return []
    off = "model.attention=auto" if option.startswith("model.attention") else "model.xformers=false"
    return [
        f"{option}, but {type(denoiser).__name__} has no attention that diffusers can run on xformers; it "
        f"runs on PyTorch's fused attention: set {off}"
    ]


def use_fast_attention(denoiser: Any, device: torch.device) -> bool:
    """`model.xformers`: xformers attention where it works; logs whether it does, and returns it."""
    failure = _xformers_failure(denoiser, device)
    kernel = f"PyTorch's fused attention instead ({failure})" if failure else "xformers"
    log.info(f"model.xformers: {type(denoiser).__name__} runs on {kernel}")
    return not failure


def _xformers_failure(denoiser: Any, device: torch.device) -> str:
    """Switches a denoiser to xformers; why that failed, empty if it did not."""
    if device.type != "cuda":
        return "there is no CUDA device"
    try:
        denoiser.enable_xformers_memory_efficient_attention()
    except (ImportError, AttributeError, ValueError, NotImplementedError, RuntimeError) as error:
        return first_line(error)
    return ""
