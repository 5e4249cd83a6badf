"""`logging`: what cannot be profiled or measured is refused in one sentence."""

from pathlib import Path

import pytest

from tests.unit.config.test_check_watch import problems


@pytest.mark.parametrize("value", ["null", "[1,1]", "[2,4]", "[1,2]"])
def test_steps_of_the_run_can_be_profiled(pipeline_dir: Path, value: str) -> None:
    assert problems(pipeline_dir, "system.batch_size=16", f"logging.profile_steps={value}") == []


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("[3,2]", "logging.profile_steps: the first step, 3, is after the last one, 2; swap them"),
        ("[3,5]", "logging.profile_steps: 5 is beyond the end of the run, which has at most 4 steps"),
        ("[3]", "logging.profile_steps: "),
        ("[0,2]", "logging.profile_steps"),
        ("[1,2,3]", "logging.profile_steps: "),
        ("3", "logging.profile_steps: "),
    ],
)
def test_other_steps_are_refused(pipeline_dir: Path, value: str, problem: str) -> None:
    (found,) = problems(pipeline_dir, "system.batch_size=16", f"logging.profile_steps={value}")
    assert found.startswith(problem) and "\n" not in found


def test_norms_of_layer_groups_need_gradients(pipeline_dir: Path) -> None:
    words = ["logging.gradient_norms=true", "distributed.strategy=deepspeed_2"]
    (found,) = problems(pipeline_dir, *words)
    assert found.startswith("logging.gradient_norms: deepspeed_2 keeps the gradients itself")
    assert problems(pipeline_dir, words[0], "distributed.strategy=fsdp") == []
