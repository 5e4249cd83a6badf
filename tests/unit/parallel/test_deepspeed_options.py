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
        "zero_optimization": {"stage": "auto", "reduce_bucket_size": 5, "offload_optimizer": "auto"},
        "wall_clock_breakdown": True,
    }
    path.write_text(json.dumps(given))
    found = options(path, offload_optimizer=True)
    assert found["zero_optimization"].pop("offload_optimizer")["device"] == "cpu"
    assert found == {
        "zero_optimization": {"reduce_bucket_size": 5, "stage": 2},
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
        ({"zero_optimization": [1]}, "or its zero_optimization is none"),
        ({"zero_optimization": {"round_robin_gradients": True}}, "round_robin_gradients', which this trainer does not"),
        ({"zero_optimization": {"cpu_offload": True}}, "which distributed.offload_optimizer decides"),
        ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, "which distributed.offload_parameters decides"),
        ({"tensor_parallel": {"autotp_size": 2}}, "'tensor_parallel', which distributed.mesh.tensor decides"),
        ({"communication_data_type": "fp7"}, "DeepSpeed refuses it: .*fp7"),
        ({"zero_optimization": {"reduce_bucket_size": "many"}}, "DeepSpeed refuses it: .*reduce_bucket_size"),
        ({"flops_profiler": {"enabled": True, "output_file": "x"}}, "'flops_profiler', which this trainer does not"),
        ({"autotuning": {"enabled": False}, "tensorboard": {}}, "'autotuning', 'tensorboard', which this"),
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


def test_every_key_that_is_passed_on_is_one_of_deepspeed(tmp_path: Path) -> None:
    path = tmp_path / "deepspeed.json"
    zero = {
        **dict.fromkeys(["allgather_bucket_size", "reduce_bucket_size", "sub_group_size"], 5),
        **dict.fromkeys(["allgather_partitions", "contiguous_gradients", "overlap_comm", "reduce_scatter"], True),
        **dict.fromkeys(["stage3_max_live_parameters", "stage3_max_reuse_distance"], 7),
        **dict.fromkeys(["stage3_param_persistence_threshold", "stage3_prefetch_bucket_size"], 8),
        "ignore_unused_parameters": False,
        "stage": 2,
    }
    top = {
        "communication_data_type": "fp32",
        "gradient_predivide_factor": 2,
        "prescale_gradients": True,
        "steps_per_print": 10,
        "wall_clock_breakdown": False,
    }
    given = {**top, "zero_optimization": zero}
    path.write_text(json.dumps(given))
    assert {key: options(path)[key] for key in given} == given
    assert {*top, *(f"zero_optimization.{key}" for key in zero)} == ALLOWED


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
