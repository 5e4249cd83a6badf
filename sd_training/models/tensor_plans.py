"""How tensor parallelism cuts transformer blocks (Shoeybi et al. 2019, arXiv:1909.08053, section 3): the first matrix
of a pair by columns, the second by rows, so that one sum per pair is all that processes exchange."""

from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel

from sd_training.errors import ConfigError

_ATTENTION_IN = ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj")
_ATTENTION_OUT = ("to_out.0", "to_add_out")
_NORMS = ("norm_q", "norm_k", "norm_added_q", "norm_added_k")


def attention_plan(block: nn.Module, names: Iterable[str], size: int, head_axis: int) -> dict[str, ParallelStyle]:
    """Heads of diffusers' attention layers, dealt out; the layers are told how many they have left.

    Args:
        names: attention layers of the block; those it lacks are left out.
        size: processes that share a block.
        head_axis: axis of the heads where queries and keys are normed. Their norms see some of the heads only, so the
            gradients of their weights are summed over the processes.

    Raises:
        ConfigError: the heads cannot be dealt out evenly.
    """
    plan: dict[str, ParallelStyle] = {}
    for name in present(block, names):
        layer: Any = block.get_submodule(name)
        if layer.heads % size:
            raise ConfigError(
                f"distributed.mesh.tensor: is {size}, but the attention layers have {layer.heads} heads, which it does "
                "not divide"
            )
        layer.heads //= size
        plan |= {f"{name}.{matrix}": ColwiseParallel() for matrix in present(layer, _ATTENTION_IN)}
        plan |= {f"{name}.{matrix}": RowwiseParallel() for matrix in present(layer, _ATTENTION_OUT)}
        norms = present(layer, _NORMS)
        plan |= {f"{name}.{norm}": SequenceParallel(sequence_dim=head_axis, use_local_output=True) for norm in norms}
    return plan


def mlp_plan(block: nn.Module, first: Iterable[str], second: Iterable[str]) -> dict[str, ParallelStyle]:
    """Matrices into the hidden width by columns, out of it by rows."""
    plan: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in present(block, first)}
    return plan | {name: RowwiseParallel() for name in present(block, second)}


def present(module: nn.Module, names: Iterable[str]) -> list[str]:
    """Those of the submodules that there are."""
    found = dict(module.named_modules())
    return [name for name in names if name in found]
