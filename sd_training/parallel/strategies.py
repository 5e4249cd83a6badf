"""Lightning's strategies with what the trainer needs beyond Lightning: where weights lie, which samples a rank draws,
the ranks' CPU group. Each class holds only what is different about its engine; DeepSpeed's is in `deepspeed.py`.

Weights and optimizer state lie behind one interface, `ParameterSharding`, that averages, checkpoints and exports use.
A *local shard* is the part of a parameter that a rank averages and stores: a whole tensor assigned to it (replicas),
its block of a DTensor (FSDP2: Zhao et al. 2023, arXiv:2304.11277, rewritten per parameter; tensor parallelism: Shoeybi
et al. 2019, arXiv:1909.08053), or a run of its elements (DeepSpeed's ZeRO, `deepspeed.py`). Checkpoints and exports
hold full tensors, gathered one at a time, so they mean the same under every strategy and world size.
"""

import errno
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any, TypeVar

import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module
from transformers.utils import output_capturing

from sd_training.config.plan import Mesh
from sd_training.config.schema import DistributedConfig
from sd_training.errors import CheckpointError, DamagedCheckpointsError, DataError, OutageError, TakenOverError

_Result = TypeVar("_Result")
_SHARED_ERRORS = {
    kind.__name__: kind for kind in (CheckpointError, DamagedCheckpointsError, DataError, OutageError, TakenOverError)
}
"""Errors of one rank that are raised as the same class on the others."""
AGREE_TIMEOUT = timedelta(seconds=30)
"""How long `agree` waits for a rank that may be about to fail as well. A rank that has ended closes its connections,
which ends the wait at once; one that waits in a collective looks the same as one that is about to fail."""

StateOf = Callable[[nn.Parameter], dict[str, Any]]
"""Parameter → its optimizer state in full tensors, as a checkpoint holds it; empty for none."""
_OF_THIS_RUN = {
    *("params", "fused", "foreach", "capturable", "differentiable"),
    *("lr_factor", "weight_decay", "betas", "eps", "momentum", "d_coef"),
}
"""Keys of an optimizer's groups that follow from the device, the strategy and the options of this run."""


class CpuGroup:
    """All ranks of the run: JSON collectives over a separate gloo group, and errors that all ranks raise alike.

    No device takes part and nothing is unpickled. A thread that saves in the background may use its group while
    training uses the others.

    Args:
        rank: of this process.
        world_size: number of ranks; making the group is collective where there are several.
        timeout: how long ranks wait for each other, such as for one that writes slowly; None: torch's default.
    """

    def __init__(self, rank: int, world_size: int, timeout: timedelta | None = None) -> None:
        self.rank = rank
        self.world_size = world_size
        self._group = distributed.new_group(backend="gloo", timeout=timeout) if world_size > 1 else None
        self._agree_group = distributed.new_group(backend="gloo", timeout=AGREE_TIMEOUT) if world_size > 1 else None

    def all_gather(self, value: Any, group: distributed.ProcessGroup | None = None) -> list[Any]:
        """Collective: the JSON value of every rank, by rank."""
        if self._group is None:
            return [value]
        group = group or self._group
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        distributed.all_gather(sizes, torch.tensor([text.numel()]), group=group)
        longest = int(torch.cat(sizes).max())
        texts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.world_size)]
        padded = torch.cat([text, text.new_zeros(longest - text.numel())])
        distributed.all_gather(texts, padded, group=group)
        return [json.loads(bytes(t[: int(size)].tolist())) for t, size in zip(texts, sizes, strict=True)]

    def agree(self, value: Any) -> bool:
        """Whether all ranks call this within `AGREE_TIMEOUT` with the same JSON value. After a timeout it cannot be
        used again."""
        try:
            return all(other == value for other in self.all_gather(value, self._agree_group))
        except RuntimeError:  # the timeout, or a rank has ended
            return False

    def raise_first(self, failure: Exception | None) -> None:
        """Collective: all ranks fail when one does, with the same class of error.

        Args:
            failure: of this rank.

        Raises:
            OSError: some rank could not write.
            UserError: one of `_SHARED_ERRORS`, on some rank.
            Exception: this rank's own failure of another class; RuntimeError with its text on the others.
        """
        own: dict[str, Any] | None = None
        if isinstance(failure, OSError):
            own = {"errno": failure.errno or errno.EIO, "text": failure.strerror or str(failure)}
        elif failure is not None:
            own = {"kind": type(failure).__name__, "text": str(failure)}
        found = [one for one in self.all_gather(own) if one is not None]
        if not found:
            return
        # A rank must not continue after a full disk while another one ends with a worse error.
        worst = next((one for one in found if "errno" not in one), found[0])
        if failure is not None and isinstance(failure, OSError) == ("errno" in worst):
            raise failure
        if "errno" in worst:
            raise OSError(worst["errno"], worst["text"])
        raise _SHARED_ERRORS.get(worst["kind"], RuntimeError)(worst["text"])

    def on_rank0(self, act: Callable[[], _Result]) -> _Result:
        """Collective: rank 0 acts; all ranks get its result, which must be JSON, or its error as in `raise_first`."""
        result: Any = None
        failure: Exception | None = None
        if self.rank == 0:
            try:
                result = act()
            except Exception as error:
                failure = error
        self.raise_first(failure)
        answer: _Result = self.all_gather(result)[0]
        return answer


