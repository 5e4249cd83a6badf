"""How the process of a rehearsal is started; tests/integration/test_rehearsal.py starts it."""

from dataclasses import replace
from pathlib import Path

import pytest

from sd_training.callbacks.preemption import STEP_FILE_VARIABLE
from sd_training.callbacks.second_run import SecondRun, _environment
from sd_training.config.batch_plan import BatchPlan
from sd_training.watch.status_file import STATUS_FILE_VARIABLE


def second(accumulation: int, processes: int, sharing: int = 1) -> SecondRun:
    return SecondRun(Path("run"), "cpu", BatchPlan(4, accumulation, processes, 1000, sharing), limit_s=1.0)


@pytest.mark.parametrize("accumulation, processes, sharing", [(1, 2, 1), (3, 4, 1), (2, 1, 2)])
def test_one_process_takes_the_samples_of_all(accumulation: int, processes: int, sharing: int) -> None:
    words = second(accumulation, processes, sharing).words()
    assert f"system.gradient_accumulation={accumulation * processes}" in words
    assert "distributed.strategy=single" in words and "distributed.mesh.tensor=1" in words


def test_a_run_of_one_process_is_resumed_as_it_is() -> None:
    words = second(3, 1).words()
    assert not any(word.startswith(("distributed.", "system.", "trainer.compile")) for word in words)
    assert "trainer.devices=1" in words  # and not all of the machine's


def test_it_is_given_the_permissions_of_the_run() -> None:
    words = ("dataset.params.allow_pipe=true", "dataset.mix[1].params.allow_pipe=true")
    assert set(words) <= set(replace(second(1, 1), permissions=words).words())


def test_it_knows_nothing_of_the_launcher() -> None:
    told = {"RANK": "0", "WORLD_SIZE": "2", "SLURM_PROCID": "0", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x"}
    told |= {STEP_FILE_VARIABLE: "/step", STATUS_FILE_VARIABLE: "/status"}
    environment = _environment({**told, "HOME": "/h", "CUDA_VISIBLE_DEVICES": "3", "PYTHONPATH": "/p"})
    assert environment == {"HOME": "/h", "CUDA_VISIBLE_DEVICES": "3", "PYTHONPATH": "/p"}
