"""Runs that hang or lose their loader processes: what is found, how soon, and what is left of it."""

import io
import shutil
import signal
import tarfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sd_training.errors import EXIT_BAD_DATA, EXIT_HANG, EXIT_MISTAKE
from tests.faults.faulty_run import KILLS_AT
from tests.faults.fork_server import Child, ForkServer, shared_server
from tests.faults.row import Row
from tests.faults.tiny_run import TinyRun, as_torchrun, make_tiny_parts, stop_all, tail

RANKS = 2
LIMIT_S = 8.0
"""Of the sections data and step in these runs; the rest is left as it is."""
FOUND_S = 5.0
"""Beyond the limit: until all processes have ended."""
_STALL_S = 0.5
"""A look comes many times as often; what two are further apart, the machine stood still, and the watch counts alike."""
_WAIT_S = 400.0
_HANGS = {
    "stop": "a rank is stopped (SIGSTOP)",
    "collective": "a collective that one rank leaves out",
    "decode": "a loader process stuck in decoding",
}
_LIMITS = (f"watch.data_s={LIMIT_S}", f"watch.step_s={LIMIT_S}")


@dataclass
class Trial:
    """A run of two ranks with a fault."""

    kind: str
    tiny: TinyRun
    children: list[Child]
    looked_s: float = 0.0
    """When, after the fault began; 0: it has not."""
    took_s: float = 0.0
    stalled_s: float = 0.0
    statuses: Sequence[int | None] = ()

    def look(self) -> bool:
        """Notes when the fault begins and when all have ended; whether that is so."""
        marks = [(self.tiny.home / f"at_step_3.{rank}").exists() for rank in range(RANKS)]
        if not self.looked_s and (all(marks) or (any(marks) and self.kind == "decode")):
            self.looked_s = time.monotonic()
            if self.kind == "stop":
                self.children[1].send(signal.SIGSTOP)
        self.statuses = [child.poll() for child in self.children]
        if self.looked_s:
            since_s = time.monotonic() - self.looked_s
            self.looked_s, self.took_s = self.looked_s + since_s, self.took_s + since_s
            self.stalled_s += max(0.0, since_s - _STALL_S)
        return None not in self.statuses

    def problem(self) -> str:
        """What is not as promised; empty: nothing."""
        stop_all(self.children, 1)
        if self.statuses != [EXIT_HANG] * RANKS:
            return f"{self.kind}: statuses {self.statuses}\n{tail(self.tiny.home / 'log.txt')}"
        stacks = [(self.tiny.run_dir / "hangs" / f"rank-{rank}.txt") for rank in range(RANKS)]
        if not all(path.is_file() and "Thread" in path.read_text() for path in stacks):
            return f"{self.kind}: stacks of {[path.name for path in stacks if path.is_file()]} only"
        return f"found after {self.told()}" if self.took_s - self.stalled_s > LIMIT_S + FOUND_S else ""

    def told(self) -> str:
        """How long it took."""
        return f"{self.took_s:.1f} s" + (f" ({self.stalled_s:.1f} s of stalls)" if self.stalled_s else "")


def start(
    server: ForkServer, tiny: TinyRun, kind: str, ranks: int, more: Mapping[str, str] | None = None
) -> list[Child]:
    """Its processes, as torchrun would start them."""
    for folder in (tiny.home, tiny.temporary):
        folder.mkdir(parents=True, exist_ok=True)
    words, log = [*tiny.words(ranks), *tiny.more], tiny.home / "log.txt"
    shared = {**tiny.environment(), "FAULT": kind, **(more or {})}
    target = "tests.faults.faulty_run:train"
    return [server.start(target, words, log, shared | own) for own in as_torchrun(ranks)]


def hangs(server: ForkServer, parts: Path, folder: Path, rounds: int) -> list[Row]:
    """One row for each kind."""
    slowest: dict[str, Trial] = {}
    problems: dict[str, list[str]] = {kind: [] for kind in _HANGS}
    for number in range(rounds):
        trials = [_begin(server, parts, folder / f"{kind}_{number}", kind) for kind in _HANGS]
        waiting, end_s = list(trials), time.monotonic() + _WAIT_S
        while waiting and time.monotonic() < end_s:
            waiting = [trial for trial in waiting if not trial.look()]
            time.sleep(0.02)
        for trial in trials:
            problem = trial.problem()
            slowest[trial.kind] = max(trial, slowest.get(trial.kind, trial), key=lambda one: one.took_s)
            problems[trial.kind] += [problem] if problem else []
            shutil.rmtree(trial.tiny.home, ignore_errors=True)
    return [
        Row(
            what,
            f"found within its limit ({LIMIT_S:g} s) + {FOUND_S:g} s, stacks of both ranks, status {EXIT_HANG} on both",
            rounds,
            f"ended after {slowest[kind].told()} at most; {len(problems[kind])} problems" + _listed(problems[kind]),
            not problems[kind],
        )
        for kind, what in _HANGS.items()
    ]


def _begin(server: ForkServer, parts: Path, home: Path, kind: str) -> Trial:
    workers = 1 if kind == "decode" else 0
    tiny = TinyRun(parts, home, 400, 1000, home / "tmp", (*_LIMITS, f"system.workers={workers}"))
    return Trial(kind, tiny, start(server, tiny, kind, RANKS))


