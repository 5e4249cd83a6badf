"""A run that is asked to stop: all ranks stop after the same step, saved, and the same command goes on to the bit."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl

import train as program
from sd_training.build import run as building
from sd_training.build.plan import make_plan
from sd_training.callbacks.save import STEP_FILE_VARIABLE
from sd_training.cli import run_cli
from sd_training.config.load import load_config
from sd_training.errors import EXIT_INTERRUPTED, EXIT_STOPPED
from sd_training.log import RunLog
from sd_training.signals import StopSignals
from tests.faults.fork_server import Child, shared_server
from tests.faults.tiny_run import ONE_MACHINE, RUN_MODULE, TORCHRUN
from tests.integration.record_ids import read_ids
from tests.integration.test_training import assert_same_tensors
from tests.integration.training import ROOT, checkpoint_tensors, losses, metrics, options, train

LIGHTNING = [sys.executable, "-m", "tests.integration.watched_train"]
UNDER_TORCHRUN = ["--nproc_per_node", "2", *ONE_MACHINE, "-m"]
LOADER = "system.workers=1"
TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d "
LIMIT_S = 500
"""Two processes that start on busy cores may take minutes."""


class Launched(subprocess.Popen[str]):
    """A launcher and the processes that it starts, as a user or a cluster starts them."""

    def __init__(self, command: list[str], environment: dict[str, str], log: Path) -> None:
        with log.open("w") as output:
            super().__init__(
                command,
                cwd=ROOT,
                env={**os.environ, **environment, "PYTHONPATH": str(ROOT)},
                stdout=output,
                stderr=output,
                start_new_session=True,
                # Where the tests themselves are started in the background of a script, Ctrl-C is ignored, and so it
                # would be here.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )


class Started:
    """A run in processes of its own, which is sent signals.

    Args:
        command: of new processes; without one a process is forked, which takes a second instead of ten.
        torchrun: options of torchrun, whose processes are forked then.
    """

    def __init__(
        self, argv: list[str], folder: Path, hold: str = "", command: Sequence[str] = (), torchrun: Sequence[str] = ()
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.folder, self.log = folder, folder / "log.txt"
        for name in ("held", "noted", self.log.name):
            (folder / name).unlink(missing_ok=True)
        watch = {"WATCH_DIR": str(folder), STEP_FILE_VARIABLE: str(folder / "step"), "WATCH_HOLD": hold}
        self.process: Launched | Child
        if command:
            self.process = Launched([*command, *argv], watch, self.log)
        else:
            words = [*torchrun, "tests.integration.watched_train", *argv]
            target, environment = TORCHRUN if torchrun else RUN_MODULE, {**os.environ, **watch}
            self.process = shared_server().start(target, words, self.log, environment)

    def wait_until_held(self) -> int:
        """Process id of the rank that waits."""
        return int(self.wait_for("held"))

    def wait_for(self, name: str) -> str:
        """What a file of the watched run says, once it says something."""
        path, end_s = self.folder / name, time.monotonic() + LIMIT_S
        while not (path.exists() and path.read_text()):
            assert self.process.poll() is None and time.monotonic() < end_s, self.log.read_text()
            time.sleep(0.02)
        return path.read_text()

    def ended(self) -> tuple[int | None, str]:
        """Its exit status and output."""
        status = self.process.wait(LIMIT_S)
        return status, self.log.read_text()


@pytest.fixture
def argv(tmp_path: Path, pipeline_dir: Path, shards_dir: Path) -> list[str]:
    """One process, 8 steps of 8 images; nothing is saved before the end."""
    return options(tmp_path / "run", pipeline_dir, shards_dir, experiment__save_every=100)


def saved_steps(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def test_one_process(argv: list[str], tmp_path: Path, pipeline_dir: Path, shards_dir: Path) -> None:
    run = Started([*argv, LOADER], tmp_path / "watched", "3:all")
    run.wait_until_held()
    while run.process.poll() is None:  # again and again, also while it saves; to the loader processes as well
        for number in (signal.SIGUSR1, signal.SIGTERM):
            os.killpg(run.process.pid, number)
        time.sleep(0.05)
    status, said = run.ended()
    assert status == EXIT_STOPPED, said
    assert "Traceback" not in said and "stopped after 4 optimizer steps" in said
    assert saved_steps(tmp_path / "run") == ["step=4"]
    assert (tmp_path / "watched/step").read_text() == "4\n"
    status, said = Started(argv, tmp_path / "watched").ended()
    assert status == 0, said
    whole = tmp_path / "whole"
    train(options(whole, pipeline_dir, shards_dir, experiment__save_every=100))
    assert_same_tensors(checkpoint_tensors(tmp_path / "run", 8), checkpoint_tensors(whole, 8))
    assert losses(tmp_path / "run") == losses(whole)
    assert [len(pairs) for pairs in read_ids(tmp_path / "watched").values()] == [8] * 8


def test_ctrl_c_saves_and_a_second_one_kills(argv: list[str], tmp_path: Path) -> None:
    run = Started(argv, tmp_path / "watched", "1:all")
    os.kill(run.wait_until_held(), signal.SIGINT)
    status, said = run.ended()
    assert status == EXIT_INTERRUPTED, said
    # What a second one would do is said at once, and not only when the step is done.
    assert re.search(rf"^{TIME}Ctrl-C: saving after .*; press Ctrl-C again to end at once without saving$", said, re.M)
    asks = "a signal or the time limit asks this run to stop"
    assert asks not in said and asks in (tmp_path / "run" / "train.log").read_text()
    assert saved_steps(tmp_path / "run") == ["step=2"]
    stuck = Started([*argv, LOADER], tmp_path / "watched", "3:all:forever")
    pid = stuck.wait_until_held()
    os.kill(pid, signal.SIGINT)
    stuck.wait_for("noted")  # two that come before it looks would be one
    assert stuck.process.poll() is None
    os.kill(pid, signal.SIGINT)
    status, said = stuck.ended()
    assert status == -signal.SIGINT, said
    assert isinstance(stuck.process, Child) and stuck.process.left_behind() == []


class Presses(pl.Callback):
    """Ctrl-C while the run is set up."""

    def on_fit_start(self, *_: Any) -> None:
        signal.raise_signal(signal.SIGINT)


def test_ctrl_c_before_the_first_step(
    pipeline_dir: Path, shards_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = building.build_run

    def build_pressed(*given: Any) -> building.Run:
        run = build(*given)
        run.trainer.callbacks.append(Presses())  # type: ignore[attr-defined]
        return run

    monkeypatch.setattr(building, "build_run", build_pressed)
    plan = make_plan(load_config(options(tmp_path / "run", pipeline_dir, shards_dir)))
    with pytest.raises(SystemExit) as ended:
        run_cli(lambda: program.train(plan, StopSignals(), RunLog()))
    assert ended.value.code == EXIT_INTERRUPTED


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_one_rank_stops_both_after_the_same_step(
    rank: int, tmp_path: Path, pipeline_dir: Path, shards_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under real launchers; that the run then goes on to the bit is shown by `tests/faults/signals.py`."""
    if rank == 0:
        monkeypatch.delenv("OMP_NUM_THREADS")
    changes = {"system__batch_size": 4, "experiment__save_every": 100}
    argv = options(tmp_path / "run", pipeline_dir, shards_dir, **changes)
    own = ["trainer.devices=2", "trainer.accelerator=cpu"]
    launcher: dict[str, list[str]] = {"command": LIGHTNING} if rank == 0 else {"torchrun": UNDER_TORCHRUN}
    run = Started([*argv, *(own if rank == 0 else [])], tmp_path / "watched", f"3:{rank}", **launcher)
    os.kill(run.wait_until_held(), signal.SIGTERM)
    status, said = run.ended()
    assert "stopped after 5 optimizer steps" in said, said
    if rank == 0:
        assert status == EXIT_STOPPED, said
        cores = len(os.sched_getaffinity(0))
        assert said.count("threads per process: ") == 1 and f" (cores: {cores}, processes: 2)" in said
    else:  # torchrun has a status of its own, and says that of its processes
        assert said.count(f"(exitcode: {EXIT_STOPPED})") == 1 and status == 1, said
        assert "SIGKILL" not in said
    assert saved_steps(tmp_path / "run") == ["step=5"]
    assert [len(pairs) for pairs in read_ids(tmp_path / "watched").values()] == [8] * 5
    if rank == 1:
        again = Started(argv, tmp_path / "watched", f"5:{rank}", **launcher)
        os.kill(again.wait_until_held(), signal.SIGUSR2)  # the one rank asks for a save, both save
        status, said = again.ended()
        assert "done: " in said and status == 0
        assert saved_steps(tmp_path / "run") == ["step=7", "step=8"]
        assert [len(pairs) for pairs in read_ids(tmp_path / "watched").values()] == [8] * 8


