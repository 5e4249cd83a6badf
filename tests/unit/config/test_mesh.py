"""Strategies and meshes as blocks of processes."""

import pytest

from sd_training.config.plan import Layout, Mesh, find_layout
from sd_training.config.schema import DistributedConfig, MeshConfig
from sd_training.errors import ConfigError


def layout(processes: int, devices: int | None = None, **options: object) -> Layout:
    return find_layout(DistributedConfig(**options), processes, devices or processes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "processes, options, expected",
    [
        (1, {}, Layout("single", Mesh(1, 1, 1))),
        (8, {}, Layout("ddp", Mesh(8, 1, 1))),
        (1, {"strategy": "ddp"}, Layout("ddp", Mesh(1, 1, 1))),
        (8, {"strategy": "fsdp"}, Layout("fsdp", Mesh(1, 8, 1))),
        (8, {"strategy": "deepspeed_3"}, Layout("deepspeed_3", Mesh(8, 1, 1))),
        (8, {"mesh": MeshConfig(data=-1)}, Layout("ddp", Mesh(8, 1, 1))),
        (8, {"mesh": MeshConfig(fsdp=-1)}, Layout("fsdp", Mesh(1, 8, 1))),
        (8, {"mesh": MeshConfig(data=-1, fsdp=4)}, Layout("hsdp", Mesh(2, 4, 1))),
        (8, {"mesh": MeshConfig(data=2, fsdp=2, tensor=2)}, Layout("hsdp", Mesh(2, 2, 2))),
        (8, {"mesh": MeshConfig(tensor=8)}, Layout("fsdp", Mesh(1, 1, 8))),
    ],
)
def test_layouts(processes: int, options: dict[str, object], expected: Layout) -> None:
    assert layout(processes, **options) == expected


def test_hybrid_sharding_copies_between_machines() -> None:
    assert layout(16, devices=8, strategy="hsdp") == Layout("hsdp", Mesh(2, 8, 1))
    with pytest.raises(ConfigError, match="one machine with 8 processes; use fsdp"):
        layout(8, strategy="hsdp")


@pytest.mark.parametrize("mesh", [{"data": 3}, {"data": -1, "fsdp": 3}, {"data": 2, "fsdp": 8}, {"tensor": 2}])
def test_a_mesh_that_does_not_fit(mesh: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="does not make 8 processes; the product must be 8"):
        layout(8, mesh=MeshConfig(**mesh))


def test_single_with_several_processes() -> None:
    with pytest.raises(ConfigError, match="single, but 2 processes were started"):
        layout(2, strategy="single")


def test_samples_are_shared_along_the_tensor_axis() -> None:
    mesh = Mesh(2, 2, 2)
    assert mesh.data_ranks == 4
    assert [mesh.data_rank(rank) for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]
