"""One run that goes on over other numbers of processes, loader processes, micro-batches and strategies; each start but
the last is stopped by SIGTERM. It is compared step by step with one process that was never stopped."""

import signal
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

from sd_training.errors import EXIT_STOPPED
from tests.faults.fork_server import ForkServer, shared_server
from tests.faults.row import Row
from tests.faults.tiny_run import GLOBAL_BATCH, TinyRun, make_tiny_parts, run_to_end, stop_all, tail

STEPS = 24
MAX_LOSS_DIFFERENCE = 1e-5
"""Relative; sums over other numbers of processes are rounded differently."""
_LIMIT_S = 300
_PROMISE = "the same samples with the same draws in every step, losses within 1e-5"


@dataclass(frozen=True)
class Leg:
    """One start of the run."""

    ranks: int
    accumulation: int
    workers: int
    strategy: str = "auto"

    def options(self) -> list[str]:
        """Those in which the starts differ; the global batch is the same."""
        return [
            f"system.batch_size={GLOBAL_BATCH // self.ranks // self.accumulation}",
            f"system.gradient_accumulation={self.accumulation}",
            f"system.workers={self.workers}",
            f"distributed.strategy={self.strategy}",
        ]

    def __str__(self) -> str:
        return f"{self.ranks} × {self.strategy}" if self.ranks > 1 else "1"


QUICK = (Leg(1, 1, 0), Leg(2, 2, 1, "fsdp"), Leg(1, 4, 0))
FULL = (
    Leg(1, 1, 0),
    Leg(2, 2, 1, "ddp"),
    Leg(4, 1, 2, "fsdp"),
    Leg(1, 4, 3),
    Leg(2, 1, 0, "fsdp"),
    Leg(2, 4, 1, "ddp"),
)


def run(folder: Path, is_quick: bool) -> list[Row]:
    """One row."""
    server, legs = shared_server(), QUICK if is_quick else FULL
    parts = make_tiny_parts(server, folder / "parts")
    whole, moved = (TinyRun(parts, folder / name, STEPS, 1000, folder / "tmp") for name in ("whole", "moved"))
    run_to_end(server, whole)
    problems: list[str] = []
    for number, leg in enumerate(legs):
        problems += _go_on(server, moved, leg, STEPS * (number + 1) // len(legs))
    samples, expected = moved.samples(max(leg.ranks for leg in legs)), whole.samples(1)
    wrong = sum(samples.get(step) != expected[step] for step in expected)
    difference = _largest_difference(moved.losses(), whole.losses())
    for problem in problems:
        print(f"elastic: {problem}", file=sys.stderr)
    figure = (
        f"{wrong} of {STEPS} steps with other samples or draws; losses differ by {difference:.1e} at most; "
        f"{len(problems)} problems"
    )
    is_kept = not problems and not wrong and difference <= MAX_LOSS_DIFFERENCE
    fault = f"processes {' → '.join(map(str, legs))}, with other loader processes and accumulation"
    return [Row(fault, _PROMISE, len(legs) - 1, figure, is_kept)]


def _go_on(server: ForkServer, tiny: TinyRun, leg: Leg, until: int) -> list[str]:
    """Starts the run and stops it about that step, unless it is the last one; returns what is wrong."""
    tiny = replace(tiny, holds=(until - 2,) if until < STEPS else ())
    children = tiny.start(server, leg.ranks, leg.options())
    for step in tiny.holds:
        while not any(mark["do"] == "step" and mark["step"] >= step for mark in tiny.marks()):
            if any(child.poll() is not None for child in children):
                break
            time.sleep(0.005)
        children[-1].send(signal.SIGTERM)
        tiny.let_go(step)
    statuses = [child.wait(_LIMIT_S) for child in children]
    stop_all(children, 1)
    if statuses == [EXIT_STOPPED if until < STEPS else 0] * leg.ranks:
        return []
    return [f"{leg} ended with {statuses}\n{tail(tiny.home / 'log.txt')}"]


def _largest_difference(losses: list[str], expected: list[str]) -> float:
    """Relative; infinite where a step is missing or there twice."""
    pairs = [[line.split(": ") for line in lines] for lines in (losses, expected)]
    if [step for step, _ in pairs[0]] != [step for step, _ in pairs[1]]:
        return float("inf")
    numbers = [[float(loss) for _, loss in lines] for lines in pairs]
    return max(abs(a - b) / abs(b) for a, b in zip(*numbers, strict=True))
