"""How many processes a launcher started, and what cannot be."""

from datetime import timedelta

import pytest
import torch
from torch import distributed

from sd_training.config.schema import DistributedConfig, TrainerConfig
from sd_training.errors import ConfigError
from sd_training.parallel.launch import (
    find_launch,
    process_group_backend,
    use_one_worker_per_gloo_group,
)

_VARIABLES = ("LOCAL_WORLD_SIZE", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_NNODES")


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Without a launcher."""
    for name in _VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, (1, 1, "own")),
        ({"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "6"}, (2, 3, "torchrun")),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "6", "SLURM_NNODES": "2"}, (3, 2, "slurm")),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, (1, 1, "own")),
    ],
)
def test_who_started_how_many(
    variables: dict[str, str], expected: tuple[int, int, str], environment: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        environment.setenv(name, value)
    launch = find_launch(TrainerConfig(accelerator="cpu"))
    assert (launch.devices, launch.num_nodes, launch.launcher) == expected


@pytest.mark.parametrize(
    "variables",
    [
        {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "3"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "3", "SLURM_NNODES": "2"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_NNODES": "3"},
    ],
)
def test_machines_with_different_numbers_of_processes(
    variables: dict[str, str], environment: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        environment.setenv(name, value)
    with pytest.raises(ConfigError, match="are not the same number on every machine; start"):
        find_launch(TrainerConfig(accelerator="cpu"))


def test_nccl_needs_cuda() -> None:
    assert process_group_backend(DistributedConfig(dist_backend="nccl"), "cpu") == "gloo"


def test_a_run_of_other_machines_can_be_described(environment: pytest.MonkeyPatch) -> None:
    config = TrainerConfig(accelerator="cpu", devices=8, num_nodes=2)
    with pytest.raises(ConfigError, match="2 machines need a launcher"):
        find_launch(config)
    launch = find_launch(config, is_described=True)
    assert (launch.devices, launch.num_nodes, launch.processes) == (8, 2, 16)


def test_more_processes_than_the_gpus_they_see(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("LOCAL_WORLD_SIZE", "8")
    environment.setenv("WORLD_SIZE", "8")
    environment.setattr("torch.cuda.is_available", lambda: True)
    environment.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(
        ConfigError, match=r"started 8 processes on this machine, but they see 1 GPU; .*--gpus-per-node"
    ):
        find_launch(TrainerConfig())


def test_a_gloo_group_has_one_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers of a group race in torch, see `use_one_worker_per_gloo_group`."""
    monkeypatch.setattr(distributed.ProcessGroupGloo, "__init__", distributed.ProcessGroupGloo.__init__)
    for _ in range(2):  # a second run in the same process
        use_one_worker_per_gloo_group()
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        groups = [distributed.group.WORLD, distributed.new_group(backend="gloo", timeout=timedelta(seconds=123))]
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
        groups.append(distributed.new_group(backend="gloo"))
        options = [group._get_backend(torch.device("cpu")).options for group in groups if group is not None]
        assert [one._threads for one in options] == [1, 1, 1]
        assert options[1]._timeout == timedelta(seconds=123)
        for group in groups:
            distributed.all_reduce(torch.ones(1), group=group)
    finally:
        distributed.destroy_process_group()
