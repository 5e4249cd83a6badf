"""Where a run runs: devices and processes, from torchrun, SLURM or the config. No process group is made here."""

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import distributed

from sd_training.config.plan import counted
from sd_training.config.schema import DistributedConfig, TrainerConfig
from sd_training.errors import ConfigError
from sd_training.log import get_logger

log = get_logger(__name__)


@dataclass(frozen=True)
class Launch:
    """Processes of a run."""

    accelerator: str
    """Lightning's name of the device kind: cpu, cuda or mps."""
    devices: int
    """Processes per machine."""
    num_nodes: int
    """Machines."""
    launcher: Literal["own", "torchrun", "slurm"] = "own"
    """Who starts the processes."""

    @property
    def processes(self) -> int:
        """World size."""
        return self.devices * self.num_nodes


def _accelerator(config: TrainerConfig) -> str:
    """The device kind, checked to exist here."""
    wanted = "cuda" if config.accelerator == "gpu" else config.accelerator
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if wanted == "auto":
        return "cuda" if available["cuda"] else "mps" if available["mps"] else "cpu"
    if not available[wanted]:
        raise ConfigError(
            f"trainer.accelerator: {config.accelerator!r} is not available on this machine; use auto or cpu"
        )
    return wanted


def _from_launcher() -> tuple[int, int, Literal["torchrun", "slurm"]] | None:
    """(processes per machine, machines, launcher) as torchrun or srun set them, or null when started alone; a job of
    one task starts its processes itself."""
    env = os.environ
    launcher: Literal["torchrun", "slurm"] = "torchrun"
    if "LOCAL_WORLD_SIZE" in env and "WORLD_SIZE" in env:
        processes, devices = int(env["WORLD_SIZE"]), int(env["LOCAL_WORLD_SIZE"])
        num_nodes = processes // devices
    elif "SLURM_PROCID" in env and int(env.get("SLURM_NTASKS", "1")) > 1:
        launcher, processes, num_nodes = "slurm", int(env["SLURM_NTASKS"]), int(env.get("SLURM_NNODES", "1"))
        devices = processes // num_nodes
    else:
        return None
    if devices * num_nodes != processes:
        raise ConfigError(
            f"{launcher}: {counted(processes, 'process', 'processes')} are not the same number on every machine; start "
            "as many on each (srun --ntasks-per-node, torchrun --nproc_per_node)"
        )
    return devices, num_nodes, launcher


def find_launch(config: TrainerConfig, encoders: int = 0, *, is_described: bool = False) -> Launch:
    """Devices and processes of this run.

    Args:
        encoders: GPUs of this machine that train nothing.
        is_described: the run is only described: it may be one of other machines than this one.

    Raises:
        ConfigError: when the config contradicts the launcher or the machine.
    """
    accelerator, wanted_nodes = _accelerator(config), config.num_nodes or 1
    visible = torch.cuda.device_count() - encoders if accelerator == "cuda" else 1
    besides = f" beside {counted(encoders, 'encoder process', 'encoder processes')}" if encoders else ""
    if visible < 1 and not is_described:
        seen = counted(visible + encoders, "GPU")
        raise ConfigError(
            f"distributed.encoders: {encoders}, but this process sees {seen}, so none is left to train; give fewer, or "
            "let every process see all GPUs (srun --gpus-per-node, not --gpus-per-task)"
        )
    if (launched := _from_launcher()) is not None:
        devices, num_nodes, launcher = launched
        started = counted(devices, "process", "processes")
        if config.devices not in ("auto", devices):
            raise ConfigError(f"trainer.devices: {config.devices}, but the launcher started {started} per machine")
        if config.num_nodes not in (None, num_nodes):
            raise ConfigError(
                f"trainer.num_nodes: {config.num_nodes}, but the launcher runs on {counted(num_nodes, 'machine')}"
            )
        if accelerator == "cuda" and devices > visible:
            raise ConfigError(
                f"trainer.devices: the launcher started {started} on this machine, but they see "
                f"{counted(visible, 'GPU')}{besides}; start one for each GPU, and let each see all of them "
                "(srun --gpus-per-node, not --gpus-per-task)"
            )
        return Launch(accelerator, devices, num_nodes, launcher)
    devices = visible if config.devices == "auto" else config.devices
    if not is_described and wanted_nodes > 1:
        raise ConfigError(
            f"trainer.num_nodes: {wanted_nodes} machines need a launcher; start with torchrun or srun (see README)"
        )
    if not is_described and accelerator != "cpu" and devices > visible:
        raise ConfigError(f"trainer.devices: {devices}, but this machine has {visible}{besides}")
    return Launch(accelerator, devices, wanted_nodes)


def use_own_device(launch: Launch) -> torch.device:
    """The device of this process. A GPU becomes torch's current one: Lightning sets it when training starts, and
    what every process allocates before would be on the machine's first GPU."""
    if launch.accelerator != "cuda":
        return torch.device(launch.accelerator)
    device = torch.device("cuda", local_rank(launch))
    torch.cuda.set_device(device)
    return device


def local_rank(launch: Launch) -> int:
    """Number of this process on its machine."""
    return int(os.environ.get("SLURM_LOCALID" if launch.launcher == "slurm" else "LOCAL_RANK", "0"))


def process_group_backend(config: DistributedConfig, accelerator: str) -> str:
    """The communication library; `nccl` without CUDA becomes `gloo`, with a line in the log."""
    if config.dist_backend == "nccl" and accelerator != "cuda":
        log.info("distributed.dist_backend: nccl needs CUDA, so gloo is used here")
        return "gloo"
    return config.dist_backend


def use_one_worker_per_gloo_group() -> None:
    """Every gloo group that this process makes from now on has one worker thread; PyTorch starts two.

    PyTorch (2.13) has a data race between the two. After a collective each of them assigns its name to one
    `std::string`, `pgStatus_->lastCompletedWorkName` in `ProcessGroupGloo::runLoop`, without a lock. Names of up to 15
    characters are stored inside the string. ALLGATHER_COALESCED, with which `DTensor.full_tensor` gathers, is on the
    heap: two assignments at the same time free one block twice, and later any thread may crash. With one worker there
    is nothing to race with. No upstream report of it was found on 2026-11-22.

    torch ignores `pg_options` for gloo, hence the change of the constructor.
    """
    if distributed.is_gloo_available():
        gloo: Any = distributed.ProcessGroupGloo
        gloo.__init__ = _init_with_one_worker


_init_gloo: Any = distributed.ProcessGroupGloo.__init__ if distributed.is_gloo_available() else None


def _init_with_one_worker(group: Any, store: Any, rank: int, size: int, timeout: timedelta) -> None:
    """As torch's constructor of a gloo group does with a timeout, but for the number of threads."""
    gloo: Any = distributed.ProcessGroupGloo
    options = gloo._Options()
    interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "")
    options._devices = [gloo.create_device(interface=name) for name in interfaces.split(",") if name]
    options._devices = options._devices or [gloo.create_default_device()]
    options._timeout, options._threads = timeout, 1
    _init_gloo(group, store, rank, size, options)
