"""The watch ends its process, so each case runs in processes of its own; they import no torch."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sd_training.errors import EXIT_HANG
from sd_training.watchdog import PEERS_S, STATUS_FILE_VARIABLE, HangWatch

ROOT = Path(__file__).parents[3]
HEAD = """
import sys, time
from pathlib import Path
from sd_training.watchdog import HangWatch
watch = HangWatch({limits}, Path(sys.argv[1]), int(sys.argv[2]))
watch.first_failure.local_peers = dict(enumerate(map(int, sys.argv[3:]), 1))
def stay_here(seconds):
    time.sleep(seconds)
with watch.running():
    print("running", flush=True)
"""


class Ranks:
    """Processes that are watched."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.all: list[subprocess.Popen[str]] = []

    def start(self, limits: dict[str, float], act: str, *cpu_group: int, **environment: str) -> "subprocess.Popen[str]":
        code = HEAD.replace("{limits}", repr(limits)) + f"    {act}\n"
        rank = str(len(self.all))
        process = subprocess.Popen(
            [sys.executable, "-c", code, str(self.folder), rank, *map(str, cpu_group)],
            env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.all.append(process)
        assert process.stdout is not None and process.stdout.readline() == "running\n"
        return process

    def stacks(self, rank: int) -> str:
        return (self.folder / "hangs" / f"rank-{rank}.txt").read_text()


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    processes = Ranks(tmp_path)
    yield processes
    for process in processes.all:
        process.kill()
        process.communicate()


def test_a_hang_is_told_with_stacks_by_all(ranks: Ranks) -> None:
    """One stays too long, one waits where it may, one has been stopped."""
    waiting = ranks.start({}, "stay_here(60)")
    stopped = ranks.start({}, "stay_here(60)")
    stopped.send_signal(signal.SIGSTOP)
    began_s = time.monotonic()
    stuck = ranks.start({"data": 0.5}, "watch.enter('data', 12); stay_here(60)", waiting.pid, stopped.pid)
    said = stuck.communicate(timeout=30)[1]
    assert time.monotonic() - began_s < 0.5 + PEERS_S + 5
    assert "rank 2 stayed more than watch.data_s=0.5 s in section data after optimizer step 12" in said
    assert "in stay_here" in said
    for rank, process in enumerate(ranks.all):
        assert process.wait(10) == EXIT_HANG
        assert "in stay_here" in ranks.stacks(rank) and "rank 2 stayed more than" in ranks.stacks(rank)


def test_no_false_alarm(ranks: Ranks) -> None:
    """Sections that are short but many, one without a limit, a process that was stopped as a whole and goes on."""
    act = """
    for step in range(40):
        watch.enter("step", step)
        with watch.inside("save"):
            time.sleep(0.02)
        watch.enter("data", step)
        time.sleep(0.01)
    watch.enter("validate", 40)
    time.sleep(1)
    watch.enter("step", 41)
    time.sleep(0.3)"""
    process = ranks.start({"start": 0.8, "step": 0.8, "save": 0.8, "data": 0.8}, act)
    time.sleep(0.3)
    process.send_signal(signal.SIGSTOP)
    time.sleep(1.2)
    process.send_signal(signal.SIGCONT)
    said = process.communicate(timeout=30)[1]
    assert (process.returncode, said) == (0, "")
    assert list(ranks.folder.iterdir()) == []


def test_a_section_inside_another_has_its_own_limit(ranks: Ranks) -> None:
    process = ranks.start({"save": 0.4}, "\n    with watch.inside('save'): stay_here(60)")
    assert "in section save" in process.communicate(timeout=30)[1]
    assert process.returncode == EXIT_HANG


def test_the_first_section_is_the_start(ranks: Ranks) -> None:
    process = ranks.start({"start": 0.4}, "stay_here(60)")
    assert "in section start after optimizer step 0" in process.communicate(timeout=30)[1]


def test_a_peer_that_failed_is_followed(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that waits for it for ever ends with its status, without stacks."""
    code = "\n    import sd_training.watchdog as h; h.OWN_END_S = 0.5; stay_here(60)"
    process = ranks.start({"step": 60}, code)
    assert HangWatch({}, ranks.folder, rank=7).first_failure.claim(88, "too many bad samples")
    assert process.wait(20) == 88
    assert not (ranks.folder / "hangs").exists()


def test_a_note_that_is_cleared_ends_nobody(ranks: Ranks) -> None:
    """It was of an earlier start; the first process tidies up at its own."""
    code = "\n    import sd_training.watchdog as h; h.OWN_END_S = 3; stay_here(6)"
    process = ranks.start({"step": 60}, code)
    first_failure = HangWatch({}, ranks.folder, rank=7).first_failure
    assert first_failure.claim(88, "too many bad samples")
    time.sleep(1.5)
    first_failure.clear()
    assert process.wait(20) == 0


@pytest.mark.parametrize("kind", ["full", "blocked"])
def test_a_stderr_that_takes_nothing_keeps_nobody(kind: str, ranks: Ranks) -> None:
    """A full disk under it, or a reader that does not read."""
    lines = ["import os, fcntl"]
    if kind == "full":
        lines.append("os.dup2(os.open('/dev/full', os.O_WRONLY), 2)")
    else:
        lines.append("end = os.pipe(); os.dup2(end[1], 2); os.set_blocking(2, False)")
        lines += [
            "try:",
            "    while True: os.write(2, b' ' * 4096)",
            "except BlockingIOError: os.set_blocking(2, True)",
        ]
    act = "".join(f"\n    {line}" for line in [*lines, "watch.enter('step', 3)", "stay_here(25)"])
    process = ranks.start({"step": 0.5}, act)
    assert process.wait(20) == EXIT_HANG
    assert "in stay_here" in ranks.stacks(0)
    end = json.loads((ranks.folder / "first_failure.json").read_text())
    assert end["status"] == EXIT_HANG


def test_the_batch_file_is_told_though_the_run_folder_does_not_answer(ranks: Ranks, tmp_path: Path) -> None:
    told = tmp_path / "status"
    act = """
    watch.first_failure.claim = lambda *_: stay_here(60)
    watch.enter("step", 3)
    stay_here(60)"""
    process = ranks.start({"step": 0.5}, act, **{STATUS_FILE_VARIABLE: str(told)})
    assert process.wait(20) == EXIT_HANG and told.read_text() == f"{EXIT_HANG}\n"


def test_a_follower_tells_the_batch_file_as_well(ranks: Ranks, tmp_path: Path) -> None:
    """The first one may be cut off from the storage."""
    told = tmp_path / "status"
    process = ranks.start({"step": 60}, "stay_here(25)", **{STATUS_FILE_VARIABLE: str(told)})
    assert HangWatch({}, ranks.folder, rank=7).first_failure.claim(EXIT_HANG, "stuck")
    assert process.wait(20) == EXIT_HANG and told.read_text() == f"{EXIT_HANG}\n"


def test_a_follower_ends_though_it_cannot_write(ranks: Ranks) -> None:
    (ranks.folder / "hangs").write_text("in the way")
    process = ranks.start({"step": 60}, "\n    import os; os.dup2(os.open('/dev/full', os.O_WRONLY), 2); stay_here(25)")
    assert HangWatch({}, ranks.folder, rank=7).first_failure.claim(EXIT_HANG, "stuck")
    assert process.wait(20) == EXIT_HANG
