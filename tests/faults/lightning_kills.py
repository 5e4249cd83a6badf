"""The bar: files that Lightning's own ModelCheckpoint leaves when it is killed inside a save, TMPDIR elsewhere."""

import json
import math
import random
import shutil
import signal
import time
from pathlib import Path

from tests.faults.fork_server import ForkServer
from tests.faults.row import Row
from tests.faults.tiny_run import other_file_system

STEPS, SAVE_EVERY = 12, 2
_ADAM = 3
"""Numbers of a checkpoint per weight."""


def lightning_row(server: ForkServer, folder: Path, size: int, kills: int) -> Row:
    """A figure, no promise.

    Args:
        server: forks the runs.
        folder: for their checkpoints.
        size: of a checkpoint [bytes].
        kills: how many.
    """
    from tests.faults.lightning_run import problem_of

    folder.mkdir(parents=True)
    temporary = other_file_system(folder)
    chance, torn, save_s = random.Random(0), 0, 0.02
    place = folder / "tmp" if temporary is None else temporary
    place.mkdir()
    width = math.isqrt(size // (4 * _ADAM))
    for trial in range(kills):
        home = folder / str(trial)
        home.mkdir()
        save_s = _kill_in_a_save(server, home, place, width, chance, save_s)
        torn += any(problem_of(path) for path in home.glob("*.ckpt"))
        shutil.rmtree(home)
    leaked = sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
    shutil.rmtree(place)
    where = "in the same file system" if temporary is None else "on another file system"
    figure = f"{torn} left a file under its final name that cannot be read; {leaked:,} bytes left in TMPDIR, {where}"
    fault = f"the same of Lightning's ModelCheckpoint ({size / 2**20:.1f} MiB), all inside a save"
    return Row(fault, "none: the bar beside it", kills, figure, True)


def _kill_in_a_save(
    server: ForkServer, home: Path, temporary: Path, width: int, chance: random.Random, save_s: float
) -> float:
    """Returns how long the saves before took [s]."""
    words = [str(home), str(width), str(STEPS), str(SAVE_EVERY)]
    environment = {"WATCH_DIR": str(home), "TMPDIR": str(temporary)}
    child = server.start("tests.faults.lightning_run:train", words, home / "log.txt", environment)
    marks, wanted = home / "marks_0.jsonl", chance.choice((1, 2, 3))
    while not marks.exists() or marks.read_text().count('"save"') < wanted:
        if child.poll() is not None:
            raise RuntimeError((home / "log.txt").read_text())
        time.sleep(0.0005)
    time.sleep(chance.uniform(0, save_s))
    child.send(signal.SIGKILL)
    child.wait(60)
    times_s = [json.loads(line)["at_s"] for line in marks.read_text().splitlines()]
    return times_s[1] - times_s[0] if wanted > 1 else save_s
