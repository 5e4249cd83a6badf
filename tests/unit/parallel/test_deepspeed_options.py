"""DeepSpeed's own configuration beside this trainer's options."""

import json
from pathlib import Path
from typing import Any

import pytest

from sd_training.errors import ConfigError
from sd_training.parallel.deepspeed import ALLOWED, deepspeed_options


def options(path: Path | None, stage: int = 2, **offload: bool) -> dict[str, Any]:
    offload = {"offload_optimizer": False, "offload_parameters": False, **offload}
    return deepspeed_options(stage, path=None if path is None else str(path), **offload)


def test_a_file_adds_and_auto_counts_as_absent(tmp_path: Path) -> None:
    path = tmp_path / "deepspeed.json"
    given = {
        "train_batch_size": "auto",
        "zero_optimization": {
            "stage": "auto",
            "reduce_bucket_size": 5,
            "offload_optimizer": {"device": "cpu", "pin_memory": False},
            "offload_param": {"device": "none"},
        },
        "wall_clock_breakdown": True,
    }
    path.write_text(json.dumps(given))
    assert options(path, offload_optimizer=True) == {
        "zero_optimization": {
            "reduce_bucket_size": 5,
            "offload_optimizer": {"device": "cpu", "pin_memory": False},
            "stage": 2,
        },
        "wall_clock_breakdown": True,
        "zero_allow_untested_optimizer": True,
    }


def test_offload_without_a_file() -> None:
    zero = options(None, 3, offload_optimizer=True, offload_parameters=True)["zero_optimization"]
    assert zero["stage"] == 3
    assert zero["offload_optimizer"]["device"] == zero["offload_param"]["device"] == "cpu"


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"optimizer": {"type": "Adam"}}, "'optimizer', which optimizer.name decides"),
        ({"fp16": {"enabled": True}}, "'fp16', which model.mixed_precision decides"),
        ({"zero_optimization": {"stage": 3}}, "has ZeRO stage 3, but distributed.strategy is deepspeed_2"),
        ([1], "is not a JSON object"),
        ({"zero_optimization": [1]}, r"zero_optimization=\[1\], which must be a JSON object"),
        ({"zero_optimization": {"offload_optimizr": {}}}, "DeepSpeed refuses it: .*offload_optimizr"),
        ({"zero_optimization": {"round_robin_gradients": True}}, "round_robin_gradients=true: saves would not find"),
        ({"zero_optimization": {"compute_grad_norm": False}}, "compute_grad_norm=false: steps that are not finite"),
        ({"zero_optimization": {"cpu_offload": True}}, "set distributed.offload_optimizer=true instead"),
        ({"tensor_parallel": {"autotp_size": 2}}, "'tensor_parallel', which distributed.mesh.tensor decides"),
        ({"activation_checkpointing": 3}, "DeepSpeed refuses it"),
        ({"comms_logger": {"enabled": "perhaps"}}, "DeepSpeed refuses it: .*enabled"),
        ({"communication_data_type": "fp7"}, "DeepSpeed refuses it: .*fp7"),
        (
            {"flops_profiler": {"enabled": True, "output_file": "x"}},
            "'flops_profiler', which this trainer does not pass on; remove",
        ),
        ({"tensorboard": {"output_path": "x"}}, "'tensorboard', which this trainer"),
        (
            {"autotuning": {"enabled": False}},
            "'autotuning', which .* not one of activation_checkpointing, comms_",
        ),
        ({"gradient_allreduce_op": "sum"}, "'gradient_allreduce_op', which this"),
        ({"data_types": {"param_dtype": "bf16"}}, "'data_types', of which only grad_accum_dtype may be set"),
        ({"zero_optimization": {"zenflow": {}}}, "zero_optimization.zenflow: its processes hold"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, "set distributed.offload_optimizer=true"),
    ],
)
def test_a_file_that_contradicts(tmp_path: Path, given: Any, problem: str) -> None:
    path = tmp_path / "deepspeed.json"
    path.write_text(json.dumps(given))
    with pytest.raises(ConfigError, match=problem):
        options(path)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"distributed\.deepspeed_config: .*missing\.json cannot be read"):
        options(tmp_path / "missing.json")


def test_shares_on_a_disk_that_saves_cannot_read(tmp_path: Path) -> None:
    path = tmp_path / "deepspeed.json"
    path.write_text(json.dumps({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}))
    with pytest.raises(ConfigError, match="device=nvme, from which saves cannot read"):
        options(path, offload_optimizer=True)


def test_shares_in_processes_that_saves_cannot_read(tmp_path: Path) -> None:
    path = tmp_path / "deepspeed.json"
    path.write_text(json.dumps({"zero_optimization": {"offload_optimizer": {"device": "cpu", "super_offload": True}}}))
    with pytest.raises(ConfigError, match=r"offload_optimizer\.super_offload: its processes hold"):
        options(path, 3, offload_optimizer=True)


def test_every_key_that_is_passed_on_is_one_of_deepspeed(tmp_path: Path) -> None:
    path = tmp_path / "deepspeed.json"
    given = {
        "activation_checkpointing": {"profile": True},
        "comms_logger": {"enabled": True},
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "disable_allgather": False,
        "dump_state": True,
        "gradient_predivide_factor": 2,
        "memory_breakdown": False,
        "prescale_gradients": True,
        "steps_per_print": 10,
        "timers": {"throughput": {"enabled": False}},
        "wall_clock_breakdown": False,
        "zero_force_ds_cpu_optimizer": True,
    }
    path.write_text(json.dumps(given))
    assert {key: options(path)[key] for key in given} == given
    assert given.keys() | {"zero_optimization"} == set(ALLOWED)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('{"a": ' + "[" * 200_000 + "]" * 200_000 + "}", "cannot be read: .*recursion"),
        ('{"a": "' + "x" * 2**20 + '"}', "cannot be read: Unterminated"),
        ('{"a": ' + "1" * 5000 + "}", "cannot be read"),
        ('{"a": "\\ud800"}', "not pass on"),
        ("\x00", "cannot be read"),
    ],
)
def test_hostile_files(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "deepspeed.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=problem) as caught:
        options(path)
    assert len(str(caught.value)) < 1000


def test_many_unknown_keys_make_a_short_message(tmp_path: Path) -> None:
    path = tmp_path / "deepspeed.json"
    path.write_text(json.dumps({f"{i}" * 200: 1 for i in range(500)}))
    with pytest.raises(ConfigError, match="which this trainer does not pass on") as caught:
        options(path)
    assert len(str(caught.value)) < 2_000
