"""Encoder processes change no bit of a run (`test_cache.py` compares one process), and no end of any process leaves one
behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from sd_training.build.encoders import _PROGRAM
from sd_training.errors import EXIT_HANG, EXIT_STOPPED, EXIT_UNEXPECTED
from tests.family_makers import save_pipeline
from tests.faults.fork_server import Child, shared_server
from tests.faults.tiny_run import RUN_MODULE, as_torchrun
from tests.integration.test_cache import Home, assert_equal, write_shards
from tests.integration.training import checkpoint_tensors, losses, options, train, train_in_processes

FAULTS = int(os.environ.get("ENCODER_FAULTS", "1"))
"""How often each of them is made."""
STEPS = 70 + 50 * FAULTS
"""Optimizer steps: four faults take some 40 of them."""
LIMIT_S = 500


def home_of(family: str, folder: Path) -> Home:
    return Home(folder, save_pipeline(family, folder / "pipeline"), write_shards(folder / "shards"))


@pytest.mark.parametrize(("strategy", "encoders"), [("ddp", 2), ("fsdp", 1)])
def test_two_training_processes(strategy: str, encoders: int, tmp_path: Path) -> None:
    home = home_of("stable_diffusion", tmp_path)
    changes = {"distributed__strategy": strategy, "system__batch_size": 2, "system__gradient_accumulation": 2}
    for name, number in (("inline", 0), ("encoded", encoders)):
        train_in_processes(home.argv(name, distributed__encoders=number, **changes), 2)
    assert_equal(tmp_path / "inline", tmp_path / "encoded")


def encoders_of(process: "Child | subprocess.Popen[bytes]") -> list[int]:
    """Process ids of the encoder processes that a training process has started."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == process.pid and b"build.encoders" in (path / "cmdline").read_bytes():
                found.append(int(path.name))
        except OSError:
            continue
    return found


def rows(run_dir: Path) -> int:
    path = run_dir / "metrics.csv"
    return path.read_text().count("\n") if path.exists() else 0


def test_one_that_is_stopped_while_it_starts_ends_with_its_parent() -> None:
    program = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {_PROGRAM!r}], stdin=-1); input()"
    parent = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE)
    end_s = time.monotonic() + LIMIT_S
    while not (found := encoders_of(parent)) or b"torch" not in Path(f"/proc/{found[0]}/maps").read_bytes():
        assert parent.poll() is None and time.monotonic() < end_s
        time.sleep(0.01)
    os.kill(found[0], signal.SIGSTOP)
    parent.kill()
    parent.communicate()
    while Path(f"/proc/{found[0]}/maps").exists() and Path(f"/proc/{found[0]}/maps").read_bytes():  # none of a zombie
        assert time.monotonic() < end_s
        time.sleep(0.01)


@pytest.mark.parametrize("killed", ["encoder", "first trainer"])
def test_the_cause_is_told_with_two_training_processes(
    killed: str, tmp_path: Path, pipeline_dir: Path, shards_dir: Path
) -> None:
    """The one that has not started the encoder process sees no more than a lost connection."""
    run, logs = tmp_path / "run", [tmp_path / f"{rank}.log" for rank in range(2)]
    argv = options(run, pipeline_dir, shards_dir, experiment__num_examples_to_see=8000, distributed__encoders=1)
    started = [
        shared_server().start(RUN_MODULE, ["train", *argv], log, {**os.environ, **own})
        for log, own in zip(logs, as_torchrun(2), strict=True)
    ]
    end_s = time.monotonic() + LIMIT_S
    while rows(run) < 4:
        assert all(process.poll() is None for process in started) and time.monotonic() < end_s, logs[0].read_text()
        time.sleep(0.01)
    target = encoders_of(started[0])[0] if killed == "encoder" else started[0].pid
    os.kill(target, signal.SIGKILL)
    for process in started:
        process.wait(LIMIT_S)
    said = "".join(log.read_text() for log in logs)
    if killed == "encoder":
        assert "encoder process 0 of this machine was killed by SIGKILL" in said
    else:
        assert "distributed.encoders" not in said.replace("distributed.encoders=1", "")
    assert [process.left_behind() for process in started] == [[], []]


def test_whatever_ends_nothing_is_left_and_nothing_is_lost(
    tmp_path: Path, pipeline_dir: Path, shards_dir: Path
) -> None:
    """One run that is ended in every way and started again, with one and two encoder processes, at last with none.

    `ENCODER_FAULTS=20` says how often."""

    def argv(name: str, **changes: Any) -> list[str]:
        values = {"experiment__num_examples_to_see": 8 * STEPS, "experiment__save_every": 5, "watch__data_s": 20}
        return options(tmp_path / name, pipeline_dir, shards_dir, **{**values, **changes})

    train(argv("inline"))
    ends = [
        ("encoder", signal.SIGKILL, EXIT_UNEXPECTED, "encoder process 0 of this machine was killed by SIGKILL"),
        ("trainer", signal.SIGKILL, -signal.SIGKILL, ""),
        ("encoder", signal.SIGSTOP, EXIT_HANG, "watch.data_s"),
        ("all", signal.SIGTERM, EXIT_STOPPED, "saved; the same command resumes"),
    ]
    for number, (target, sent, expected, message) in enumerate(ends * FAULTS):
        before, log, count = rows(tmp_path / "run"), tmp_path / f"{number}.log", 1 if target == "encoder" else 2
        words = ["train", *argv("run", distributed__encoders=count)]
        process = shared_server().start(RUN_MODULE, words, log, os.environ)
        end_s = time.monotonic() + LIMIT_S
        while rows(tmp_path / "run") < before + 4 or not (tmp_path / "run" / "checkpoints").exists():
            assert process.poll() is None and time.monotonic() < end_s, log.read_text()
            time.sleep(0.01)
        encoders = encoders_of(process)
        assert len(encoders) == count
        for pid in {"encoder": encoders, "trainer": [process.pid], "all": [process.pid, *encoders]}[target]:
            os.kill(pid, sent)
        status, said = process.wait(LIMIT_S), log.read_text()
        assert status == expected and message in said, said
        assert process.left_behind() == []
    train(argv("run"))
    assert losses(tmp_path / "run")[-5:] == losses(tmp_path / "inline")[-5:]
    found, wanted = (checkpoint_tensors(tmp_path / name, STEPS) for name in ("run", "inline"))
    assert [name for name, value in wanted.items() if not torch.equal(value, found[name])] == []