class SignalItself(pl.Callback):
    """Sends this process a signal during the step after `step`, and notes who handles signals then."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.handlers: set[object] = set()
        self.before_training: object = None

    def on_fit_start(self, *_: object) -> None:
        self.before_training = signal.getsignal(signal.SIGTERM)

    def on_train_batch_start(self, trainer: pl.Trainer, *_: object) -> None:
        self.handlers = {signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGUSR1)


@pytest.fixture
def handlers_of_before() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers_of_before")
def test_what_is_due_at_a_stop(tmp_path: Path, pipeline_dir: Path, shards_dir: Path) -> None:
    """Metrics of the steps so far and a save, but no pictures; and no handler of Lightning's."""
    pictures = {"sampling__every": 3, "sampling__prompts": "[a]", "sampling__num_inference_steps": 1}
    changes = {"experiment__save_every": 100, "logging__every": 100, **pictures}
    argv = options(tmp_path / "run", pipeline_dir, shards_dir, **changes)
    before = signal.getsignal(signal.SIGTERM)
    watch = SignalItself(2)
    run = train(argv, watch)
    assert watch.before_training == before  # nothing is there to save: SIGTERM ends the process
    assert watch.handlers == {run.preemption.signals._note}
    assert signal.getsignal(signal.SIGTERM) == run.preemption.signals._note  # also on the way out
    assert (run.exit_status, run.trainer.global_step, saved_steps(tmp_path / "run")) == (EXIT_STOPPED, 3, ["step=3"])
    assert [row["optimizer_step"] for row in metrics(tmp_path / "run")] == ["3"]
    assert [path.name for path in (tmp_path / "run/samples").iterdir()] == ["step_0"]  # before the first step
    signal.signal(signal.SIGTERM, before)
    end = SignalItself(7)  # the last step: nothing to stop any more
    run = train(argv, end)
    assert (run.exit_status, run.trainer.global_step) == (0, 8)
    assert (tmp_path / "run/samples/step_8").exists()
    assert run.preemption._group is None  # one process alone communicates nothing
