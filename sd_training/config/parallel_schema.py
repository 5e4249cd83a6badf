"""How a run is spread over processes: strategy, mesh, offload, compilation. Importable without torch."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field
from pydantic.dataclasses import dataclass

from sd_training.config.value_types import SCHEMA, PositiveInt, no_bool

StrategyName = Literal["single", "ddp", "fsdp", "hsdp", "deepspeed_1", "deepspeed_2", "deepspeed_3"]
MeshAxis = Annotated[int, BeforeValidator(no_bool), Field(ge=-1)]
MESH_AXES = ("data", "fsdp", "tensor")


@dataclass(config=SCHEMA, kw_only=True)
class MeshConfig:
    """Processes as a block of `data` × `fsdp` × `tensor`, instead of a strategy; the product is the number of
    processes. At most one is -1: as many as are left. All 1: not set."""

    @property
    def is_set(self) -> bool:
        """Whether the run is laid out by axes."""
        return any(getattr(self, axis) != 1 for axis in MESH_AXES)

    data: MeshAxis = 1
    """Copies of the weights, each with its own samples."""
    fsdp: MeshAxis = 1
    """Processes that share one copy of the weights, each with its own samples."""
    tensor: MeshAxis = 1
    """Processes that share the matrices of a transformer block and its samples."""


@dataclass(config=SCHEMA, kw_only=True)
class DistributedConfig:
    """How weights, gradients and optimizer state lie over the processes; the numbers of a run do not depend on it."""

    strategy: Literal["auto"] | StrategyName = "auto"
    """`auto`: as `mesh` says; without one, one process needs no process group, several use `ddp`. `fsdp` cuts weights,
    gradients and optimizer state over all processes, `hsdp` over those of a machine. `deepspeed_1` cuts the optimizer
    state, `deepspeed_2` the gradients too, `deepspeed_3` the weights too. See docs/scaling.md."""
    mesh: MeshConfig = Field(default_factory=MeshConfig)
    """Processes by axis, such as `{data: -1, fsdp: 8, tensor: 1}`."""
    reshard_after_forward: bool = True
    """fsdp, hsdp: give the weights of a block back after its forward pass. False is faster and needs more memory."""
    offload_optimizer: bool = False
    """deepspeed: keep the optimizer state in CPU memory and update there."""
    offload_parameters: bool = False
    """fsdp, hsdp: keep weights, gradients and optimizer state in CPU memory. deepspeed_3: the weights."""
    deepspeed_config: str | None = None
    """deepspeed: a JSON file of DeepSpeed options, those that docs/scaling.md lists; what this trainer decides itself
    (batch sizes, optimizer, clipping, precision) must not be in it, nor another stage."""
    dist_backend: Literal["nccl", "gloo", "mpi"] = "nccl"
    """Communication library; `nccl` becomes `gloo` on a machine without CUDA, with one line saying so."""
    dist_url: str = "env://"
    """Rendezvous: `env://` reads MASTER_ADDR and MASTER_PORT as torchrun and SLURM set them; `tcp://host:port` sets
    them."""


@dataclass(config=SCHEMA, kw_only=True)
class TrainerConfig:
    """Which devices train, and how the network is run on them. torchrun and SLURM decide the number of processes
    themselves."""

    accelerator: Literal["auto", "cpu", "cuda", "gpu", "mps"] = "auto"
    """Device kind; ROCm devices are `cuda`."""
    devices: Literal["auto"] | PositiveInt = "auto"
    """Processes on this machine when started with plain `python`; `auto`: every GPU, or one CPU process."""
    num_nodes: PositiveInt | None = None
    """Machines; null takes it from torchrun or SLURM."""
    compile: bool | Literal["blocks", "full"] = False
    """torch.compile of the denoiser. `blocks` (or true): its repeated blocks, one after the other, which starts soon.
    `full`: the whole network. One graph per bucket size."""
    channels_last: Literal["auto"] | bool = "auto"
    """Lay out convolutional denoisers and the autoencoder with channels last; `auto`: on CUDA."""
