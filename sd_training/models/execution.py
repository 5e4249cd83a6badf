"""How networks are executed: torch.compile, memory format, recomputed activations, float8, weights in autocast's type.

Everything but `autocast_copy` changes the network in place and keeps the names of modules, weights and exports. Blocks
of the same class and shapes share compiled graphs, so block by block starts sooner than the whole network; shapes are
static: one set of graphs per bucket size. Recomputation (Chen et al. 2016, arXiv:1604.06174) replaces only `forward` of
a block, so later wrapping or compilation sees an ordinary block.
"""

import copy
import os
import re
import shutil
import sysconfig
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import MethodType
from typing import Any, Literal

import torch
import torch._dynamo
import torch._functorch.config
from torch import nn
from torch.utils.checkpoint import checkpoint

from sd_training.errors import ConfigError

_COMPILERS = {"cpu": ("CXX", "g++", "clang++", "c++"), "cuda": ("CC", "gcc", "clang", "cc")}
"""Environment variable that names the compiler, then the names that are tried."""
_SPARE_GRAPHS = 16
_CODE_FOLDER = "TORCHINDUCTOR_CACHE_DIR"
"""Environment variable in which torch.compile looks for the folder of generated code."""
_ONCE_PER_SAMPLE = re.compile(r"(^|\.)(norm|condition$|modulation$)")
"""Names of layers that see one row per sample: they compute scales and shifts of adaptive norms."""


def compile_blocks(
    blocks: list[nn.Module],
    *,
    num_sizes: int,
    backend: str = "inductor",
    mode: str = "default",
    budget: float = 1.0,
) -> None:
    """Compiles each block by itself, when it first runs.

    Args:
        blocks: the denoiser's repeated blocks, or the denoiser as the only one, and the autoencoder's encoder; compiled
            in place. All that the process compiles: the limits are set for these.
        num_sizes: bucket sizes of the run; each has its own graphs.
        backend, mode: of torch.compile.
        budget: share of the activations that a graph may keep for its backward pass.
    """
    # torch.compile counts graphs per function, and all modules are called through the same one; beyond its own limit of
    # 8 it would silently stop compiling. Twice, because the first graphs of a block may be made for another autocast or
    # autograd state.
    config, count = torch._dynamo.config, 2 * num_sizes * len(blocks) + _SPARE_GRAPHS
    config.recompile_limit = max(config.recompile_limit, count)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, count)
    torch._functorch.config.activation_memory_budget = budget
    for block in blocks:
        block.compile(dynamic=False, backend=backend, mode=mode)


def keep_compiled_code(folder: Path) -> None:
    """Makes torch.compile write its code to a folder, and find it there at the next start; without effect where the
    environment names a folder.

    What torch finds there it runs. Its own default is a folder in /tmp that anybody may have made before.

    Raises:
        ConfigError: the folder cannot be made, or others than this user may write to it.
    """
    if os.environ.get(_CODE_FOLDER):
        return
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise ConfigError(f"trainer.compile: {folder} cannot be made: {error.strerror}") from error
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise ConfigError(
            f"trainer.compile: {folder} holds code that is run, but others may write to it; remove it, or name another "
            f"folder in {_CODE_FOLDER}"
        )
    os.environ[_CODE_FOLDER] = str(folder.absolute())


def require_compiler(accelerator: str, mode: str = "default") -> None:
    """Checks for what torch.compile needs beside Python packages, before a run starts.

    Args:
        accelerator: "cpu" or "cuda".
        mode: of torch.compile.

    Raises:
        ConfigError: no C++ compiler (CPU), no Triton or C compiler (CUDA), no header files of Python, or a mode that
            does nothing on this device.
    """
    if mode == "reduce-overhead" and accelerator != "cuda":
        raise ConfigError(f"trainer.compile_mode: {mode} is CUDA graphs, and this run is on {accelerator}; use default")
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
        raise ConfigError(f"trainer.compile: needs {' and '.join(missing)}; or set trainer.compile=off")


