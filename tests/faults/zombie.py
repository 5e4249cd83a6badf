"""A run that its scheduler gave up: stopped (SIGSTOP) at a random moment, started anew elsewhere, and then it wakes up.

A second start on the same machine would be refused while the first process lives; the file of the lock is removed, as
if the new start were on a machine that does not see it.
"""

import random
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from sd_training.checkpoint.folder import sealed_checkpoints
from sd_training.errors import TakenOverError
from tests.faults.fork_server import ForkServer, shared_server
from tests.faults.row import Row
from tests.faults.tiny_run import TinyRun, make_tiny_parts, run_to_end, tail

STEPS, SAVE_EVERY = 12, 2
_STEP_S = 0.15
_LIMIT_S = 300
_PROMISE = "the old process publishes and deletes nothing and ends with status 69; the new one ends with the same bits"
_REFUSED = "refused with status 2, naming the process that writes there; that one goes on"


@dataclass(frozen=True)
class SlowRun(TinyRun):
    """With time between two saves to stop it in."""

    def environment(self) -> dict[str, str]:
        """Variables of its processes."""
        return super().environment() | {"WATCH_STEP_S": str(_STEP_S)}


def run(folder: Path, is_quick: bool) -> list[Row]:
    """Two rows: zombies, and second starts."""
    server, trials = shared_server(), 2 if is_quick else 20
    parts = make_tiny_parts(server, folder / "parts")
    whole = TinyRun(parts, folder / "whole", STEPS, SAVE_EVERY, folder / "tmp")
    run_to_end(server, whole)
    chance, problems = random.Random(0), []
    for trial in range(trials):
        tiny = SlowRun(parts, folder / str(trial), STEPS, SAVE_EVERY, folder / f"tmp-{trial}", holds=(STEPS - 1,))
        problems += _wake_up(server, tiny, whole, chance, is_early=trial % 2 == 0)
    second = TinyRun(parts, folder / "second", STEPS, SAVE_EVERY, folder / "tmp-second", holds=(SAVE_EVERY + 1,))
    refused = _second_start(server, second)
    for problem in problems + refused:
        print(f"zombie: {problem}", file=sys.stderr)
    figure = f"{len(problems)} of {trials} zombies published, deleted or did not end; half woke up beside the new run"
    return [
        Row("SIGSTOP, a new start elsewhere, SIGCONT", _PROMISE, trials, figure, not problems),
        Row("two starts in one folder", _REFUSED, 1, f"{1 - len(refused)} of 1 refused", not refused),
    ]


def _wake_up(server: ForkServer, tiny: SlowRun, whole: TinyRun, chance: random.Random, *, is_early: bool) -> list[str]:
    """At most one problem.

    Args:
        server: forks the runs.
        tiny: the run.
        whole: one that nothing was done to.
        chance: decides when it is stopped.
        is_early: it wakes up while the new one runs, else after its end.
    """
    (old,) = tiny.start(server)
    while not sealed_checkpoints(tiny.checkpoints) and old.poll() is None:
        time.sleep(0.005)
    time.sleep(chance.uniform(0, 1))
    if chance.random() < 0.5:  # inside a save
        end_s = time.monotonic() + 2
        while not list(tiny.checkpoints.glob("*.partial*")) and old.poll() is None and time.monotonic() < end_s:
            time.sleep(0.001)
    old.send(signal.SIGSTOP)
    tiny.let_go(STEPS - 1)
    for lock in tiny.run_dir.glob("writer-*.lock"):
        lock.unlink()
    claim = _claim(tiny)
    (new,) = tiny.start(server)
    if is_early:
        while _claim(tiny) == claim and new.poll() is None:
            time.sleep(0.005)
        time.sleep(chance.uniform(0, 1))
        old.send(signal.SIGCONT)
    new_status, before = new.wait(_LIMIT_S), _state(tiny)
    old.send(signal.SIGCONT)
    old_status, after = old.wait(_LIMIT_S), _state(tiny)
    is_equal = new_status == 0 and tiny.digest() == whole.digest() and tiny.losses() == whole.losses()
    if (old_status, new_status) != (TakenOverError.exit_status, 0) or before[:-1] != after[:-1] or not is_equal:
        same = f"bits as they should be: {is_equal}, unchanged: {before == after}"
        return [f"old {old_status}, new {new_status}, {same}\n{tail(tiny.home / 'log.txt')}"]
    tiny.remove()
    return []


def _second_start(server: ForkServer, tiny: TinyRun) -> list[str]:
    (first,) = tiny.start(server)
    while not sealed_checkpoints(tiny.checkpoints) and first.poll() is None:
        time.sleep(0.005)
    (second,) = tiny.start(server)
    status, text = second.wait(_LIMIT_S), (tiny.home / "log.txt").read_text()
    tiny.let_go(*tiny.holds)
    first_status = first.wait(_LIMIT_S)
    is_clear = f"(process {first.pid} on " in text and "Traceback" not in text
    return [] if (status, first_status, is_clear) == (2, 0, True) else [f"{status}, {first_status}\n{text}"]


def _claim(tiny: SlowRun) -> str:
    return (tiny.run_dir / "writer.json").read_text()


def _state(tiny: SlowRun) -> tuple[object, ...]:
    """Names, sizes and times of everything that is published, the exports included."""
    places = [path for name in ("checkpoints", "current_pipeline") for path in (tiny.run_dir / name).rglob("*")]
    facts = sorted((str(path), path.lstat().st_size, path.lstat().st_mtime_ns) for path in places)
    return facts, (tiny.run_dir / "exported_step").read_text(), (tiny.run_dir / "metrics.csv").read_text()
