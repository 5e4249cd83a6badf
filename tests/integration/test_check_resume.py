"""scripts/check_resume.py: a run that resumes to the same bits, and runs that hide state from their checkpoints."""

import sys
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch

from scripts import check_resume
from sd_training.build.plan import Plan
from sd_training.build.run import Run, build_run
from tests.integration.training import options, train_in_processes

STEPS = 2


class HiddenState(pl.Callback):
    """Changes the weights after the save, by something that no checkpoint holds."""

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, *_: object) -> None:
        if trainer.global_step == STEPS:
            with torch.no_grad():
                next(module.parameters()).mul_(1.001)


class HiddenMoments(pl.Callback):
    """Changes the optimizer's state after the save; the first loss after it is still the same."""

    def on_train_batch_start(self, trainer: pl.Trainer, *_: object) -> None:
        if trainer.global_step == STEPS:
            for state in trainer.optimizers[0].state.values():
                state["exp_avg"] *= 0.5


def words(tmp_path: Path, pipeline_dir: Path, shards_dir: Path, **changes: Any) -> list[str]:
    prompts = {"sampling__every": 1, "sampling__prompts": "[a]"}  # nothing is drawn for a comparison
    own = options(tmp_path / "run", pipeline_dir, shards_dir, **(prompts | changes))
    return [*own, f"steps={STEPS}", f"folder={tmp_path / 'check'}"]


def status(monkeypatch: pytest.MonkeyPatch, argv: list[str]) -> object:
    monkeypatch.setattr(sys, "argv", ["check_resume.py", *argv])
    with pytest.raises(SystemExit) as ended:
        check_resume.main()
    return ended.value.code


def test_one_process_resumes_to_the_bit(
    tmp_path: Path,
    pipeline_dir: Path,
    shards_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert status(monkeypatch, words(tmp_path, pipeline_dir, shards_dir)) == 0
    printed = capsys.readouterr().out
    for part in ("losses", "weights", "ema", "optimizer"):
        assert f"{part:24} largest relative difference 0.0e+00 (allowed 0e+00)  ok" in printed
    assert "the run resumes" in printed
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("fault", [HiddenState, HiddenMoments])
def test_state_that_no_checkpoint_holds_is_found(
    fault: type[pl.Callback],
    tmp_path: Path,
    pipeline_dir: Path,
    shards_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def build(plan: Plan) -> Run:
        run = build_run(plan)
        if plan.run_dir.name == "whole":
            run.trainer.callbacks.append(fault())  # type: ignore[attr-defined]
        return run

    monkeypatch.setattr(check_resume, "build_run", build)
    assert status(monkeypatch, words(tmp_path, pipeline_dir, shards_dir)) == 1
    printed = capsys.readouterr().out
    assert "DIFFERENT" in printed and "does not resume to the same result" in printed


def test_two_processes(tmp_path: Path, pipeline_dir: Path, shards_dir: Path) -> None:
    changes = {"distributed__strategy": "fsdp", "system__batch_size": 4, "trainer__accelerator": "cpu"}
    printed = train_in_processes(words(tmp_path, pipeline_dir, shards_dir, **changes), 2, "scripts.check_resume")
    assert printed.count("the run resumes") == 1