def wants_channels_last(option: Literal["auto"] | bool, accelerator: str, *, is_frozen: bool = False) -> bool:
    """Value of `trainer.channels_last` for a network on this kind of device. `auto`: everything on CUDA; of a CPU a
    frozen autoencoder, which encodes 3 to 20 % faster, while the backward pass of a UNet is slower.

    A convolution whose kernel has its channels last returns the same layout for any input, so inputs need no
    conversion. Values, shapes and exports stay the same.
    """
    if option != "auto":
        return option
    return accelerator == "cuda" or (accelerator == "cpu" and is_frozen)


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


def require_float8(accelerator: str) -> None:
    """Checks for what `model.float8` needs of the machine.

    Raises:
        ConfigError: no GPU with float8, or no torchao.
    """
    if accelerator != "cuda":
        raise ConfigError(f"model.float8: needs a CUDA GPU, and this run is on {accelerator}; remove it")
    if (version := torch.cuda.get_device_capability()) < (8, 9):
        own = f"{torch.cuda.get_device_name()} has {version[0]}.{version[1]}"
        raise ConfigError(f"model.float8: needs compute capability 8.9 or more, but {own}; remove it")
    if find_spec("torchao") is None:
        raise ConfigError("model.float8: needs the package torchao; pip install torchao, or remove it")


def use_float8(blocks: Sequence[nn.Module], recipe: str, *, is_emulated: bool = False) -> str:
    """Makes the linear layers of blocks compute in float8, and returns a sentence about how many do. They keep their
    parameters, so whatever reads weights sees an ordinary network.

    Tensor cores want sizes that are multiples of 16; the number of tokens, which the gradient of a weight sums over, is
    filled up with zeros. Layers that see one row per sample cost next to nothing, and stay.

    Args:
        blocks: changed in place; to be called before they are recomputed, compiled or sharded.
        recipe: of torchao.
        is_emulated: computes with float8 numbers in fp32, on any device.

    Raises:
        ConfigError: no layer has such sizes.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # optional, and takes seconds

    layers = [own for block in blocks for own in block.named_modules() if isinstance(own[1], nn.Linear)]
    chosen = {
        layer
        for name, layer in layers
        if layer.in_features % 16 == layer.out_features % 16 == 0 and not _ONCE_PER_SAMPLE.search(name)
    }
    if not chosen:
        raise ConfigError("model.float8: no linear layer of the blocks has sizes that are multiples of 16; remove it")
    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=is_emulated, pad_inner_dim=True)
    for block in blocks:
        convert_to_float8_training(block, config=config, module_filter_fn=lambda layer, _: layer in chosen)
    return f"{len(chosen)} of {len(layers)} linear layers in the blocks compute in float8 ({recipe})"


def narrow_norms(network: nn.Module) -> None:
    """Makes layer norms under autocast take and give activations in its type, where they get such. On CUDA autocast
    widens the input of a norm to fp32, and what follows works on a result of fp32. Torch's kernels compute mean and
    deviation in fp32; group norms stay as they are, because torch keeps their statistics in the type of the input.

    Args:
        network: changed in place; to be called before its blocks are compiled or sharded.
    """
    # Classes of their own know the type they want.
    norms: list[nn.Module] = [module for module in network.modules() if type(module) is nn.LayerNorm]
    for norm in norms:
        norm.forward = MethodType(_narrow_norm, norm)


def _narrow_norm(norm: nn.LayerNorm, x: torch.Tensor) -> torch.Tensor:
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or x.dtype != torch.get_autocast_dtype(kind):
        return nn.LayerNorm.forward(norm, x)
    weight, bias = (own if own is None else own.to(x.dtype) for own in (norm.weight, norm.bias))
    with torch.autocast(kind, enabled=False):
        return nn.functional.layer_norm(x, norm.normalized_shape, weight, bias, norm.eps)


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
