"""Milestones, best ones, and what is saved when a run dies of an exception."""

import re
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch

from sd_training.build.plan import make_plan
from sd_training.build.run import build_run
from sd_training.callbacks.base import OptimizerStepCallback
from sd_training.checkpoint import folder as sealed
from sd_training.checkpoint.folder import read_manifest, sealed_checkpoints
from sd_training.config.load import load_config
from sd_training.errors import DataError
from sd_training.training import TrainedModule
from sd_training.watchdog import HangWatch
from tests.integration.training import checkpoint_tensors, options, prepare, torchrun, train, train_in_processes


def names(run_dir: Path) -> list[str]:
    return [folder.name for folder in sealed_checkpoints(run_dir / "checkpoints")]


def test_milestones_stay(pipeline_dir: Path, shards_dir: Path, tmp_path: Path) -> None:
    changes = {"checkpoint__milestone_every": 3, "experiment__save_every": 1}
    train(options(tmp_path / "run", pipeline_dir, shards_dir, **changes))
    assert names(tmp_path / "run") == [f"step={step}" for step in (3, 6, 7, 8)]
    stored = read_manifest(tmp_path / "run" / "checkpoints" / "step=3").info
    assert stored == {"is_milestone": True, "validation_loss": None}


class FailsAt(pl.Callback):
    """Raises in the first part of a step, or between the optimizer and the averages."""

    def __init__(self, hook: str, step: int, error: BaseException) -> None:
        setattr(self, hook, self._fail)
        self.step, self.error = step, error

    def _fail(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            raise self.error


@pytest.mark.parametrize(
    ("hook", "error", "saved"),
    [
        ("on_train_batch_start", RuntimeError("a defect"), "step=5"),
        ("on_train_batch_start", DataError("bad data"), "step=5"),
        ("on_before_backward", RuntimeError("a defect"), "step=5"),
        ("on_train_batch_start", KeyboardInterrupt(), None),
    ],
)
def test_an_exception_between_two_steps_loses_none(
    pipeline_dir: Path, shards_dir: Path, tmp_path: Path, hook: str, error: BaseException, saved: str | None
) -> None:
    run_dir = tmp_path / "run"
    argv = options(run_dir, pipeline_dir, shards_dir, experiment__save_every=100, system__gradient_accumulation=2)
    argv.append("system.batch_size=4")
    run = prepare(argv)
    run.trainer.callbacks.insert(0, FailsAt(hook, 5, error))  # type: ignore[attr-defined]
    with pytest.raises((type(error), SystemExit)):
        run.trainer.fit(run.module, datamodule=run.data)
    assert names(run_dir) == ([] if saved is None else [saved])
    if error.args == ("a defect",) and hook == "on_train_batch_start":
        whole = [*options(tmp_path / "whole", pipeline_dir, shards_dir, experiment__save_every=100), *argv[-2:]]
        train(whole), train(argv)
        one, other = (checkpoint_tensors(tmp_path / name, 8) for name in ("whole", "run"))
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("is_asynchronous", [False, True])
def test_what_an_exception_saves_has_the_time_of_a_save(
    pipeline_dir: Path, shards_dir: Path, tmp_path: Path, is_asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"experiment__save_every": 100, "checkpoint__asynchronous": is_asynchronous}
    watch = HangWatch({}, tmp_path / "run")
    run = build_run(make_plan(load_config(options(tmp_path / "run", pipeline_dir, shards_dir, **changes))), None, watch)
    run.trainer.callbacks.insert(0, FailsAt("on_train_batch_start", 5, RuntimeError("a defect")))  # type: ignore[attr-defined]
    seal, sections = sealed.seal_partial, list[str]()

    def noted(*arguments: Any) -> Path:
        sections.append(watch._current.section)
        return seal(*arguments)

    monkeypatch.setattr(sealed, "seal_partial", noted)
    with pytest.raises(RuntimeError, match="a defect"):
        run.trainer.fit(run.module, datamodule=run.data)
    assert names(tmp_path / "run") == ["step=5"] and sections == ["save"]


class FailsAfterTheOptimizer(OptimizerStepCallback):
    """Weights are a step ahead of the average."""

    def on_optimizer_step(self, trainer: pl.Trainer, module: TrainedModule, step: int) -> None:
        if step == 5:
            raise RuntimeError("a defect")


def test_a_torn_state_is_not_saved(pipeline_dir: Path, shards_dir: Path, tmp_path: Path) -> None:
    run = prepare(options(tmp_path / "run", pipeline_dir, shards_dir, experiment__save_every=100))
    run.trainer.callbacks.insert(0, FailsAfterTheOptimizer())  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="a defect"):
        run.trainer.fit(run.module, datamodule=run.data)
    assert names(tmp_path / "run") == []