class ParameterSharding(ABC):
    """How parameters are distributed over the ranks. Collective methods are called by all ranks in the same order."""

    optimizer: torch.optim.Optimizer
    """Updates the local shards; inside the engine, where there is one."""

    @abstractmethod
    def local_shard(self, parameter: nn.Parameter) -> Tensor:
        """This rank's part of the weights that training updates; empty for none. A view."""

    @abstractmethod
    def shard_of(self, parameter: nn.Parameter, full: Tensor) -> Tensor:
        """This rank's part of a tensor of the parameter's full shape, cut as `local_shard` is."""

    @abstractmethod
    def gather(self, parameter: nn.Parameter, shard: Tensor) -> Tensor:
        """Collective: the full tensor, on the parameter's device, from a tensor cut like `local_shard` on each rank."""

    def full_tensor(self, parameter: nn.Parameter) -> Tensor:
        """Collective: the full tensor of the weights that training updates."""
        return self.gather(parameter, self.local_shard(parameter))

    def full_shape(self, parameter: nn.Parameter) -> torch.Size:
        """Shape of the full tensor."""
        return parameter.shape

    def backup(self, parameter: nn.Parameter) -> Tensor:
        """What `restore` needs."""
        return self.local_shard(parameter).to("cpu", copy=True)

    def swap_in(self, parameter: nn.Parameter, shard: Tensor) -> None:
        """Collective: the network computes with the weights that these shards make up."""
        self._update_network(parameter, self.gather(parameter, shard))

    def restore(self, parameter: nn.Parameter, backup: Tensor) -> None:
        """Collective: the network computes with its own weights again, bit for bit."""
        self.swap_in(parameter, backup)

    def reshard(self) -> None:
        """Frees weights that forward passes without a backward pass left gathered; the next step would use them."""
        return

    def load(self, parameter: nn.Parameter, full: Tensor) -> None:
        """Collective: training continues from these weights."""
        self.local_shard(parameter).copy_(self.shard_of(parameter, full))
        self._update_network(parameter, full)

    def _update_network(self, parameter: nn.Parameter, full: Tensor) -> None:
        """Collective: in place, because optimizer and communication buckets refer to the memory."""
        parameter.detach().copy_(full)

    def full_state(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Collective: the optimizer's state of a parameter in full tensors; empty before the first step."""
        state = self.optimizer.state.get(parameter, {})
        return {key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in state.items()}

    def load_optimizer(
        self, parameters: Iterable[nn.Parameter], state_of: StateOf, groups: Sequence[Mapping[str, Any]]
    ) -> None:
        """Collective: the optimizer continues from states as `full_state` returns them, and from stored `groups`;
        through its own `load_state_dict`, because some keep more than tensors."""
        packed = self.optimizer.state_dict()
        packed["state"] = {}
        self.optimizer.state.clear()  # at a rollback, the old state and the new one would not fit beside each other
        ordered = [p for group in self.optimizer.param_groups for p in group["params"]]
        for index, p in enumerate(ordered):
            if state := state_of(p):
                own = {k: self._local_state(p, k, v) if isinstance(v, Tensor) else v for k, v in state.items()}
                packed["state"][index] = own
        if len(groups) == len(packed["param_groups"]):  # tensor parallelism makes more groups, which hold options only
            for group, stored in zip(packed["param_groups"], groups, strict=True):
                group.update({key: stored[key] for key in stored.keys() & group.keys() - _OF_THIS_RUN})
        self.optimizer.load_state_dict(packed)

    def loss_scale(self) -> dict[str, Any]:
        """State of the engine's own dynamic loss scale; empty where Lightning's precision plugin scales the loss."""
        return {}

    def load_loss_scale(self, state: Mapping[str, Any]) -> None:
        """Continues from what `loss_scale` returned, if this run has a dynamic scale as well."""
        return

    def _local_state(self, parameter: nn.Parameter, key: str, full: Tensor) -> Tensor:
        """This rank's part of a tensor of the optimizer's state."""
        return _laid_out_like(parameter, full)


class ReplicatedSharding(ParameterSharding):
    """Every rank holds every weight: one process, or DDP. Averages are assigned to ranks by size."""

    def __init__(self, parameters: Iterable[nn.Parameter], optimizer: torch.optim.Optimizer, world_size: int) -> None:
        parameters = list(parameters)
        owners = assign_by_size([p.numel() for p in parameters], world_size)
        self.optimizer = optimizer
        self._owner = {id(p): owner for p, owner in zip(parameters, owners, strict=True)}
        self._rank = distributed.get_rank() if world_size > 1 else 0
        self._world_size = world_size

    def local_shard(self, parameter: nn.Parameter) -> Tensor:
        """The whole tensor on its owner, nothing on other ranks."""
        return self.shard_of(parameter, parameter.detach())

    def shard_of(self, parameter: nn.Parameter, full: Tensor) -> Tensor:
        """The whole tensor on its owner, nothing on other ranks."""
        return full if self._owner[id(parameter)] == self._rank else full.new_empty(0)

    def gather(self, parameter: nn.Parameter, shard: Tensor) -> Tensor:
        """The owner broadcasts its tensor."""
        if self._world_size == 1:
            return shard
        owner = self._owner[id(parameter)]
        full = shard if owner == self._rank else torch.empty(parameter.shape, dtype=shard.dtype)
        full = full.to(parameter.device).contiguous()
        distributed.broadcast(full, src=owner)
        return full

    def full_tensor(self, parameter: nn.Parameter) -> Tensor:
        """Already here."""
        return parameter.detach()

    def backup(self, parameter: nn.Parameter) -> Tensor:
        """The whole tensor on every rank: replicas that differ have to be found to differ (`NumericGuard`), and not to
        get the owner's weights."""
        return parameter.detach().to("cpu", copy=True)

    def restore(self, parameter: nn.Parameter, backup: Tensor) -> None:
        """Without communication, so that a rank may fail alone while it draws or measures."""
        self._update_network(parameter, backup)


class DTensorSharding(ParameterSharding):
    """Every trained parameter is a DTensor; the local shard is this rank's block of it."""

    def __init__(self, optimizer: torch.optim.Optimizer, modules: Iterable[nn.Module]) -> None:
        self.optimizer = optimizer
        self._fsdp_modules = [module for module in modules if isinstance(module, FSDPModule)]

    def reshard(self) -> None:
        """Every FSDP2 module."""
        for module in self._fsdp_modules:
            module.reshard()

    def local_shard(self, parameter: nn.Parameter) -> Tensor:
        """The local block."""
        return _dtensor(parameter).to_local().detach()

    def shard_of(self, parameter: nn.Parameter, full: Tensor) -> Tensor:
        """The same block of another tensor, without communication."""
        own = _dtensor(parameter)
        full = full.to(own.device_mesh.device_type)
        block = distribute_tensor(full, own.device_mesh, own.placements, src_data_rank=None).to_local()
        return block.to(own.to_local().device)

    def gather(self, parameter: nn.Parameter, shard: Tensor) -> Tensor:
        """All blocks, joined."""
        own = _dtensor(parameter)
        return _placed_like(own, shard.to(own.device_mesh.device_type)).full_tensor()

    def swap_in(self, parameter: nn.Parameter, shard: Tensor) -> None:
        """Without communication."""
        self.local_shard(parameter).copy_(shard)

    def _update_network(self, parameter: nn.Parameter, full: Tensor) -> None:
        """The network computes with the local blocks."""

    def _local_state(self, parameter: nn.Parameter, key: str, full: Tensor) -> Tensor:
        if key == "step":
            return full
        own = _dtensor(parameter)
        return _placed_like(own, _laid_out_like(own.to_local(), self.shard_of(parameter, full).clone()))


def assign_by_size(sizes: list[int], count: int) -> list[int]:
    """The rank of each tensor, so that all of `count` ranks get about the same: largest first, to the least loaded."""
    loads, ranks = [0] * count, [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        ranks[index] = loads.index(min(loads))
        loads[ranks[index]] += sizes[index]
    return ranks


def _laid_out_like(parameter: Tensor, value: Tensor) -> Tensor:
    """Optimizer state in its parameter's memory layout, such as channels-last, which fused optimizers rely on."""
    if value.shape != parameter.shape:
        return value
    return torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)


def _dtensor(parameter: nn.Parameter) -> DTensor:
    assert isinstance(parameter, DTensor), "a trained parameter is not sharded"
    return parameter


def _placed_like(own: DTensor, local: Tensor) -> DTensor:
    """A DTensor of `own`'s shape and placement around a local block."""
    return DTensor.from_local(
        local, own.device_mesh, own.placements, run_check=False, shape=own.shape, stride=own.stride()
    )


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

    global_rank: int
    world_size: int
    root_device: torch.device
    lightning_module: pl.LightningModule
    optimizers: list[torch.optim.Optimizer]

    def __init__(self, *, timeout: timedelta | None = None, **options: Any) -> None:
        """`options` are those of Lightning's strategy; one process needs no timeout."""
        super().__init__(**options, **({} if timeout is None else {"timeout": timeout}))
        self.collective_timeout = timeout

    @cached_property
    def sharding(self) -> ParameterSharding:
        """Where weights and optimizer state lie; known once the engine is set up. Here for a network that every rank
        holds."""
        trained = [p for p in self.lightning_module.parameters() if p.requires_grad]
        return ReplicatedSharding(trained, self.optimizers[0], self.world_size)

    def shard_network(self) -> None:
        """Called from `configure_model`, before the optimizer is made."""

    @cached_property
    def _upload_stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.root_device)

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """A `PixelBatch` where it is trained on. On CUDA a stream of its own copies it from page-locked memory: the
        host is here while the device still works on the micro-batch before, and the copy does not wait for that."""
        device = device or self.root_device
        if device.type != "cuda":
            return batch.to(device)
        with torch.cuda.stream(self._upload_stream):
            uploaded = batch.to(device)
        training = torch.cuda.current_stream(device)
        training.wait_stream(self._upload_stream)
        for tensor in uploaded.tensors():  # else the next copy could take their memory while they are still being read
            tensor.record_stream(training)
        return uploaded

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
    """Repeated blocks inside them, sharded one by one so that only one is gathered at a time; or all that is called,
    where a root's own `forward` is not."""
    tensor_plan: Callable[[nn.Module, int], dict[str, ParallelStyle]] | None = None
    """(block, ranks) → the parallel styles of its layers, where the family can split it; also sets the number of heads
    that the block has on this rank."""
    fp32_roots: Sequence[nn.Module] = ()
    """Further networks that are called as a whole, and compute in fp32 whatever the precision of the run."""


