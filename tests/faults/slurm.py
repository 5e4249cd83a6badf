"""A real SLURM of two nodes: ten chained requeues, a preemption by a partition of higher priority, and a node that
fails while its processes go on. The shipped batch file is used as it is; what it calls python is a wrapper that starts
a watched run.

The warning before the time limit is sent by `scancel --signal`, which takes the same way as SLURM's own: the clock of
SLURM looks at limits every 30 s only (tests/integration/test_slurm.py waits for it twice).
"""

import os
import random
import shlex
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.fork_server import ROOT, shared_server
from tests.faults.row import Row
from tests.faults.tiny_run import GLOBAL_BATCH, TinyRun, make_tiny_parts, run_to_end
from tests.slurm_cluster import Cluster, missing_packages, slurm_cluster

RANKS, REQUEUES, STEPS, SAVE_EVERY = 2, 10, 60, 5
_BATCH_FILE = ROOT / "batch_files" / "multinode-template.sbatch"
_LIMIT_S = 300
_STEP_S = 0.3
"""What every step is made longer by, so that it can be met in the middle."""
_PROMISE = "no step lost, none done twice, the same bits at the end"


@dataclass
class Job:
    """A run under SLURM."""

    cluster: Cluster
    tiny: TinyRun
    nodes: int
    hold: int | None = None
    """Step at which the first start waits for `let_go`."""
    number: str = ""
    problems: list[str] = field(default_factory=list)

    def submit(self) -> None:
        """Into the queue."""
        home = self.tiny.home
        for folder in (home, self.tiny.temporary):
            folder.mkdir(parents=True)
        python = home / "python"
        variables = self.tiny.environment() | {"PYTHONPATH": str(ROOT), "WATCH_STEP_S": str(_STEP_S)}
        if self.hold is not None:
            variables["WATCH_HOLD"] = f"{self.hold}:{home / 'go'}"
        exports = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
        command = shlex.join([sys.executable, "-u", "-m", "tests.faults.watched_run", *self.tiny.words(RANKS)])
        python.write_text(f"#!/bin/bash\nexport {exports}\ncd {shlex.quote(str(ROOT))}\nexec {command}\n")
        python.chmod(0o755)
        size = [f"--nodes={self.nodes}", f"--ntasks-per-node={RANKS // self.nodes}", "--gpus-per-node=1"]
        words = ["sbatch", "--parsable", "--partition=short", *size, "--cpus-per-task=2", "--time=60"]
        words += [f"--output={home}/job.log", f"--chdir={home}", str(_BATCH_FILE)]
        settings = {"RUN_PYTHON": str(python), "RUN_PROJECT_DIR": str(home)}
        self.number = self.cluster.command(*words, **settings).strip()

    def let_go(self) -> None:
        """The first start goes on."""
        (self.tiny.home / "go").touch()

    def state(self) -> str:
        """As SLURM says it."""
        return self.cluster.job(self.number)["JobState"]

    def starts(self) -> int:
        """How often it was put back into the queue."""
        return int(self.cluster.job(self.number)["Restarts"])

    def wait(self, is_done: Callable[[], bool], what: str) -> None:
        """Until it is so.

        Raises:
            RuntimeError: not in time; with the log.
        """
        end_s = time.monotonic() + _LIMIT_S
        while not is_done():
            if time.monotonic() > end_s:
                log = self.tiny.home / "job.log"
                raise RuntimeError(f"{what}: not within {_LIMIT_S} s; the job is {self.state()}\n{log.read_text()}")
            time.sleep(0.3)

    def wait_for_steps(self, start: int, count: int) -> None:
        """Until every rank has begun so many steps in that start."""

        def begun(rank: int) -> int:
            return sum(mark["do"] == "step" and mark["start"] == start for mark in self.tiny.marks(rank))

        self.wait(lambda: all(begun(rank) >= count for rank in range(RANKS)), f"start {start}")

    def check_end(self, whole: TinyRun) -> None:
        """Waits for the end and compares."""
        self.wait(lambda: self.state() not in ("PENDING", "RUNNING", "COMPLETING", "REQUEUED", "PREEMPTED"), "the end")
        if self.state() != "COMPLETED":
            self.problems.append(f"the job ended as {self.state()}\n{(self.tiny.home / 'job.log').read_text()[-2000:]}")
            return
        if self.tiny.digest() != whole.digest():
            self.problems.append("other weights, averages or optimizer state than the run never stopped")
        if self.tiny.losses() != whole.losses():
            self.problems.append("other losses in the metrics than the run never stopped")

    def lost_and_repeated(self) -> tuple[int, int]:
        """Steps that are in no start, and in more than one."""
        samples = self.tiny.samples(RANKS)
        lost = sum(step not in samples for step in range(self.tiny.steps))
        return lost, sum(len(seen) > GLOBAL_BATCH for seen in samples.values())


def run(folder: Path, is_quick: bool) -> list[Row]:
    """Three rows."""
    if is_quick:
        why = "not in the quick form; tests/integration/test_slurm.py runs a short one"
        return [Row("SLURM: requeues, preemption, node failure", _PROMISE, 0, why, True)]
    if missing := missing_packages():
        return [Row("SLURM", _PROMISE, 0, f"not tried: needs {', '.join(missing)}", False)]
    server = shared_server()
    parts = make_tiny_parts(server, folder / "parts")
    whole = _tiny(folder / "whole", parts)
    run_to_end(server, whole, RANKS, _LIMIT_S)
    with slurm_cluster(folder / "c") as cluster:
        return [
            _requeues(Job(cluster, _tiny(folder / "requeues", parts), 2), whole),
            _preemption(Job(cluster, _tiny(folder / "preemption", parts), 2), whole),
            _node_failure(Job(cluster, _tiny(folder / "node", parts), 1, hold=2 * SAVE_EVERY - 2), whole),
        ]


