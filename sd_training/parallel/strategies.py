"""Lightning's strategies with this trainer's saves. Each class says only what is different about its engine."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
from pytorch_lightning.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from sd_training.config.plan import Mesh
from sd_training.parallel.saves import WholeCheckpoints
from sd_training.parallel.sharding import DTensorSharding, ReplicatedSharding


@dataclass(frozen=True)
class ShardingSpec:
    """What of the trained module may be cut."""

    roots: Sequence[nn.Module]
    """Networks that are called as a whole: together they have every trained parameter."""
    blocks: Sequence[nn.Module] = ()
    """Repeated blocks inside them, cut one by one so that only one is whole at a time."""
    tensor_plan: "TensorPlan | None" = None
    """How tensor parallelism cuts a block, where the family can."""


class TensorPlan(Protocol):
    """Block → its layers' styles; also tells the block that it has a part of its heads only."""

    def __call__(self, block: nn.Module, size: int) -> dict[str, ParallelStyle]:
        """Called once per block."""


@dataclass(frozen=True)
class FSDP2Options:
    """How FSDP2 keeps the blocks."""

    low_precision: torch.dtype | None = None
    """Type in which weights are gathered and used; gradients are reduced in fp32."""
    reshard_after_forward: bool = True
    offload: bool = False


class SingleProcessStrategy(WholeCheckpoints, SingleDeviceStrategy):
    """One process, without a process group."""

    def make_sharding(self) -> ReplicatedSharding:
        """Everything is here."""
        return ReplicatedSharding(_trained(self), self.optimizers[0], 1)


class ReplicatedStrategy(WholeCheckpoints, DDPStrategy):
    """DDP (Li et al. 2020, arXiv:2006.15704): every process has every weight and averages gradients."""

    @property
    def num_replicas(self) -> int:  # type: ignore[override]
        """Every process."""
        return self.world_size

    def make_sharding(self) -> ReplicatedSharding:
        """Averages and files are dealt out."""
        return ReplicatedSharding(_trained(self), self.optimizers[0], self.world_size)


class FSDP2Strategy(WholeCheckpoints, ModelParallelStrategy):
    """FSDP2, hybrid sharding and tensor parallelism: weights, gradients and optimizer state in blocks.

    Args:
        mesh: processes by axis.
        cuts: what is cut.
        options: how it is kept.
        backend: communication library.
        timeout: how long processes wait for each other; null: as long as torch likes.
    """

    has_collective_forward = True

    def __init__(
        self, mesh: Mesh, cuts: ShardingSpec, options: FSDP2Options, backend: str, timeout: timedelta | None = None
    ) -> None:
        super().__init__(process_group_backend=backend, save_distributed_checkpoint=False, timeout=timeout)
        self.mesh, self.cuts, self.options = mesh, cuts, options
        self.tensor_parallel_size = mesh.tensor
        self.num_replicas = mesh.data

    def setup_environment(self) -> None:
        """Lightning knows two axes; here are three."""
        super(ModelParallelStrategy, self).setup_environment()
        self._setup_distributed()
        sizes = (self.mesh.data, self.mesh.fsdp, self.mesh.tensor)
        self._device_mesh = init_device_mesh(self.root_device.type, sizes, mesh_dim_names=("data", "fsdp", "tensor"))
        self.lightning_module._device_mesh = self._device_mesh

    def cut(self) -> None:
        """ShardingSpec the networks; called from `configure_model`, before the optimizer is made."""
        mesh = self.device_mesh
        if self.mesh.tensor > 1:
            assert self.cuts.tensor_plan is not None
            for block in self.cuts.blocks:
                plan = self.cuts.tensor_plan(block, self.mesh.tensor)
                if plan:
                    parallelize_module(block, mesh["tensor"], plan)
        shared = mesh["data", "fsdp"] if self.mesh.data > 1 else mesh["fsdp"]
        for module in [*self.cuts.blocks, *self.cuts.roots]:
            fully_shard(module, mesh=shared, **self._policies())
            _keep_recording(module)

    def _policies(self) -> dict[str, Any]:
        """Inputs keep their type: timesteps in bf16 would be rounded."""
        low = self.options.low_precision
        precision = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32, cast_forward_inputs=False)
        # Only CUDA knows pinned memory.
        offload = CPUOffloadPolicy(torch.cuda.is_available()) if self.options.offload else OffloadPolicy()
        return {
            "mp_policy": precision,
            "offload_policy": offload,
            "reshard_after_forward": self.options.reshard_after_forward,
        }

    def model_to_device(self) -> None:
        """What is offloaded stays on the CPU; FSDP2 has moved the rest."""
        if not self.options.offload:
            super().model_to_device()

    def make_sharding(self) -> DTensorSharding:
        """Blocks of DTensors."""
        return DTensorSharding(self.optimizers[0], self.lightning_module.modules())


def _trained(strategy: Any) -> list[nn.Parameter]:
    return [p for p in strategy.lightning_module.parameters() if p.requires_grad]


def _keep_recording(module: nn.Module) -> None:
    """transformers looks up by class which states a text encoder can return, and FSDP2 has given it another class."""
    recorded = getattr(module, "_can_record_outputs", None)
    if recorded is None:
        return
    from transformers.utils import output_capturing

    output_capturing._CAN_RECORD_REGISTRY[module] = recorded
