"""kill −9 at random moments, half of them inside a save; the run is started again until it ends.

A run is compared with one that nothing was done to: its checkpoint after every kill, its last checkpoint, the losses in
its metrics, and the names of all its files.
"""

import itertools
import random
import shutil
import signal
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.fork_server import Child, ForkServer, shared_server
from tests.faults.lightning_kills import lightning_row
from tests.faults.row import Row
from tests.faults.tiny_run import TinyRun, digest_of, make_tiny_parts, other_file_system, run_to_end, stop_all, tail

STEPS, SAVE_EVERY = 12, 2
STAGES = {"save": "the checkpoint was being written", "saved": "the pipeline was"}
"""Stages of a save by the mark that begins them."""
_KILLS_PER_RUN = 8
_LIMIT_S = 300
_PROMISE = "a checkpoint to go on from, at most one save interval lost, the same bits at the end, nothing left behind"


@dataclass
class Reference:
    """The run that nothing was done to."""

    run: TinyRun
    digests: dict[int, str]
    """By step; 0 is no checkpoint."""
    losses: list[str]
    files: set[str]


@dataclass
class Tally:
    """What was seen."""

    kills: int = 0
    inside: dict[str, int] = field(default_factory=lambda: dict.fromkeys(STAGES, 0))
    """Kills by the stage of a save that they fell into."""
    runs: int = 0
    most_lost: int = 0
    leaked_bytes: int = 0
    elsewhere: int = 0
    """Kills of runs whose TMPDIR is on another file system."""
    with_loaders: int = 0
    """Kills of runs with a loader process for each rank."""
    problems: list[str] = field(default_factory=list)


class Pace:
    """How long things take here and now, so that random moments fall where they are meant to."""

    def __init__(self, run: TinyRun) -> None:
        self.start_s, self.step_s = 1.5, 0.1
        self.stage_s = dict.fromkeys(STAGES, 0.1)
        self.learn(run, None)

    def learn(self, run: TinyRun, started_at_s: float | None) -> None:
        """From the marks of the latest start."""
        marks = [mark for mark in run.marks() if mark["at_s"] > (started_at_s or 0)]
        steps = [mark["at_s"] for mark in marks if mark["do"] == "step"]
        for stage in STAGES:
            pairs = [pair for pair in itertools.pairwise(marks) if pair[0]["do"] == stage]
            if pairs:
                self.stage_s[stage] = statistics.median(after["at_s"] - mark["at_s"] for mark, after in pairs)
        if steps and started_at_s is not None:
            self.start_s = steps[0] - started_at_s
        if len(steps) > 1:
            self.step_s = min(b - a for a, b in itertools.pairwise(steps))


@dataclass
class Killing:
    """Runs of so many ranks, killed until each has ended."""

    server: ForkServer
    ranks: int
    reference: Reference
    pace: Pace
    chance: random.Random
    tally: Tally = field(default_factory=Tally)

    def until_it_ends(self, tiny: TinyRun, kills: int) -> None:
        """Starts a run, kills it at most `kills` times, and looks at what is left after each time and at the end."""
        self.tally.runs += 1
        for left in range(kills, -1, -1):
            started_at_s = time.monotonic()
            children = tiny.start(self.server, self.ranks)
            if not (left and self._strike(tiny, children, started_at_s)):
                check_end(tiny, children, self.reference, self.tally)
                return
            self.tally.kills += 1
            self._note_stage(tiny)
            if stop_all(children) or any(child.left_behind() for child in children):
                self.tally.problems.append(f"{tiny.home}: a process went on after the kill")
            self.pace.learn(tiny, started_at_s)
            check_after_kill(tiny, self.reference, self.tally)

    def _strike(self, tiny: TinyRun, children: list[Child], started_at_s: float) -> bool:
        """Kills one process, at a random moment of a stage of a save or of its life. False: it ended before."""
        inside = self.tally.inside
        if sum(inside.values()) * 2 <= self.tally.kills:
            stage = min(STAGES, key=lambda stage: inside[stage])
            if not self._wait_for(stage, tiny, children):
                return False
            time.sleep(self.chance.uniform(0, self.pace.stage_s[stage]))
        else:
            interval_s = sum(self.pace.stage_s.values()) + SAVE_EVERY * self.pace.step_s
            life_s = self.pace.start_s + 3 * interval_s
            time.sleep(max(0.0, started_at_s + self.chance.uniform(0, life_s) - time.monotonic()))
        if any(child.poll() is not None for child in children):
            return False
        victim = self.chance.choice(children)
        victim.send(signal.SIGKILL)
        victim.wait(_LIMIT_S)
        return True

    def _wait_for(self, stage: str, tiny: TinyRun, children: list[Child]) -> bool:
        """The next time, or the time after it. False: the run ended."""
        wanted = _count(stage, tiny) + self.chance.choice((1, 2))
        while _count(stage, tiny) < wanted:
            if any(child.poll() is not None for child in children):
                return False
            time.sleep(0.002)
        return True

    def _note_stage(self, tiny: TinyRun) -> None:
        marks = tiny.marks()
        if marks and marks[-1]["do"] in STAGES:
            self.tally.inside[marks[-1]["do"]] += 1


def run(folder: Path, is_quick: bool) -> list[Row]:
    """Three rows: one process, one of two ranks, and Lightning's own checkpoints."""
    server = shared_server()
    parts = make_tiny_parts(server, folder / "parts")
    alone, pair, plain = (5, 3, 3) if is_quick else (120, 80, 60)
    rows = [_row(server, folder, parts, ranks, kills) for ranks, kills in ((1, alone), (2, pair))]
    size = sum(path.stat().st_size for path in (folder / f"reference_1/run/checkpoints/step={STEPS}").iterdir())
    return [*rows, lightning_row(server, folder / "lightning", size, plain)]


