"""How networks are executed: torch.compile, attention kernels, memory format, recomputed activations, and weights in
autocast's type.

Everything but `autocast_copy` changes the network in place and keeps the names of modules, weights and exports. Blocks
of the same class and shapes share compiled graphs, so block by block starts sooner than the whole network; shapes are
static: one set of graphs per bucket size. Recomputation (Chen et al. 2016, arXiv:1604.06174) replaces only `forward` of
a block, so later wrapping or compilation sees an ordinary block.
"""

import copy
import os
import shutil
import sysconfig
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from types import MethodType
from typing import Any, Literal

import torch
import torch._dynamo
from diffusers import ModelMixin
from torch import nn
from torch.utils.checkpoint import checkpoint

from sd_training.errors import ConfigError
from sd_training.log import get_logger
from sd_training.models.load import first_line

log = get_logger(__name__)

_COMPILERS = {"cpu": ("CXX", "g++", "clang++", "c++"), "cuda": ("CC", "gcc", "clang", "cc")}
"""Environment variable that names the compiler, then the names that are tried."""
_SPARE_GRAPHS = 16
_HOOK = "set_use_memory_efficient_attention_xformers"
"""Method of the attention modules that diffusers can switch to xformers; networks have one of this name, too, which
calls those of their modules and does nothing where there is none."""


def compile_blocks(blocks: list[nn.Module], *, num_sizes: int, backend: str = "inductor") -> None:
    """Compiles each block by itself, when it first runs.

    Args:
        blocks: the denoiser's repeated blocks, or the denoiser as the only one; compiled in place.
        num_sizes: bucket sizes of the run; each has its own graphs.
        backend: of torch.compile.
    """
    # torch.compile counts graphs per function, and all modules are called through the same one; beyond its own limit of
    # 8 it would silently stop compiling. Twice, because the first graphs of a block may be made for another autocast or
    # autograd state.
    config, count = torch._dynamo.config, 2 * num_sizes * len(blocks) + _SPARE_GRAPHS
    config.recompile_limit = max(config.recompile_limit, count)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, count)
    for block in blocks:
        block.compile(dynamic=False, backend=backend)


def require_compiler(accelerator: str) -> None:
    """Checks for what torch.compile needs beside Python packages, before a run starts.

    Args:
        accelerator: "cpu" or "cuda".

    Raises:
        ConfigError: no C++ compiler (CPU), no Triton or C compiler (CUDA), or no header files of Python.
    """
    variable, *names = _COMPILERS["cuda" if accelerator == "cuda" else "cpu"]
    names = [os.environ[variable]] if variable in os.environ else names
    missing = []
    if not any(map(shutil.which, names)):
        missing.append(f"a compiler ({variable}, {' or '.join(names)}; Debian: apt-get install g++)")
    if not Path(headers := sysconfig.get_path("include"), "Python.h").is_file():
        missing.append(f"the header files of Python in {headers} (Debian: apt-get install python3-dev)")
    if accelerator == "cuda" and find_spec("triton") is None:
        missing.append("Triton (pip install triton)")
    if missing:
        raise ConfigError(f"trainer.compile: needs {' and '.join(missing)}; or set trainer.compile=false")


def xformers_problems(denoiser: Any) -> list[str]:
    """Why `model.xformers` cannot have an effect on this network on any device; empty if it can."""
    if any(hasattr(module, _HOOK) and not isinstance(module, ModelMixin) for module in denoiser.modules()):
        return []
    return [
        f"model.xformers: true, but {type(denoiser).__name__} has no attention that diffusers can run on xformers; it "
        "runs on PyTorch's fused attention: set model.xformers=false"
    ]


def use_fast_attention(denoiser: Any, device: torch.device) -> None:
    """xformers attention where it works, PyTorch's fused attention elsewhere; logs which of them runs."""
    name, kernel = type(denoiser).__name__, "PyTorch's fused attention instead (there is no CUDA device)"
    if device.type == "cuda":
        try:
            denoiser.enable_xformers_memory_efficient_attention()
            kernel = "xformers"
        except (ImportError, AttributeError, ValueError, NotImplementedError, RuntimeError) as error:
            kernel = f"PyTorch's fused attention instead ({first_line(error)})"
    log.info(f"model.xformers: {name} runs on {kernel}")


def wants_channels_last(option: Literal["auto"] | bool, accelerator: str) -> bool:
    """Value of `trainer.channels_last` on this kind of device; `auto` is CUDA only.

    A convolution whose kernel has its channels last returns the same layout for any input, so inputs need no
    conversion. Values, shapes and exports stay the same.
    """
    return accelerator == "cuda" if option == "auto" else option


def recompute_activations(blocks: Sequence[nn.Module]) -> None:
    """Makes every block keep its inputs only while autograd is on.

    Losses and gradients are the same to the bit; random numbers drawn inside (dropout) are drawn again alike.

    Args:
        blocks: changed in place. To be called before blocks are compiled or sharded.
    """
    for block in blocks:
        block.forward = MethodType(_checkpointed, block)  # no closure: a copy of the block then runs the copy's weights


def _checkpointed(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    forward = type(block).forward
    if not torch.is_grad_enabled():
        return forward(block, *args, **kwargs)
    return checkpoint(forward, block, *args, use_reentrant=False, **kwargs)


def autocast_weights(network: nn.Module) -> list[nn.Parameter]:
    """Parameters that autocast casts in every forward pass, and nothing else reads: those of linear layers and
    convolutions. Without the network's first one, by which diffusers and transformers tell the type of a network."""
    own, other = dict[int, nn.Parameter](), {id(next(network.parameters()))}
    for module in network.modules():
        for parameter in module.parameters(recurse=False):
            if isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)):
                own[id(parameter)] = parameter
            else:  # norms and embeddings, some of them tied to a linear layer, compute in fp32
                other.add(id(parameter))
    return [parameter for key, parameter in own.items() if key not in other]


def autocast_copy(network: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A frozen copy with `autocast_weights` in `dtype`. Under autocast to `dtype` it gives the same bits, because these
    layers compute with the cast weights in either case, and the weights, which autocast casts anew in every forward
    pass unless they are trained, are not cast any more."""
    narrow = {id(p): nn.Parameter(p.detach().to(dtype), requires_grad=False) for p in autocast_weights(network)}
    return copy.deepcopy(network, narrow)  # deepcopy takes what it finds in the memo