def deaths(server: ForkServer, parts: Path, folder: Path, rounds: int) -> Row:
    """Both loader processes, three times in a run."""
    more = ("system.workers=2", *_LIMITS)
    clean = TinyRun(parts, folder / "undisturbed", 12, 1000, folder / "tmp", _LIMITS)
    problems = (
        [] if _statuses(start(server, clean, "", 1)) == [0] else [f"a clean run:\n{tail(clean.home / 'log.txt')}"]
    )
    for number in range(rounds):
        tiny = TinyRun(parts, folder / f"killed_{number}", 12, 1000, folder / "tmp", more)
        statuses, log = _statuses(start(server, tiny, "worker", 1)), tiny.home / "log.txt"
        said = log.read_text().count("was killed by SIGKILL")
        if statuses != [0] or said != len(KILLS_AT):
            problems.append(f"statuses {statuses}, {said} deaths said\n{tail(log)}")
        elif tiny.losses() != clean.losses() or tiny.digest() != clean.digest():
            problems.append("other losses or other weights than the run that nothing was done to")
    return Row(
        "loader processes killed (kill -9)",
        "replaced at the same micro-batch, the run's bits are those of an undisturbed one",
        rounds * len(KILLS_AT),
        f"{len(problems)} runs of {rounds} with lost, repeated or other samples{_listed(problems)}",
        not problems,
    )


def bad_data(server: ForkServer, parts: Path, folder: Path) -> Row:
    """Two ranks on images that are cut off (found while training), and on images without captions (at the start)."""
    problems = []
    no_sample = "error: dataset.params.path: no sample is left"  # a report of the data follows, line by line
    for name, status, once in (("cut", EXIT_BAD_DATA, "error: "), ("captionless", EXIT_MISTAKE, no_sample)):
        bad = folder / f"parts_{name}"
        shutil.copytree(parts, bad, ignore=shutil.ignore_patterns("cache"))
        for shard in (bad / "shards").iterdir():
            _spoil(shard, is_cut=name == "cut")
        tiny = TinyRun(bad, folder / f"bad_{name}", 12, 1000, folder / "tmp")
        statuses, said = _statuses(start(server, tiny, "", RANKS)), (tiny.home / "log.txt").read_text()
        num_said = sum(line.startswith(once) for line in said.splitlines())
        if statuses != [status] * RANKS or num_said != 1 or "Traceback" in said:
            problems.append(f"{name}: statuses {statuses}\n{tail(tiny.home / 'log.txt')}")
    return Row(
        "data that cannot be used, on two ranks",
        f"said once, no traceback, status {EXIT_BAD_DATA} (too many bad samples) or "
        f"{EXIT_MISTAKE} (none can take part) on both",
        2,
        f"{len(problems)} with another end{_listed(problems)}",
        not problems,
    )


def _spoil(shard: Path, *, is_cut: bool) -> None:
    """Keeps the head of every image, which tells its size; or all but the captions."""
    with tarfile.open(shard) as tar:
        members = [(member.name, (tar.extractfile(member) or io.BytesIO()).read()) for member in tar]
    with tarfile.open(shard, "w") as tar:
        for name, data in members:
            if name.endswith("txt") and not is_cut:
                continue
            kept = data[:60] if name.endswith("png") and is_cut else data
            entry = tarfile.TarInfo(name)
            entry.size = len(kept)
            tar.addfile(entry, io.BytesIO(kept))


def clean(server: ForkServer, parts: Path, folder: Path, steps: int) -> Row:
    """Two ranks, a loader process each, saves: nothing hangs."""
    more = ("system.workers=1", *_LIMITS, "watch.save_s=20", "checkpoint.save_every_minutes=0.1")
    tiny = TinyRun(parts, folder / "clean", steps, 1000, folder / "tmp", more)
    began_s = time.monotonic()
    statuses = _statuses(start(server, tiny, "", RANKS), 3600)
    alarms = int((tiny.run_dir / "hangs").exists()) + int((tiny.run_dir / "first_failure.json").exists())
    problems = [] if statuses == [0] * RANKS and not alarms else [f"{statuses}\n{tail(tiny.home / 'log.txt')}"]
    return Row(
        "nothing",
        f"no alarm with limits of {LIMIT_S:g} s",
        1,
        f"{alarms} alarms in {steps:,} steps, {time.monotonic() - began_s:.0f} s{_listed(problems)}",
        not problems,
    )


def _statuses(children: Sequence[Child], limit_s: float = _WAIT_S) -> list[int | None]:
    statuses = [child.wait(limit_s) for child in children]
    stop_all(children, 1)
    return statuses


def _listed(problems: Sequence[str]) -> str:
    return "".join(f"; {problem}" for problem in problems[:3])


def run(folder: Path, is_quick: bool) -> list[Row]:
    """All rows."""
    server = shared_server()
    parts = make_tiny_parts(server, folder / "parts")
    rows = hangs(server, parts, folder, 1 if is_quick else 5)
    rows.append(deaths(server, parts, folder, 1 if is_quick else 7))
    rows.append(bad_data(server, parts, folder))
    rows.append(clean(server, parts, folder, 50 if is_quick else 10_000))
    return rows
