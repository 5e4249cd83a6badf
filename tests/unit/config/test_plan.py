"""Batch arithmetic, and strategies and meshes as blocks of processes."""

import pytest

from sd_training.config.plan import BatchPlan, Layout, Mesh, find_layout
from sd_training.config.schema import DistributedConfig, MeshConfig
from sd_training.errors import ConfigError


def test_sentence() -> None:
    plan = BatchPlan(micro_batch=32, accumulation=2, processes=4, num_examples=1_000_000)
    assert plan.sentence() == (
        "batch_size 32 × accumulation 2 × 4 processes = 256 images per optimizer step; 1,000,000 images = 3,906 steps"
    )


def test_sentence_in_the_singular() -> None:
    plan = BatchPlan(micro_batch=1, accumulation=1, processes=1, num_examples=1)
    assert plan.sentence() == (
        "batch_size 1 × accumulation 1 × 1 process = 1 image per optimizer step; 1 image = 1 step"
    )


@pytest.mark.parametrize(("examples", "steps"), [(256, 1), (511, 1), (512, 2)])
def test_only_whole_steps_count(examples: int, steps: int) -> None:
    assert BatchPlan(32, 2, 4, examples).num_steps == steps


def test_less_than_one_step_is_an_error_that_names_the_options() -> None:
    with pytest.raises(ConfigError, match=r"experiment: a run of 255 images is less .* 4 processes = 256 images"):
        BatchPlan(32, 2, 4, 255).sentence()


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


@pytest.mark.parametrize(
    "mesh",
    [
        {"data": 3},
        {"data": -1, "fsdp": 3},
        {"data": 2, "fsdp": 8},
        {"tensor": 2},
        {"fsdp": 0},
        {"data": -1, "fsdp": -1},
    ],
)
def test_a_mesh_that_does_not_fit(mesh: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="does not make 8 processes; the product must be 8"):
        layout(8, mesh=MeshConfig(**mesh))


def test_single_with_several_processes() -> None:
    with pytest.raises(ConfigError, match="single, but 2 processes were started"):
        layout(2, strategy="single")


def test_samples_are_shared_along_the_tensor_axis() -> None:
    assert Mesh(2, 2, 2).data_ranks == 4