def make_reference(server: ForkServer, home: Path, parts: Path, ranks: int) -> Reference:
    """An uninterrupted run that keeps every checkpoint."""
    run = TinyRun(parts, home, STEPS, SAVE_EVERY, home / "tmp", ("checkpoint.keep=100",))
    run_to_end(server, run, ranks)
    digests = {step: run.digest(step) for step in range(SAVE_EVERY, STEPS + 1, SAVE_EVERY)}
    rotated = [f"checkpoints/step={step}" for step in list(digests)[:-2]]
    files = {name for name in run.files() if not any(name == old or name.startswith(f"{old}/") for old in rotated)}
    return Reference(run, digests, run.losses(), files)


def _row(server: ForkServer, folder: Path, parts: Path, ranks: int, kills: int) -> Row:
    reference = make_reference(server, folder / f"reference_{ranks}", parts, ranks)
    killing = Killing(server, ranks, reference, Pace(reference.run), random.Random(ranks))
    tally, memory = killing.tally, other_file_system(folder)
    while tally.kills < kills:
        before, problems = tally.kills, len(tally.problems)
        home = folder / f"kills_{ranks}" / str(tally.runs)
        temporary = home / "tmp" if memory is None or tally.runs % 2 else memory
        has_loader = tally.runs % 4 == 3
        tiny = TinyRun(parts, home, STEPS, SAVE_EVERY, temporary, (f"system.workers={int(has_loader)}",))
        killing.until_it_ends(tiny, min(_KILLS_PER_RUN, kills - before))
        tally.elsewhere += (tally.kills - before) * (temporary == memory)
        tally.with_loaders += (tally.kills - before) * has_loader
        if len(tally.problems) == problems:
            tiny.remove()
    if memory is not None:
        shutil.rmtree(memory, ignore_errors=True)
    for problem in tally.problems:
        print(f"kills, {ranks} processes: {problem}", file=sys.stderr)
    who = "the process" if ranks == 1 else f"one of {ranks} ranks"
    is_kept = not tally.problems and tally.most_lost <= SAVE_EVERY
    inside = ", ".join(f"{count} while {STAGES[stage]}" for stage, count in tally.inside.items())
    return Row(f"kill −9 of {who}: {inside}", _PROMISE, tally.kills, _figure(tally), is_kept)


def _figure(tally: Tally) -> str:
    return (
        f"{len(tally.problems)} problems in {tally.runs} runs; most steps lost {tally.most_lost} of {SAVE_EVERY}; "
        f"{tally.leaked_bytes} bytes left behind; {tally.elsewhere} with TMPDIR on another file system, "
        f"{tally.with_loaders} with loader processes"
    )


def _count(do: str, tiny: TinyRun) -> int:
    return sum(mark["do"] == do for mark in tiny.marks())


def check_after_kill(tiny: TinyRun, reference: Reference, tally: Tally) -> None:
    """What could be gone on from, on a copy: looking sets damaged ones aside."""
    marks = tiny.marks()
    acknowledged = max((mark["step"] for mark in marks if mark["do"] == "saved"), default=0)
    done = max((mark["step"] for mark in marks[-1:]), default=0)
    copy = tiny.home / "copy"
    if tiny.checkpoints.exists():
        shutil.copytree(tiny.checkpoints, copy)
    found = _newest(copy)
    if isinstance(found, str):
        tally.problems.append(f"{tiny.home}: {found}")
    elif found < acknowledged:
        tally.problems.append(f"{tiny.home}: step {acknowledged} was saved, now the newest is {found}")
    elif found and digest_of(copy / f"step={found}") != reference.digests[found]:
        tally.problems.append(f"{tiny.home}: step {found} holds other bits than in the uninterrupted run")
    else:
        tally.most_lost = max(tally.most_lost, done - found)
    shutil.rmtree(copy, ignore_errors=True)


def _newest(checkpoints: Path) -> int | str:
    """Step of the newest that verifies, 0 when there is none yet; or what is wrong."""
    from sd_training.checkpoint.folder import newest_verified, step_of
    from sd_training.errors import CheckpointError

    try:
        newest = newest_verified(checkpoints)
    except CheckpointError as error:
        return str(error)
    return 0 if newest is None else step_of(newest)


def check_end(tiny: TinyRun, children: list[Child], reference: Reference, tally: Tally) -> None:
    statuses = [child.wait(_LIMIT_S) for child in children]
    if any(statuses) or stop_all(children):
        tally.problems.append(f"{tiny.home}: ended with {statuses}\n{tail(tiny.home / 'log.txt')}")
        return
    if any(child.left_behind() for child in children):
        tally.problems.append(f"{tiny.home}: a process went on after the end")
    if tiny.digest() != reference.digests[STEPS]:
        tally.problems.append(f"{tiny.home}: other weights, averages or optimizer state than the uninterrupted run")
    if tiny.losses() != reference.losses:
        tally.problems.append(f"{tiny.home}: other losses in the metrics: {tiny.losses()}")
    if left := tiny.files() - reference.files:
        tally.problems.append(f"{tiny.home}: left behind: {sorted(left)[:5]}")
        tally.leaked_bytes += sum(_size(tiny, name) for name in left)
    if missing := reference.files - tiny.files():
        tally.problems.append(f"{tiny.home}: missing: {sorted(missing)[:5]}")


def _size(tiny: TinyRun, name: str) -> int:
    below_temporary = name.removeprefix("TMPDIR/")
    path = tiny.run_dir / name if below_temporary == name else tiny.temporary / below_temporary
    return path.stat().st_size
