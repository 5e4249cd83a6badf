"""Nothing is collected while a step is under way, and nothing piles up."""

import gc
import weakref
from pathlib import Path

import pytest
import pytorch_lightning as pl

from tests.integration.training import CrashAfter, Interrupted, options, train


class Cycle:
    def __init__(self) -> None:
        self.itself = self


class MakesCycles(pl.Callback):
    """Leaves an object that only the collector can free in every step, and notes how many are left."""

    def __init__(self) -> None:
        self.made: list[weakref.ref[Cycle]] = []
        self.left: list[int] = []
        self.states: set[bool] = set()

    def on_train_batch_start(self, *_: object) -> None:
        self.left.append(sum(made() is not None for made in self.made))
        self.made.append(weakref.ref(Cycle()))
        self.states.add(gc.isenabled())


def test_between_the_steps_only(tmp_path: Path, pipeline_dir: Path, shards_dir: Path) -> None:
    assert gc.isenabled()
    cycles = MakesCycles()
    train(options(tmp_path / "run", pipeline_dir, shards_dir), cycles)
    assert cycles.states == {False} and cycles.left == [0] * 8 and gc.isenabled()


def test_a_run_that_dies_leaves_the_collector_at_work(tmp_path: Path, pipeline_dir: Path, shards_dir: Path) -> None:
    with pytest.raises(Interrupted):
        train(options(tmp_path / "run", pipeline_dir, shards_dir), CrashAfter(3))
    assert gc.isenabled()
