"""Signals at random moments of a run of two ranks, to all of them or to one; each run is asked to stop a few times, and
then left to its end and compared with one that was never stopped."""

import random
import signal
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sd_training.errors import EXIT_INTERRUPTED, EXIT_STOPPED
from tests.faults.fork_server import Child, ForkServer, shared_server
from tests.faults.row import Row
from tests.faults.tiny_run import TinyRun, make_tiny_parts, run_to_end, stop_all, tail

RANKS, STEPS, SIGNALS_PER_RUN, SAVE_EVERY = 2, 30, 3, 5
_LIMIT_S = 300
_STATUS = {signal.SIGTERM: EXIT_STOPPED, signal.SIGUSR1: EXIT_STOPPED, signal.SIGINT: EXIT_INTERRUPTED}
_PROMISE = (
    f"all ranks stop after the same step, saved, with status {EXIT_STOPPED} (SIGINT: {EXIT_INTERRUPTED}); "
    "the same command goes "
    "on to the bit"
)


@dataclass
class Tally:
    """What was seen."""

    signals: int = 0
    inside_saves: int = 0
    """Signals that came while a checkpoint or the pipeline after it was written, as every few steps."""
    hangs: int = 0
    torn: int = 0
    """Ranks that stopped after different steps, or a save of another step."""
    wrong_statuses: int = 0
    too_late: int = 0
    """Signals to a run that was in its last step and ended."""
    durable_s: list[float] = field(default_factory=list)
    """From the signal to the sealed checkpoint."""
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Pace:
    """Of a run that nothing was done to."""

    step_s: float
    """With the saves in between."""
    save_s: float
    """With the pipeline folder."""


@dataclass(frozen=True)
class _Asked:
    """A signal that was sent."""

    at_s: float
    """[s of `time.monotonic`]."""
    status: int
    """That all ranks must end with."""
    what: str


def run(folder: Path, is_quick: bool) -> list[Row]:
    """One row."""
    server, count = shared_server(), SIGNALS_PER_RUN if is_quick else 60
    parts = make_tiny_parts(server, folder / "parts")
    whole = _tiny(folder / "whole", parts)
    run_to_end(server, whole, RANKS)
    tally, chance = Tally(), random.Random(0)
    pace = _pace(whole)
    number = 0
    while tally.signals < count or (not tally.inside_saves and tally.signals < 3 * count):
        tiny = _tiny(folder / str(number), parts)
        problems = len(tally.problems)
        for _ in range(min(SIGNALS_PER_RUN, max(1, count - tally.signals))):
            if not _signal(server, tiny, tally, chance, pace):
                break
        _check_end(server, tiny, whole, tally)
        if len(tally.problems) == problems:
            tiny.remove()
        number += 1
    if not tally.inside_saves:
        tally.problems.append("no signal came inside a save")
    for problem in tally.problems:
        print(f"signals: {problem}", file=sys.stderr)
    fault = (
        f"SIGTERM, SIGUSR1 or SIGINT to all, the first or the second of {RANKS} ranks, from the first step on, "
        f"{tally.inside_saves} of them inside a save"
    )
    return [Row(fault, _PROMISE, tally.signals, _figure(tally, number), not tally.problems)]


def _tiny(home: Path, parts: Path) -> TinyRun:
    return TinyRun(parts, home, STEPS, SAVE_EVERY, home / "tmp")


def _pace(tiny: TinyRun) -> _Pace:
    at_s = {do: [mark["at_s"] for mark in tiny.marks() if mark["do"] == do] for do in ("step", "save", "save done")}
    lasted_s = [end_s - begin_s for begin_s, end_s in zip(at_s["save"], at_s["save done"], strict=True)]
    return _Pace((at_s["step"][-1] - at_s["step"][0]) / STEPS, statistics.median(lasted_s))


def _figure(tally: Tally, runs: int) -> str:
    times_s = sorted(tally.durable_s)
    p95_s = times_s[min(len(times_s) - 1, int(0.95 * len(times_s)))] if times_s else float("nan")
    return (
        f"{tally.hangs} hangs, {tally.torn} torn steps, {tally.wrong_statuses} wrong statuses, {len(tally.problems)} "
        f"problems in {runs} runs; {p95_s:.2f} s from the signal to the sealed checkpoint (p95); "
        f"{tally.too_late} in the last step"
    )


