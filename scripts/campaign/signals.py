"""Signals at random moments of a run of two ranks, to all of them or to one; each run is asked to stop a few times, and
then left to its end and compared with one that was never stopped."""

import random
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from scripts.campaign.fork_server import Child, ForkServer, shared_server
from scripts.campaign.row import Row
from scripts.campaign.tiny_run import TinyRun, make_tiny_parts, run_to_end, stop_all, tail
from sd_training.stop_signals import STOPPED

RANKS, STEPS, SIGNALS_PER_RUN = 2, 30, 3
_LIMIT_S = 60
_PROMISE = "all ranks stop after the same step, saved, with status 75; the same command goes on to the bit"


@dataclass
class Tally:
    """What was seen."""

    signals: int = 0
    hangs: int = 0
    torn: int = 0
    """Ranks that stopped after different steps, or a save of another step."""
    wrong_statuses: int = 0
    too_late: int = 0
    """Signals to a run that was in its last step and ended."""
    durable_s: list[float] = field(default_factory=list)
    """From the signal to the sealed checkpoint."""
    problems: list[str] = field(default_factory=list)


def run(folder: Path, is_quick: bool) -> list[Row]:
    """One row."""
    server, count = shared_server(), 5 if is_quick else 60
    parts = make_tiny_parts(server, folder / "parts")
    whole = _tiny(folder / "whole", parts)
    run_to_end(server, whole, RANKS)
    tally, chance = Tally(), random.Random(0)
    steps = [mark["at_s"] for mark in whole.marks() if mark["do"] == "step"]
    number = 0
    while tally.signals < count:
        tiny = _tiny(folder / str(number), parts)
        problems = len(tally.problems)
        for _ in range(min(SIGNALS_PER_RUN, count - tally.signals)):
            if not _signal(server, tiny, tally, chance, (steps[-1] - steps[0]) / STEPS):
                break
        _check_end(server, tiny, whole, tally)
        if len(tally.problems) == problems:
            tiny.remove()
        number += 1
    for problem in tally.problems:
        print(f"signals: {problem}", file=sys.stderr)
    fault = f"SIGTERM or SIGUSR1 to all, the first or the second of {RANKS} ranks, from the first step on"
    return [Row(fault, _PROMISE, tally.signals, _figure(tally, number), not tally.problems)]


def _tiny(home: Path, parts: Path) -> TinyRun:
    return TinyRun(parts, home, STEPS, 1000, home / "tmp")


def _figure(tally: Tally, runs: int) -> str:
    times_s = sorted(tally.durable_s)
    p95_s = times_s[min(len(times_s) - 1, int(0.95 * len(times_s)))] if times_s else float("nan")
    return (
        f"{tally.hangs} hangs, {tally.torn} torn steps, {tally.wrong_statuses} wrong statuses, {len(tally.problems)} "
        f"problems in {runs} runs; {p95_s:.2f} s from the signal to the sealed checkpoint (p95); "
        f"{tally.too_late} in the last step"
    )


def _signal(server: ForkServer, tiny: TinyRun, tally: Tally, chance: random.Random, step_s: float) -> bool:
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
    time.sleep(chance.uniform(0, (STEPS - first) / SIGNALS_PER_RUN * step_s))
    number, whom = chance.choice((signal.SIGTERM, signal.SIGUSR1)), chance.choice(("all", 0, 1))
    sent_at_s = time.monotonic()
    for rank, child in enumerate(children):
        if whom in ("all", rank) and child.poll() is None:
            child.send(number)
    tally.signals += 1
    return _check_stop(tiny, children, tally, sent_at_s, f"{tiny.home}: {number.name} to {whom}")


def _check_stop(tiny: TinyRun, children: list[Child], tally: Tally, sent_at_s: float, what: str) -> bool:
    """Whether all ranks ended as they should."""
    statuses = [child.wait(_LIMIT_S) for child in children]
    if None in statuses:
        stop_all(children, 1)
        tally.hangs += 1
        tally.problems.append(f"{what}: statuses {statuses} after {_LIMIT_S} s")
        return False
    last = {max(mark["step"] for mark in tiny.marks(rank) if mark["do"] == "step") + 1 for rank in range(RANKS)}
    saved = [mark for mark in tiny.marks() if mark["do"] == "saved"]
    is_at_end = last == {STEPS} and statuses == [0] * RANKS
    if statuses != [STOPPED] * RANKS and not is_at_end:
        tally.wrong_statuses += 1
        tally.problems.append(f"{what}: statuses {statuses}\n{tail(tiny.home / 'log.txt')}")
        return False
    if last != {saved[-1]["step"]}:
        tally.torn += 1
        tally.problems.append(f"{what}: the ranks' last steps {last}, saved {saved[-1]['step']}")
    tally.too_late += is_at_end
    if not is_at_end:
        tally.durable_s.append(saved[-1]["at_s"] - sent_at_s)
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
