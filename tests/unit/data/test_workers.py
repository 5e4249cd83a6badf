import json
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sd_training.config.plan import BatchPlan
from sd_training.data.workers import MAX_DEATHS, WINDOW_STEPS, WorkerDeaths
from sd_training.errors import DataError
from sd_training.types import PixelBatch
from tests.unit.data.making import training_data

PLAN = BatchPlan(micro_batch=2, accumulation=3, processes=1, num_examples=72)


class Ended:
    """Stands for a process of multiprocessing that has ended."""

    def __init__(self, exitcode: int) -> None:
        self.exitcode = exitcode

    def is_alive(self) -> bool:
        return False


def noises(batches: Iterator[PixelBatch]) -> Iterator[Tensor]:
    """What tells every sample and position from every other."""
    return (batch.noise for batch in batches if batch.noise is not None)


def test_nothing_is_lost_or_seen_twice(shards_dir: Path, tmp_path: Path) -> None:
    """In the middle of an optimizer step a loader process is killed, later the server that they are forked from."""
    expected = list(noises(iter(training_data(shards_dir, PLAN, workers=0).loader(0, lambda: 0))))
    before = set(torch.multiprocessing.active_children())
    loader = training_data(shards_dir, PLAN, workers=2, run_dir=tmp_path).loader(0, lambda: 0)
    delivered = []
    for number, noise in enumerate(noises(iter(loader))):
        delivered.append(noise)
        if number == 7:
            worker = (set(torch.multiprocessing.active_children()) - before).pop()
            assert worker.pid is not None
            os.kill(worker.pid, signal.SIGKILL)
        elif number == 19:
            os.kill(forkserver._forkserver._forkserver_pid, signal.SIGKILL)  # type: ignore[attr-defined]
            time.sleep(1)  # its children notice
    assert len(delivered) == len(expected) == 36
    assert all(torch.equal(a, b) for a, b in zip(delivered, expected, strict=True))
    incidents = [json.loads(path.read_text()) for path in (tmp_path / "incidents").glob("step=*.loader-rank0.json")]
    incidents.sort(key=lambda incident: incident["optimizer_step"])
    assert len(incidents) == 2
    assert incidents[0]["how"] == "was killed by SIGKILL" and "server" in incidents[1]["how"]
    assert 2 <= incidents[0]["optimizer_step"] <= 4


def test_too_many_deaths_end_the_run() -> None:
    deaths, error = WorkerDeaths(None), RuntimeError("exited unexpectedly")
    for step in range(0, 10 * WINDOW_STEPS, WINDOW_STEPS):
        deaths.explain([Ended(-9)], step, error)  # type: ignore[list-item]
    deaths = WorkerDeaths(None)
    for step in range(MAX_DEATHS):
        deaths.explain([Ended(-9)], step, error)  # type: ignore[list-item]
    with pytest.raises(DataError, match=r"died 4 times .* was killed by SIGKILL at step 999"):
        deaths.explain([Ended(-9)], WINDOW_STEPS - 1, error)  # type: ignore[list-item]


def test_an_error_of_living_processes_is_raised() -> None:
    with pytest.raises(RuntimeError, match="a defect"):
        WorkerDeaths(None).explain([], 3, RuntimeError("a defect"))
