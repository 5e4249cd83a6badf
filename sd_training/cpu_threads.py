"""How many cores a process that computes on the CPU uses, and how its threads wait for each other."""

import os
from pathlib import Path

from sd_training.rank_log import get_logger

log = get_logger(__name__)

_QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""What a container may use: quota and period [µs], or "max"."""


def let_threads_sleep() -> None:
    """OpenMP threads that wait for each other sleep; they spin by default, and one that has lost its core to another
    process then holds up all the others. Call before torch is imported: OpenMP reads this once."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def share_cores(processes: int) -> None:
    """Gives this process, and those started from it, an equal share of the cores. One core is left to the loader and
    to whatever else runs; what the user or torchrun chose by OMP_NUM_THREADS stays.

    Args:
        processes: that compute on this machine.
    """
    if "OMP_NUM_THREADS" in os.environ:
        return
    import torch  # train.py reports mistakes before it is imported

    cores = _usable_cores()
    threads = max(1, (cores - 1) // processes)
    os.environ["OMP_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)
    log.info(
        f"threads per process: {threads} ({cores} core{'s' * (cores > 1)}, "
        f"{processes} process{'es' * (processes > 1)}); OMP_NUM_THREADS chooses another"
    )


def _usable_cores() -> int:
    """Cores that this process may be scheduled on, or fewer by the quota of its container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = _QUOTA.read_text(encoding="ascii").split()
        return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):
        return cores