def dies(tmp_path: Path, pipeline_dir: Path, shards_dir: Path, *how: str, strategy: str) -> tuple[list[str], str]:
    """Options of a run of two processes of which some end on their own after step 5, and what the run said."""
    changes = {"experiment__save_every": 100, "system__batch_size": 4, "trainer__accelerator": "cpu"}
    argv = [*options(tmp_path / "run", pipeline_dir, shards_dir, **changes), f"distributed.strategy={strategy}"]
    return argv, torchrun([*how, *argv], 2, "tests.integration.dying_run", status=1)


def test_two_processes_save_at_an_exception_of_both(pipeline_dir: Path, shards_dir: Path, tmp_path: Path) -> None:
    argv, said = dies(tmp_path, pipeline_dir, shards_dir, "0,1", "raise", strategy="ddp")
    assert "RuntimeError: a defect" in said
    assert names(tmp_path / "run") == ["step=5"]
    train_in_processes(argv, 2)
    train_in_processes([*argv, "experiment.name=whole"], 2)
    one, other = (checkpoint_tensors(tmp_path / name, 8) for name in ("whole", "run"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_processes_that_lost_the_run_leave_nothing_for_those_that_have_it(
    pipeline_dir: Path, shards_dir: Path, tmp_path: Path
) -> None:
    """Those would take a note of a failure for one of their own, and end."""
    said = dies(tmp_path, pipeline_dir, shards_dir, "0,1", "taken", strategy="ddp")[1]
    assert "another start has taken this run over" in said, said
    assert names(tmp_path / "run") == [] and not (tmp_path / "run/first_failure.json").exists()


@pytest.mark.parametrize(
    ("rank", "how", "strategy"),
    [
        ("1", "raise", "ddp"),
        ("0", "raise", "fsdp"),
        ("1", "backward", "fsdp"),
        ("0", "exit", "ddp"),
        ("1", "exit", "fsdp"),
    ],
)
def test_who_ends_alone_is_named_in_one_sentence(
    pipeline_dir: Path, shards_dir: Path, tmp_path: Path, rank: str, how: str, strategy: str
) -> None:
    """The other one has nothing to add: no traceback, and no error of the network that the end has caused."""
    said = dies(tmp_path, pipeline_dir, shards_dir, rank, how, strategy=strategy)[1]
    assert names(tmp_path / "run") == []
    reason = "it ended without a message" if how == "exit" else "RuntimeError: a defect"
    sentence = f"error: rank {rank} failed first, so the others end too: {reason}"
    assert said.count(sentence) == 1, said
    kept = (tmp_path / "run/train.log").read_text()
    assert kept.count(sentence) == 1
    for text in (said, kept):
        assert not re.search(r"gloo/|Connection (reset|closed)|Read error", text), text
    # torchrun adds a traceback of its own, which nothing in the processes that it starts can change.
    tracebacks = said.count("Traceback (most recent call last):") - 1
    if how == "exit":
        assert tracebacks == 0 and "the steps since the last save are lost" not in said
        assert f"rank      : {rank} (local_rank: {rank})\n  exitcode  : 3 (pid" in said.partition("Root Cause")[2]
    else:
        assert (
            tracebacks == 1 == kept.count("Traceback (most recent call last):") and f"[rank{rank}]: Traceback" in said
        )
        assert said.count("the steps since the last save are lost") == 1
        cause = said.partition("Root Cause")[2]
        assert f"rank      : {rank} (" in cause and "traceback : RuntimeError: a defect\n" in cause
    assert (tmp_path / "run/first_failure.json").is_file()
    assert said.count("exitcode  : 1 (pid") == (1 if how == "exit" else 2), said
