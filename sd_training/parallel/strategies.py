"""Lightning's strategies with what the trainer needs beyond Lightning: where weights lie, which samples a rank draws,
the ranks' CPU group. Each class holds only what is different about its engine; DeepSpeed's is in `deepspeed.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from sd_training.config.plan import Mesh
from sd_training.parallel.cpu_group import CpuGroup
from sd_training.parallel.sharding import DTensorSharding, ParameterSharding, ReplicatedSharding


class TrainingStrategy:
    """What every strategy of a run offers. Mixed into Lightning's classes, before them."""

    has_collective_forward = False
    """Whether a forward pass of the network is a collective operation."""
    clips_gradients = False
    """Whether the engine clips gradients and skips non-finite steps itself."""
    tensor_parallel_size = 1
    """Ranks that draw the same samples."""
    num_replicas = 1
    """Copies of all weights that are updated alike, from the same averaged gradients."""
    collective_timeout: timedelta | None = None
    """How long ranks wait for each other; None: torch's default."""

    global_rank: int
    world_size: int
    lightning_module: pl.LightningModule
    optimizers: list[torch.optim.Optimizer]

    @cached_property
    def sharding(self) -> ParameterSharding:
        """Where weights and optimizer state lie; known once the strategy is set up."""
        return self.make_sharding()

    def make_sharding(self) -> ParameterSharding:
        """Called once, after the engine was set up; here for a network that every rank holds."""
        trained = [p for p in self.lightning_module.parameters() if p.requires_grad]
        return ReplicatedSharding(trained, self.optimizers[0], self.world_size)

    def shard_network(self) -> None:
        """Called from `configure_model`, before the optimizer is made."""

    @cached_property
    def cpu_group(self) -> CpuGroup:
        """The ranks' group for saves; its first use is collective."""
        return CpuGroup(self.global_rank, self.world_size, self.collective_timeout)

    @property
    def data_rank(self) -> int:
        """Which part of a global batch this rank draws."""
        return self.global_rank // self.tensor_parallel_size

    @property
    def data_ranks(self) -> int:
        """Parts that a global batch is split into."""
        return self.world_size // self.tensor_parallel_size

    def split_over_ranks(self, count: int) -> tuple[list[int], int]:
        """Which of `count` items this rank takes, and how many fewer these are than those of the rank with most."""
        own = list(range(self.data_rank, count, self.data_ranks))
        return own, -(-count // self.data_ranks) - len(own)


def strategy_of(trainer: pl.Trainer) -> TrainingStrategy:
    """The trainer's strategy, which is one of this package."""
    strategy = trainer.strategy
    assert isinstance(strategy, TrainingStrategy)
    return strategy


@dataclass(frozen=True)
class ShardingSpec:
    """What of the trained module may be sharded."""

    roots: Sequence[nn.Module]
    """Networks that are called as a whole: together they have every trained parameter."""
    blocks: Sequence[nn.Module] = ()
    """Repeated blocks inside them, sharded one by one so that only one is gathered at a time."""
    tensor_plan: Callable[[nn.Module, int], dict[str, ParallelStyle]] | None = None
    """(block, ranks) → the parallel styles of its layers, where the family can split it; also sets the number of heads
    that the block has on this rank."""


@dataclass(frozen=True)
class FSDP2Options:
    """How FSDP2 keeps the blocks."""

    low_precision: torch.dtype | None = None
    """Type in which weights are gathered and used; gradients are reduced in fp32."""
    reshard_after_forward: bool = True
    offload: bool = False


class SingleProcessStrategy(TrainingStrategy, SingleDeviceStrategy):
    """One process, without a process group."""


class ReplicatedStrategy(TrainingStrategy, DDPStrategy):
    """DDP (Li et al. 2020, arXiv:2006.15704): every rank has every weight, and gradients are averaged.

    Args:
        timeout: how long ranks wait for each other.
        options: of Lightning's strategy.
    """

    def __init__(self, timeout: timedelta, **options: Any) -> None:
        super().__init__(timeout=timeout, **options)
        self.collective_timeout = timeout

    @property
    def num_replicas(self) -> int:  # type: ignore[override]
        """Every rank."""
        return self.world_size


class FSDP2Strategy(TrainingStrategy, ModelParallelStrategy):
    """FSDP2, hybrid sharding and tensor parallelism: weights, gradients and optimizer state in blocks.

    Args:
        mesh: ranks by axis.
        spec: what is sharded.
        options: how it is kept.
        backend: communication library.
        timeout: how long ranks wait for each other; None: torch's default.
    """

    has_collective_forward = True

    def __init__(
        self, mesh: Mesh, spec: ShardingSpec, options: FSDP2Options, backend: str, timeout: timedelta | None = None
    ) -> None:
        super().__init__(process_group_backend=backend, save_distributed_checkpoint=False, timeout=timeout)
        self.mesh, self.spec, self.options, self.collective_timeout = mesh, spec, options, timeout
        self.tensor_parallel_size = mesh.tensor
        self.num_replicas = mesh.data

    def setup_environment(self) -> None:
        """Lightning knows two mesh axes; here are three."""
        super(ModelParallelStrategy, self).setup_environment()
        self._setup_distributed()
        sizes = (self.mesh.data, self.mesh.fsdp, self.mesh.tensor)
        self._device_mesh = init_device_mesh(self.root_device.type, sizes, mesh_dim_names=("data", "fsdp", "tensor"))
        self.lightning_module._device_mesh = self._device_mesh

    def shard_network(self) -> None:
        """Blocks first, then the networks around them."""
        mesh = self.device_mesh
        if self.mesh.tensor > 1:
            assert self.spec.tensor_plan is not None
            for block in self.spec.blocks:
                plan = self.spec.tensor_plan(block, self.mesh.tensor)
                if plan:
                    parallelize_module(block, mesh["tensor"], plan)
        # Inputs keep their type: timesteps in bf16 would be rounded.
        precision = MixedPrecisionPolicy(
            param_dtype=self.options.low_precision, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        # Only CUDA has pinned memory.
        offload = CPUOffloadPolicy(torch.cuda.is_available()) if self.options.offload else OffloadPolicy()
        for module in [*self.spec.blocks, *self.spec.roots]:
            fully_shard(
                module,
                mesh=mesh["data", "fsdp"] if self.mesh.data > 1 else mesh["fsdp"],
                mp_policy=precision,
                offload_policy=offload,
                reshard_after_forward=self.options.reshard_after_forward,
            )
            _keep_recording(module)

    def model_to_device(self) -> None:
        """What is offloaded stays on the CPU; FSDP2 has moved the rest."""
        if not self.options.offload:
            super().model_to_device()

    def make_sharding(self) -> DTensorSharding:
        """Blocks of DTensors."""
        return DTensorSharding(self.optimizers[0], self.lightning_module.modules())


def _keep_recording(module: nn.Module) -> None:
    """transformers looks up by class which states a text encoder can return, and FSDP2 has changed the class."""
    recorded = getattr(module, "_can_record_outputs", None)
    if recorded is None:
        return
    from transformers.utils import output_capturing

    output_capturing._CAN_RECORD_REGISTRY[module] = recorded