class SingleProcessStrategy(TrainingStrategy, SingleDeviceStrategy):
    """One process, without a process group."""


class ReplicatedStrategy(TrainingStrategy, DDPStrategy):
    """DDP (Li et al. 2020, arXiv:2006.15704): every rank has every weight, and gradients are averaged."""

    @property
    def num_replicas(self) -> int:  # type: ignore[override]
        """Every rank."""
        return self.world_size


class FSDP2Strategy(TrainingStrategy, ModelParallelStrategy):
    """FSDP2, hybrid sharding and tensor parallelism: weights, gradients and optimizer state in blocks.

    Args:
        mesh: ranks by axis.
        spec: what is sharded.
        config: whether blocks are freed after the forward pass, and whether they lie in CPU memory.
        dtype: type in which weights are gathered and used; gradients are reduced in fp32.
        options: backend and timeout.
    """

    has_collective_forward = True

    def __init__(
        self, mesh: Mesh, spec: ShardingSpec, config: DistributedConfig, dtype: torch.dtype | None, **options: Any
    ) -> None:
        super().__init__(save_distributed_checkpoint=False, **options)
        self.mesh, self.spec, self.offload = mesh, spec, config.offload_parameters
        self.tensor_parallel_size = mesh.tensor
        self.num_replicas = mesh.data
        self.fsdp_options: dict[str, Any] = {
            # Inputs keep their type: timesteps in bf16 would be rounded.
            "mp_policy": MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False),
            # Only CUDA has pinned memory.
            "offload_policy": CPUOffloadPolicy(torch.cuda.is_available()) if self.offload else OffloadPolicy(),
            "reshard_after_forward": config.reshard_after_forward,
        }

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
        sharded = mesh["data", "fsdp"] if self.mesh.data > 1 else mesh["fsdp"]
        for module in [*self.spec.blocks, *self.spec.roots, *self.spec.fp32_roots]:
            # transformers looks up by class which states a text encoder can return, and FSDP2 changes the class.
            recorded = getattr(module, "_can_record_outputs", None)
            in_fp32 = {"mp_policy": MixedPrecisionPolicy()} if module in self.spec.fp32_roots else {}
            fully_shard(module, mesh=sharded, **(self.fsdp_options | in_fp32))
            if recorded is not None:
                output_capturing._CAN_RECORD_REGISTRY[module] = recorded

    def model_to_device(self) -> None:
        """What is offloaded stays on the CPU; FSDP2 has moved the rest."""
        if not self.offload:
            super().model_to_device()

    @cached_property
    def sharding(self) -> ParameterSharding:
        """Blocks of DTensors."""
        return DTensorSharding(self.optimizers[0], self.lightning_module.modules())
