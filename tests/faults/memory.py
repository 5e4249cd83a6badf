"""Saves, and saves again, with an allocator that checks: after every optimizer step of runs of several processes.

Memory that is freed twice or used after it was freed shows late and rarely, so the allocator is glibc's checking one:
it ends a process at a bad block, and overwrites what is freed. The same run without a save in between has to end with
the same bits.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from tests.faults.fork_server import ForkServer
from tests.faults.row import Row
from tests.faults.tiny_run import TinyRun, make_tiny_parts, run_to_end

_CHECKED = {
    "LD_PRELOAD": "libc_malloc_debug.so.0",
    "MALLOC_CHECK_": "3",
    "MALLOC_PERTURB_": "165",
    "PYTHONFAULTHANDLER": "1",
}
_PROMISE = "no process crashes, and the run ends with the bits of one that saves once"
_SAVE_LIMIT_S = 30
"""For one step and its save, on a machine with other work."""


@dataclass(frozen=True)
class Runs:
    """One row: a strategy and how often it saves."""

    name: str
    ranks: int
    saves: int
    options: tuple[str, ...]


QUICK = (Runs("fsdp", 2, 5, ("distributed.strategy=fsdp",)),)
# The widths of the tiny network are multiples of 8: three processes share them unevenly, and torch pads.
FULL = (
    Runs("fsdp", 2, 1500, ("distributed.strategy=fsdp",)),
    Runs("fsdp, uneven shards", 3, 600, ("distributed.strategy=fsdp", "experiment.num_examples_to_see=3600")),
    Runs("ddp", 2, 400, ("distributed.strategy=ddp",)),
    Runs("hsdp", 4, 500, ("distributed.mesh.data=2", "distributed.mesh.fsdp=2")),
)


def run(folder: Path, is_quick: bool) -> list[Row]:
    """A row per strategy."""
    server = ForkServer(_CHECKED)
    try:
        parts = make_tiny_parts(server, folder / "parts")
        return [_row(server, folder, parts, runs) for runs in (QUICK if is_quick else FULL)]
    finally:
        server.close()


def _row(server: ForkServer, folder: Path, parts: Path, runs: Runs) -> Row:
    home = folder / runs.name.replace(", ", "_").replace(" ", "_")
    often = TinyRun(parts, home / "often", runs.saves, 1, home / "tmp", runs.options)
    once = TinyRun(parts, home / "once", runs.saves, runs.saves, home / "tmp", runs.options)
    problems = []
    try:
        for tiny in (often, once):
            run_to_end(server, tiny, runs.ranks, 120 + _SAVE_LIMIT_S * runs.saves)
        if often.digest() != once.digest():
            problems.append("other bits than those of the run that saved once")
    except RuntimeError as error:
        problems.append(str(error))
    saves = sum(mark["do"] == "saved" for mark in often.marks())
    if saves != runs.saves:
        problems.append(f"{saves:,} saves instead of {runs.saves:,}")
    for problem in problems:
        print(f"memory, {runs.name}: {problem}", file=sys.stderr)
    fault = f"a save after every optimizer step, MALLOC_CHECK_=3, {runs.name} on {runs.ranks} processes"
    return Row(fault, _PROMISE, saves, f"{len(problems)} problems in {saves:,} saves", not problems)
