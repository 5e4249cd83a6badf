"""Nothing is collected while a step is under way, and nothing piles up."""

import gc
import weakref
from pathlib import Path

import pytest
import pytorch_lightning as pl

import train as program
from sd_training.build.plan import make_plan
from sd_training.config.load import load_config
from sd_training.log import RunLog
from sd_training.signals import StopSignals
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


def test_what_was_built_is_passed_over(
    tmp_path: Path, pipeline_dir: Path, shards_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`gc.get_objects` lists what a collection looks at."""
    seen: list[bool] = []

    def fit(self: pl.Trainer, module: pl.LightningModule, **_: object) -> None:
        later = [seen]  # made after the freeze
        listed = {id(entry) for entry in gc.get_objects()}
        seen.extend([id(module) in listed, id(later) in listed])

    monkeypatch.setattr(pl.Trainer, "fit", fit)
    plan = make_plan(load_config(options(tmp_path / "run", pipeline_dir, shards_dir)))
    program.train(plan, StopSignals(), RunLog())
    assert seen == [False, True]


def test_a_run_that_dies_leaves_the_collector_at_work(tmp_path: Path, pipeline_dir: Path, shards_dir: Path) -> None:
    with pytest.raises(Interrupted):
        train(options(tmp_path / "run", pipeline_dir, shards_dir), CrashAfter(3))
    assert gc.isenabled()
