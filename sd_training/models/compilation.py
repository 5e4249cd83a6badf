"""torch.compile of a denoiser, in place: names of modules, weights and exports stay what they are.

Blocks of the same class and shapes share their graphs, so block by block starts sooner than the whole network, and
what shards or wraps the blocks keeps working. Shapes are static: one set of graphs per bucket size.
"""

import os
import platform
import shutil
import sysconfig
from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path

import torch
import torch._dynamo
from torch import nn

from sd_training.errors import ConfigError

_CXX_COMPILERS = ("g++", "clang++", "c++")
_C_COMPILERS = ("gcc", "clang", "cc")
_SPARE_GRAPHS = 16


def compile_blocks(blocks: list[nn.Module], *, num_sizes: int, backend: str = "inductor") -> None:
    """Compiles each block by itself, when it first runs.

    Args:
        blocks: the denoiser's repeated blocks; compiled in place.
        num_sizes: bucket sizes of the run; each has graphs of its own.
        backend: of torch.compile.
    """
    # torch.compile counts graphs per function, and all modules are called through the same one. Twice, because
    # the first graphs of a block may be made for another autocast or autograd state.
    allow_graphs(2 * num_sizes * len(blocks) + _SPARE_GRAPHS)
    for block in blocks:
        block.compile(dynamic=False, backend=backend)


def compile_whole(denoiser: nn.Module, *, num_sizes: int, backend: str = "inductor") -> None:
    """Compiles the network as one; arguments as of `compile_blocks`."""
    compile_blocks([denoiser], num_sizes=num_sizes, backend=backend)


def allow_graphs(count: int) -> None:
    """Lets torch.compile keep `count` graphs of one function; beyond its own limit of 8 it would silently stop
    compiling."""
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, count)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, count)


def graphs_compiled() -> int:
    """Graphs that torch.compile has made in this process so far."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def without_compiling() -> AbstractContextManager[None]:
    """Inside this scope compiled modules run as they were written: other batch sizes and shapes make no graphs."""
    scope: AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
    return scope


def require_compiler(accelerator: str) -> None:
    """Looks for what torch.compile needs beside Python packages, before a run starts.

    Args:
        accelerator: "cpu" or "cuda".

    Raises:
        ConfigError: no C++ compiler (CPU), no Triton or C compiler (CUDA), or no headers of Python.
    """
    names, variable = (_C_COMPILERS, "CC") if accelerator == "cuda" else (_CXX_COMPILERS, "CXX")
    chosen = os.environ.get(variable)
    if not any(shutil.which(name) for name in ((chosen,) if chosen else names)):
        given = f"{variable}={chosen}" if chosen else f"none of {', '.join(names)}"
        raise ConfigError(
            f"trainer.compile: needs a {'C' if accelerator == 'cuda' else 'C++'} compiler, but {given} is found; "
            f"install one (Debian: apt-get install g++), name it in {variable}, or set trainer.compile=false"
        )
    if accelerator == "cuda" and find_spec("triton") is None:
        raise ConfigError(
            "trainer.compile: needs Triton on CUDA, which is not installed; install it (pip install triton) or set "
            "trainer.compile=false"
        )
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.exists():
        raise ConfigError(
            f"trainer.compile: needs the headers of Python, but {header} does not exist; install them (Debian: "
            f"apt-get install python{platform.python_version().rpartition('.')[0]}-dev) or set trainer.compile=false"
        )
