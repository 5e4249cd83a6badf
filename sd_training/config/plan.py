"""Batch arithmetic, done once: micro-batch × accumulation × processes = images per optimizer step.

From strategy or mesh to a block of processes: pure arithmetic, done once.
"""

import math
from dataclasses import dataclass
from functools import cached_property

from sd_training.config.schema import MESH_AXES, DistributedConfig, StrategyName
from sd_training.errors import ConfigError


@dataclass(frozen=True)
class BatchPlan:
    """How the images of a run are cut into optimizer steps."""

    micro_batch: int
    """Samples per process and forward pass."""
    accumulation: int
    """Micro-batches per optimizer step and process."""
    processes: int
    """Training processes over all machines that draw samples of their own."""
    num_examples: int
    """Length of the run [samples over all processes]."""
    sharing: int = 1
    """Processes that work together on the same samples (tensor parallelism)."""

    @cached_property
    def global_batch(self) -> int:
        """Samples per optimizer step over all processes."""
        return self.micro_batch * self.accumulation * self.processes

    @cached_property
    def num_steps(self) -> int:
        """Whole optimizer steps of the run.

        Raises:
            ConfigError: if the run is shorter than one optimizer step.
        """
        steps = self.num_examples // self.global_batch
        if steps == 0:
            raise ConfigError(
                f"experiment: a run of {counted(self.num_examples, 'image')} is less than one optimizer step of "
                f"{self._product()}; make it longer, or lower system.batch_size or system.gradient_accumulation"
            )
        return steps

    def sentence(self) -> str:
        """The arithmetic in one sentence."""
        return (
            f"{self._product()} per optimizer step; "
            f"{counted(self.num_examples, 'image')} = {counted(self.num_steps, 'step')}"
        )

    def _product(self) -> str:
        processes = counted(self.processes, "process", "processes")
        total = counted(self.global_batch, "image")
        return f"batch_size {self.micro_batch} × accumulation {self.accumulation} × {processes} = {total}"


def counted(number: int, one: str, several: str = "") -> str:
    """`1 step`, `2,500 steps`."""
    return f"{number:,} {one if number == 1 else several or one + 's'}"


@dataclass(frozen=True)
class Mesh:
    """Processes by axis. Rank r is (r // (fsdp · tensor), r // tensor % fsdp, r % tensor)."""

    data: int
    """Copies of the weights."""
    fsdp: int
    """Processes that share one copy of the weights."""
    tensor: int
    """Processes that share the matrices of a block, and the samples."""

    @property
    def data_ranks(self) -> int:
        """Shares that a global batch is cut into."""
        return self.data * self.fsdp


@dataclass(frozen=True)
class Layout:
    """How a run is spread over its processes."""

    strategy: StrategyName
    """What runs it; a mesh with fsdp or tensor is `fsdp`, or `hsdp` when data is more than one as well."""
    mesh: Mesh


def find_layout(config: DistributedConfig, processes: int, devices: int) -> Layout:
    """Strategy and mesh of a run.

    Args:
        processes: world size.
        devices: processes per machine.

    Raises:
        ConfigError: they do not fit the number of processes.
    """
    if config.mesh.is_set:
        sizes = {axis: getattr(config.mesh, axis) for axis in MESH_AXES}
        known = math.prod(size for size in sizes.values() if size > 0)
        filled = {axis: processes // known if size == -1 else size for axis, size in sizes.items()}
        if math.prod(filled.values()) != processes:
            shape = " × ".join(f"{axis} {size}" for axis, size in sizes.items())
            raise ConfigError(
                f"distributed.mesh: {shape} does not make {counted(processes, 'process', 'processes')}; the product "
                f"must be {processes}, and one axis may be -1"
            )
        mesh = Mesh(**filled)
        if mesh.fsdp == mesh.tensor == 1:
            return Layout("single" if mesh.data == 1 else "ddp", mesh)
        return Layout("hsdp" if mesh.data > 1 else "fsdp", mesh)
    match config.strategy:
        case "auto":
            return Layout("single" if processes == 1 else "ddp", Mesh(processes, 1, 1))
        case "single" if processes > 1:
            raise ConfigError(
                f"distributed.strategy: single, but {processes} processes were started; use auto, ddp, fsdp or "
                "deepspeed_2"
            )
        case "fsdp":
            return Layout("fsdp", Mesh(1, processes, 1))
        case "hsdp":
            if processes % devices or processes == devices:
                raise ConfigError(
                    f"distributed.strategy: hsdp shares weights inside a machine and copies them between machines, but "
                    f"there is one machine with {counted(devices, 'process', 'processes')}; use fsdp, or "
                    "distributed.mesh.data and .fsdp"
                )
            return Layout("hsdp", Mesh(processes // devices, devices, 1))
        case name:
            return Layout(name, Mesh(processes, 1, 1))