def _signal(server: ForkServer, tiny: TinyRun, tally: Tally, chance: random.Random, pace: _Pace) -> bool:
    """Starts the run and asks it to stop once. False: it ended instead, or something is wrong."""
    before = [len(tiny.marks(rank)) for rank in range(RANKS)]
    children = tiny.start(server, RANKS)
    while any(len(tiny.marks(rank)) <= before[rank] for rank in range(RANKS)):
        if any(child.poll() is not None for child in children):
            stop_all(children)
            tally.problems.append(f"{tiny.home}: did not start\n{tail(tiny.home / 'log.txt')}")
            return False
        time.sleep(0.005)
    first = tiny.marks()[-1]["step"]
    if tally.signals % 2 and first < STEPS - SAVE_EVERY:
        _wait_for_save(tiny, children)
        # The machine may have become faster than it was: until a signal has met a save, they come early.
        time.sleep(chance.uniform(0, pace.save_s if tally.inside_saves else pace.save_s / 4))
    else:
        time.sleep(chance.uniform(0, (STEPS - first) / SIGNALS_PER_RUN * pace.step_s))
    number, whom = chance.choice(tuple(_STATUS)), chance.choice(("all", 0, 1))
    sent_at_s = time.monotonic()
    for rank, child in enumerate(children):
        if whom in ("all", rank) and child.poll() is None:
            child.send(number)
    tally.signals += 1
    asked = _Asked(sent_at_s, _STATUS[number], f"{tiny.home}: {number.name} to {whom}")
    return _check_stop(tiny, children, tally, asked)


def _wait_for_save(tiny: TinyRun, children: list[Child]) -> None:
    """Until the next one begins, or the run ends."""
    before = _num_marks(tiny, "save")
    while _num_marks(tiny, "save") == before and all(child.poll() is None for child in children):
        time.sleep(0.002)


def _num_marks(tiny: TinyRun, do: str) -> int:
    return sum(mark["do"] == do for mark in tiny.marks())


def is_inside_save(marks: Sequence[Mapping[str, Any]], at_s: float) -> bool:
    """Whether a save that began before this moment was done after it."""
    before = [mark["do"] for mark in marks if mark["at_s"] <= at_s and mark["do"] in ("save", "save done")]
    return bool(before) and before[-1] == "save"


def _check_stop(tiny: TinyRun, children: list[Child], tally: Tally, asked: _Asked) -> bool:
    """Whether all ranks ended as they should."""
    what = asked.what
    statuses = [child.wait(_LIMIT_S) for child in children]
    if None in statuses:
        stop_all(children, 1)
        tally.hangs += 1
        tally.problems.append(f"{what}: statuses {statuses} after {_LIMIT_S} s")
        return False
    last = {max(mark["step"] for mark in tiny.marks(rank) if mark["do"] == "step") + 1 for rank in range(RANKS)}
    saved = [mark for mark in tiny.marks() if mark["do"] == "saved"]
    is_at_end = last == {STEPS} and statuses == [0] * RANKS
    tally.inside_saves += is_inside_save(tiny.marks(), asked.at_s)
    if statuses != [asked.status] * RANKS and not is_at_end:
        tally.wrong_statuses += 1
        tally.problems.append(f"{what}: statuses {statuses}\n{tail(tiny.home / 'log.txt')}")
        return False
    if last != {saved[-1]["step"]}:
        tally.torn += 1
        tally.problems.append(f"{what}: the ranks' last steps {last}, saved {saved[-1]['step']}")
    tally.too_late += is_at_end
    if not is_at_end:
        tally.durable_s.append(saved[-1]["at_s"] - asked.at_s)
    return not is_at_end


def _check_end(server: ForkServer, tiny: TinyRun, whole: TinyRun, tally: Tally) -> None:
    """The run goes on to its end; then nothing differs from the one that was never stopped."""
    children = tiny.start(server, RANKS)
    statuses = [child.wait(_LIMIT_S) for child in children]
    if statuses != [0] * RANKS:
        stop_all(children, 1)
        tally.problems.append(f"{tiny.home}: the last start ended with {statuses}\n{tail(tiny.home / 'log.txt')}")
        return
    if tiny.digest() != whole.digest():
        tally.problems.append(f"{tiny.home}: other weights, averages or optimizer state than the run never stopped")
    if tiny.losses() != whole.losses():
        tally.problems.append(f"{tiny.home}: other losses in the metrics")
    if tiny.samples(RANKS) != whole.samples(RANKS):
        tally.problems.append(f"{tiny.home}: other samples or draws, or steps done twice")