def _tiny(home: Path, parts: Path) -> TinyRun:
    return TinyRun(parts, home, STEPS, SAVE_EVERY, home / "tmp")


def _row(job: Job, fault: str, trials: int, figure: str, promise: str = _PROMISE) -> Row:
    for problem in job.problems:
        print(f"slurm, {job.tiny.home.name}: {problem}", file=sys.stderr)
    return Row(fault, promise, trials, f"{figure}; {len(job.problems)} problems", not job.problems)


def _requeues(job: Job, whole: TinyRun) -> Row:
    chance = random.Random(0)
    job.submit()
    for start in range(REQUEUES):
        job.wait_for_steps(start, 2)
        time.sleep(chance.uniform(0, 2 * _STEP_S))
        job.cluster.command("scancel", "--signal=USR1", job.number)
        job.wait(lambda start=start: job.starts() > start, f"requeue {start + 1}")  # type: ignore[misc]
    job.check_end(whole)
    lost, repeated = job.lost_and_repeated()
    if lost or repeated:
        job.problems.append(f"{lost} steps lost, {repeated} done twice")
    figure = f"{job.starts()} requeues of one job: {lost} steps lost, {repeated} done twice"
    return _row(job, "SLURM warns before its time limit; two nodes", REQUEUES, figure)


def _preemption(job: Job, whole: TinyRun) -> Row:
    job.submit()
    job.wait_for_steps(0, 8)
    size = ["--nodes=2", "--exclusive", "--output=/dev/null"]
    job.cluster.command("sbatch", "--parsable", "--partition=urgent", *size, "--wrap=sleep 2")
    job.wait(lambda: job.starts() > 0, "the preemption")
    job.check_end(whole)
    lost, repeated = job.lost_and_repeated()
    if lost or repeated:
        job.problems.append(f"{lost} steps lost, {repeated} done twice")
    return _row(job, "SLURM preempts it for another job; two nodes", 1, f"{lost} steps lost, {repeated} done twice")


def _node_failure(job: Job, whole: TinyRun) -> Row:
    """kill −9 of the node's slurmd: the job starts on the other node while the old processes still train."""
    job.submit()
    job.wait_for_steps(0, SAVE_EVERY + 2)
    job.cluster.fail_node(job.cluster.job(job.number)["NodeList"])
    # Both nodes are this machine, where a lock would refuse a second start; two machines do not see each other's.
    for lock in job.tiny.run_dir.glob("writer-*.lock"):
        lock.unlink()
    job.wait_for_steps(1, 1)
    is_zombie = len(_alive(job.tiny, 0)) == RANKS
    job.let_go()
    job.check_end(whole)
    began = next(mark for mark in job.tiny.marks() if mark["start"] == 1)
    old = [mark for mark in job.tiny.marks() if mark["start"] == 0]
    again = max(mark["step"] for mark in old if mark["at_s"] < began["at_s"]) - began["step"]
    published = sum(mark["do"] == "saved" and mark["at_s"] > began["at_s"] for mark in old)
    if not is_zombie:
        job.problems.append("the old processes had ended before the new ones began: nothing was shown")
    if published:
        job.problems.append(f"the old processes sealed {published} checkpoints after the new ones had begun")
    _end_zombies(job)
    missing, twice = gaps_of_record(job.tiny.losses(), STEPS)
    if again > SAVE_EVERY or missing or twice:
        job.problems.append(f"{again} steps done again, {missing} missing from metrics.csv, {twice} twice in it")
    figure = (
        f"{again} steps of at most {SAVE_EVERY} done again, {missing} missing from the record, {twice} twice in it; "
        f"{published} checkpoints sealed by the old processes afterwards"
    )
    promise = "goes on elsewhere from the newest checkpoint; what still runs on the lost node can write nothing"
    return _row(job, "a SLURM node is lost, its processes go on", 1, figure, promise)


def gaps_of_record(losses: Iterable[str], steps: int) -> tuple[int, int]:
    """Steps that `TinyRun.losses` lacks, and those that it has more than once."""
    counts = Counter(int(line.partition(":")[0]) for line in losses)
    return sum(not counts[step] for step in range(1, steps + 1)), sum(count > 1 for count in counts.values())


def _end_zombies(job: Job) -> None:
    """They should end by themselves at their next save."""
    end_s = time.monotonic() + 60
    while _alive(job.tiny, 0) and time.monotonic() < end_s:
        time.sleep(0.5)
    for pid in _alive(job.tiny, 0):
        job.problems.append(f"the old process {pid} still runs at the end")
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _alive(tiny: TinyRun, start: int) -> list[int]:
    """Processes of that start that still run."""
    found = {mark["pid"] for rank in range(RANKS) for mark in tiny.marks(rank) if mark["start"] == start}
    return [pid for pid in found if _is_of(pid, tiny)]


def _is_of(pid: int, tiny: TinyRun) -> bool:
    try:
        return f"WATCH_DIR={tiny.home}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
