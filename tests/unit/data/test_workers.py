import os
import re
import signal
import time
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from sd_training.config.plan import BatchPlan
from sd_training.data.loader import MAX_DEATHS, WINDOW_STEPS, TrainingLoader
from sd_training.data.samples.sample import BLOCKS, PREFETCHED
from sd_training.errors import DataError
from sd_training.types import Form, PixelBatch, shared_memory
from tests.unit.data.making import equal_bits, training_data

PLAN = BatchPlan(micro_batch=2, accumulation=3, processes=1, num_examples=72)


class Ended:
    """Stands for a process of multiprocessing that has ended."""

    def __init__(self, exitcode: int) -> None:
        self.exitcode = exitcode
        self.sentinel, writer = os.pipe()
        os.close(writer)  # readable, as the sentinel of a process that has ended is

    def is_alive(self) -> bool:
        return False


def tensors(batch: PixelBatch) -> Iterator[Tensor]:
    for value in vars(batch).values():
        yield from value.values() if isinstance(value, dict) else (value,)


def test_nothing_is_lost_or_seen_twice(shards_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In the middle of an optimizer step a loader process is killed, later the server that they are forked from."""
    expected = list(training_data(shards_dir, PLAN, workers=0).loader(0, lambda: 0))
    before = set(torch.multiprocessing.active_children())
    loader = training_data(shards_dir, PLAN, workers=2).loader(0, lambda: 0)
    delivered = []
    for number, batch in enumerate(loader):
        delivered.append(batch)
        if number == 7:
            worker = (set(torch.multiprocessing.active_children()) - before).pop()
            assert worker.pid is not None
            os.kill(worker.pid, signal.SIGKILL)
        elif number == 19:
            os.kill(forkserver._forkserver._forkserver_pid, signal.SIGKILL)  # type: ignore[attr-defined]
            time.sleep(1)  # its children notice
    assert len(delivered) == len(expected) == 36
    assert all(equal_bits(a, b) for a, b in zip(delivered, expected, strict=True))
    # One file descriptor per batch comes from the loader process, not one per tensor.
    assert all(len({tensor.untyped_storage().data_ptr() for tensor in tensors(batch)}) == 1 for batch in delivered)
    first, second = (record.message for record in caplog.records if "a loader process" in record.message)
    assert re.search(r"was killed by SIGKILL at optimizer step [234];", first) and "the server" in second


def test_tensors_of_a_block(shards_dir: Path) -> None:
    """Also of those that have their channels last in memory, as pixels have: each begins a cache line, none
    touches another."""
    samples = training_data(shards_dir, PLAN, workers=0).samples()
    forms = samples._forms(2, 0) | {"moments": Form((2, 8, 3, 5), torch.bfloat16, is_channels_last=True)}
    batch = PixelBatch.allocate(forms, shared_memory)
    assert batch.moments.is_contiguous(memory_format=torch.channels_last) and not batch.moments.is_contiguous()
    for number, tensor in enumerate(tensors(batch)):
        tensor.fill_(number % 2)
        assert tensor.untyped_storage().is_shared() and (tensor.data_ptr() % 64 == 0 or not tensor.numel())
    assert all(bool((tensor == number % 2).all()) for number, tensor in enumerate(tensors(batch)))
    batch.arrays()["moments"][1] = np.int16(0x3F80)  # bits of 1 in bf16
    assert batch.moments.float()[1].unique().tolist() == [1.0]
    copy = batch.copied(is_pinned=False)
    assert equal_bits(copy, batch)
    assert [tensor.stride() for tensor in tensors(copy)] == [tensor.stride() for tensor in tensors(batch)]
    batch.noise.fill_(5)
    assert not (copy.noise == 5).any()


def test_blocks_of_a_loader_process_come_again(shards_dir: Path) -> None:
    samples = training_data(shards_dir, PLAN, workers=0).samples()
    first = [samples.next_block(100).data_ptr() for _ in range(BLOCKS)]
    assert len(set(first)) == BLOCKS == PREFETCHED + 1
    assert [samples.next_block(size).data_ptr() for size in (100, 60)] == first[:2]
    larger = samples.next_block(200)
    assert larger.nbytes >= 200 and larger.is_shared()
    assert [samples.next_block(100).data_ptr() for _ in range(3)] == [*first[:2], larger.data_ptr()]


@pytest.fixture
def loader(shards_dir: Path) -> TrainingLoader:
    return training_data(shards_dir, PLAN).loader(0, lambda: 0)


def test_too_many_deaths_end_the_run(loader: TrainingLoader) -> None:
    error = RuntimeError("exited unexpectedly")
    for step in range(-10 * WINDOW_STEPS, 0, WINDOW_STEPS):
        loader.check_death([Ended(-9)], step, error)  # type: ignore[list-item]
    for step in range(1, MAX_DEATHS):
        loader.check_death([Ended(-9)], step, error)  # type: ignore[list-item]
    with pytest.raises(DataError, match=r"died 4 times .* was killed by SIGKILL at step 3"):
        for step in (0, 3):
            loader.check_death([Ended(-9)], step, error)  # type: ignore[list-item]


def test_an_error_of_living_processes_is_raised(loader: TrainingLoader) -> None:
    with pytest.raises(RuntimeError, match="a defect"):
        loader.check_death([], 3, RuntimeError("a defect"))
