"""`checkpoint.rehearse`: a second process resumes from the first checkpoint, and its loss is compared."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch

from sd_training.callbacks.second_run import SecondRun
from sd_training.config.batch_plan import BatchPlan
from sd_training.distributed.saves import AVERAGES
from tests import makers
from tests.integration.training import ROOT, checkpoint_tensors, options, train, train_in_processes

STEPS, SAVED = 6, 2


def rehearsed(run_dir: Path) -> dict[str, Any]:
    outcome: dict[str, Any] = json.loads((run_dir / "rehearsal.json").read_text())
    return outcome


def short(run_dir: Path, pipeline_dir: Path, shards_dir: Path, **changes: object) -> list[str]:
    changes = {"experiment__num_examples_to_see": 8 * STEPS, "checkpoint__rehearse": True} | changes
    return options(run_dir, pipeline_dir, shards_dir, **changes)


class ForgetsAverage(pl.Callback):
    """A checkpoint without the average."""

    def on_save_checkpoint(self, trainer: pl.Trainer, module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        del checkpoint[AVERAGES]


class HiddenState(pl.Callback):
    """Changes the weights after the save, by something that no checkpoint holds."""

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, *_: object) -> None:
        if trainer.global_step == SAVED:
            with torch.no_grad():
                next(module.parameters()).mul_(1.001)


def test_the_loss_is_the_same_to_the_bit_and_the_run_as_well(
    tmp_path: Path, pipeline_dir: Path, shards_dir: Path
) -> None:
    train(short(tmp_path / "run", pipeline_dir, shards_dir, system__gradient_accumulation=2, system__batch_size=4))
    outcome = rehearsed(tmp_path / "run")
    assert outcome["problem"] == "" and outcome["optimizer_step"] == SAVED and outcome["seconds"] > 0
    assert outcome["losses"] == outcome["losses_resumed"] and len(outcome["losses"]) == 2
    assert not (tmp_path / "run" / "rehearsal").exists()
    without = {"checkpoint__rehearse": False, "system__gradient_accumulation": 2, "system__batch_size": 4}
    train(short(tmp_path / "without", pipeline_dir, shards_dir, **without))
    with_it, without_it = (checkpoint_tensors(tmp_path / name, STEPS) for name in ("run", "without"))
    assert with_it.keys() == without_it.keys()
    assert all(torch.equal(tensor, without_it[name]) for name, tensor in with_it.items())

    (tmp_path / "run" / "rehearsal.json").unlink()
    more = {"experiment__num_examples_to_see": 8 * (STEPS + 2), "system__gradient_accumulation": 2}
    train(short(tmp_path / "run", pipeline_dir, shards_dir, system__batch_size=4, **more))
    assert not (tmp_path / "run" / "rehearsal.json").exists()  # a run that was resumed has shown that it can be


class HiddenMoments(pl.Callback):
    """Changes the state of the optimizer after the save; the first loss after it is still the same."""

    def on_train_batch_start(self, trainer: pl.Trainer, *_: object) -> None:
        if trainer.global_step == SAVED:
            for state in trainer.optimizers[0].state.values():
                state["exp_avg"] *= 0.5


@pytest.mark.parametrize(
    "fault, said",
    [
        (HiddenState, "optimizer step 3 has the loss"),
        (HiddenMoments, "optimizer step 4 has the loss"),
        (ForgetsAverage, "second process ended"),
    ],
)
def test_what_a_resume_would_lose_is_told(
    fault: type[pl.Callback], said: str, tmp_path: Path, pipeline_dir: Path, shards_dir: Path
) -> None:
    run = train(short(tmp_path / "run", pipeline_dir, shards_dir), fault())
    assert run.exit_status == 0 and run.trainer.global_step == STEPS
    assert said in rehearsed(tmp_path / "run")["problem"]
    (line,) = (tmp_path / "run" / "incidents.jsonl").read_text().splitlines()
    assert json.loads(line)["kind"] == "rehearsal failed" and said in json.loads(line)["cause"]
    left = tmp_path / "run" / "rehearsal"
    assert not left.exists() or [path.name for path in left.iterdir()] == ["log.txt"]


@pytest.mark.parametrize(
    "changes, said", [({"limit_s": 0.1}, "took over 0.1 s"), ({"is_stopping": lambda: True}, "was asked to stop")]
)
def test_it_never_holds_up_a_run(
    changes: dict[str, Any], said: str, tmp_path: Path, pipeline_dir: Path, shards_dir: Path
) -> None:
    train(short(tmp_path / "run", pipeline_dir, shards_dir, checkpoint__rehearse=False))
    batch = BatchPlan(micro_batch=8, accumulation=1, processes=1, num_examples=8 * STEPS)
    second = SecondRun(tmp_path / "run", "cpu", batch, **({"limit_s": 60.0} | changes))
    with pytest.raises(RuntimeError, match=said):
        second.losses_after(STEPS - 2, 2)
    assert [path.name for path in second.home.iterdir()] == ["log.txt"]


@pytest.mark.slow
def test_the_second_process_may_do_what_the_run_may(tmp_path: Path, pipeline_dir: Path, shards_dir: Path) -> None:
    path = f"['pipe:cat {sorted(shards_dir.glob('*.tar'))[0]}']"
    changes = {"dataset__params__path": path, "dataset__params__allow_pipe": True}
    train(short(tmp_path / "run", pipeline_dir, shards_dir, **changes))
    assert rehearsed(tmp_path / "run")["problem"] == ""


def test_the_second_process_needs_no_held_out_data(tmp_path: Path, pipeline_dir: Path, shards_dir: Path) -> None:
    changes = {"validation__path": makers.caption_shards(tmp_path / "held_out"), "validation__every": 2}
    changes |= {"checkpoint__keep_best": 1, "checkpoint__best_by": "validation_loss", "validation__num_samples": 4}
    train(short(tmp_path / "run", pipeline_dir, shards_dir, **changes))
    assert rehearsed(tmp_path / "run")["problem"] == ""


@pytest.mark.slow
@pytest.mark.parametrize("more", ["checkpoint.asynchronous=true", "distributed.strategy=deepspeed_2"])
def test_one_process_resumes_what_two_have_saved(
    more: str, tmp_path: Path, pipeline_dir: Path, shards_dir: Path
) -> None:
    argv = short(tmp_path / "run", pipeline_dir, shards_dir, system__batch_size=4, trainer__accelerator="cpu")
    said = train_in_processes([*argv, more], 2)
    outcome = rehearsed(tmp_path / "run")
    assert outcome["problem"] == "" and outcome["losses_resumed"] == pytest.approx(outcome["losses"], rel=1e-5)
    assert said.count("rehearsal: resumed") == 1


@pytest.mark.slow
def test_a_signal_to_another_process_ends_it(tmp_path: Path, pipeline_dir: Path, shards_dir: Path) -> None:
    run_dir = tmp_path / "run"
    argv = short(run_dir, pipeline_dir, shards_dir, system__batch_size=4, trainer__accelerator="cpu")
    train_in_processes([str(run_dir), *argv], 2, "tests.integration.stopped_rehearsal")
    outcome = rehearsed(run_dir)
    assert "the run was asked to stop meanwhile" in outcome["problem"]
    assert [path.name for path in (run_dir / "rehearsal").iterdir()] == ["log.txt"]


def processes_of(word: str) -> list[int]:
    """Process ids whose command line has it."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and word.encode() in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:  # it has ended
            continue
    return found


def wait_until(is_so: Callable[[], bool], limit_s: float) -> bool:
    end_s = time.monotonic() + limit_s
    while not is_so() and time.monotonic() < end_s:
        time.sleep(0.1)
    return is_so()


def test_a_killed_run_leaves_no_second_process(tmp_path: Path, pipeline_dir: Path, shards_dir: Path) -> None:
    run_dir = tmp_path / "run"
    # Of so many steps that the second process does not end by itself.
    changes = {"experiment__num_examples_to_see": 8 * 10**6, "trainer__accelerator": "cpu"}
    argv = short(run_dir, pipeline_dir, shards_dir, **changes)
    run = subprocess.Popen([sys.executable, str(ROOT / "train.py"), *argv], stderr=subprocess.DEVNULL)
    second = f"config={run_dir}/config.yaml"
    try:
        assert wait_until(lambda: bool(processes_of(second)), 600)
    finally:
        run.send_signal(signal.SIGKILL)
        run.wait()
    is_gone = wait_until(lambda: not processes_of(second), 100)
    for pid in processes_of(second):
        os.kill(pid, signal.SIGKILL)
    assert is_gone
