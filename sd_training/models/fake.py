"""Networks of fake tensors, which have shapes, types and storages and no memory, run as CUDA would run them."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

DEVICE = torch.device("cpu")
"""Of the fake tensors: PyTorch built for the CPU cannot even pretend to index CUDA tensors."""
FP32_ON_CUDA = frozenset(
    {
        "layer_norm",
        "group_norm",
        "rms_norm",
        "pow",
        "rsqrt",
        "reciprocal",
        "exp",
        "log",
        "softplus",
        "softmax",
        "log_softmax",
        "sum",
        "cumsum",
        "prod",
        "linalg_vector_norm",
        "upsample_nearest2d",
        "upsample_bilinear2d",
        "upsample_bicubic2d",
    }
)
"""What CUDA's autocast does in fp32 and the CPU's does not (AT_FORALL_FP32 in ATen/autocast_mode.h); denoisers and
autoencoders call no other of that list."""


class CudaAutocast(TorchFunctionMode):
    """Makes autocast on the CPU keep what autocast on CUDA would: norms and a few more see fp32 copies of their input.

    Without it a UNet's norms would be counted at half their size.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.__name__.strip("_") in FP32_ON_CUDA:
            args, kwargs = tree_map(_fp32, args), tree_map(_fp32, kwargs)
        return func(*args, **kwargs)


def _fp32(value: Any) -> Any:
    is_narrow = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if is_narrow else value


def fake_copy(network: Any) -> Any:
    """The network with fake tensors in the place of its own; called where tensors are fake."""
    fakes: dict[int, Any] = {
        id(own): torch.empty(own.shape, dtype=own.dtype, device=DEVICE) for own in network.buffers()
    }
    for own in network.parameters():
        tensor = torch.empty(own.shape, dtype=own.dtype, device=DEVICE)
        fakes[id(own)] = nn.Parameter(tensor, requires_grad=own.requires_grad)
    return copy.deepcopy(network, fakes)  # takes what it finds there instead of copying


@contextmanager
def cuda_autocast(precision: str) -> Iterator[None]:
    """Autocast on `DEVICE`, keeping what CUDA would keep.

    Args:
        precision: no (or fp32), bf16 or fp16, which takes the bytes of bf16.
    """
    if precision in ("no", "fp32"):
        yield
        return
    with CudaAutocast(), torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        yield
