"""The run that the parts of the campaign break: a tiny pipeline on a few pictures, and what is compared of it."""

import csv
import hashlib
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.faults.fork_server import Child, ForkServer, do_and_end, shared_server
from tests.free_port import free_port
from tests.tiny_options import tiny_run_options

GLOBAL_BATCH = 8
_TRAIN = "tests.faults.watched_run:train"


def make_parts(words: list[str]) -> None:
    """In a child of the fork server: a tiny pipeline and shards in the folder that is the one word."""
    import torch

    from tests.tiny_parts import SMALLER_UNET, save_picture_shards, save_tiny_pipeline

    torch.set_num_threads(1)
    save_tiny_pipeline(Path(words[0]) / "pipeline", unet=SMALLER_UNET)
    save_picture_shards(Path(words[0]) / "shards")


def as_torchrun(ranks: int) -> list[dict[str, str]]:
    """Variables that torchrun gives each of so many processes of one machine; one process is started without it."""
    if ranks == 1:
        return [{}]
    shared = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


@dataclass(frozen=True)
class TinyRun:
    """A run folder and how it is started.

    Attributes:
        parts: folder of the pipeline and the shards.
        home: the run's own folder: its run folder, marks, logs.
        steps: optimizer steps.
        save_every: optimizer steps between saves.
        temporary: its TMPDIR.
        more: further options.
        holds: steps before which every start waits for `let_go`, so that it can be met there however fast it is.
    """

    parts: Path
    home: Path
    steps: int
    save_every: int
    temporary: Path
    more: tuple[str, ...] = ()
    holds: tuple[int, ...] = ()

    @property
    def run_dir(self) -> Path:
        """What the trainer writes to."""
        return self.home / "run"

    @property
    def checkpoints(self) -> Path:
        """Where its checkpoints are."""
        return self.run_dir / "checkpoints"

    def start(self, server: ForkServer, ranks: int = 1, more: Iterable[str] = ()) -> list[Child]:
        """Its processes, as torchrun would start them; also those that go on with it."""
        for folder in (self.home, self.temporary):
            folder.mkdir(parents=True, exist_ok=True)
        words = [*self.words(ranks), *self.more, *more]
        log, shared = self.home / "log.txt", self.environment()
        return [server.start(_TRAIN, words, log, shared | own) for own in as_torchrun(ranks)]

    def words(self, ranks: int) -> list[str]:
        """Options."""
        return [
            *tiny_run_options(self.parts, self.home, "run"),
            f"experiment.num_examples_to_see={GLOBAL_BATCH * self.steps}",
            f"experiment.save_every={self.save_every}",
            "dataset.params.resolution=16",
            "dataset.params.crop=random",
            "dataset.params.flip_prob=0.5",
            f"system.batch_size={GLOBAL_BATCH // ranks}",
            "logging.every=1",
        ]

    def environment(self) -> dict[str, str]:
        """Variables of its processes."""
        places = {"TMPDIR": self.temporary, "WATCH_DIR": self.home, "XDG_CACHE_HOME": self.parts / "cache"}
        holds = ",".join(f"{step}:{self._go(step)}" for step in self.holds)
        return {name: str(place) for name, place in places.items()} | {"WATCH_HOLD": holds}

    def _go(self, step: int) -> Path:
        return self.home / f"go_{step}"

    def let_go(self, step: int) -> None:
        """Nobody waits before this step any more."""
        self._go(step).touch()

    def marks(self, rank: int = 0) -> list[dict[str, Any]]:
        """What `watched_run.py` wrote, of all starts."""
        path = self.home / f"marks_{rank}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def samples(self, ranks: int) -> dict[int, list[Any]]:
        """Optimizer step → [position, sample id, digest of its draws] of all ranks, in the global order; a step that
        was done twice has twice as many."""
        steps: dict[int, list[Any]] = {}
        for mark in (mark for rank in range(ranks) for mark in self.marks(rank)):
            if mark["do"] == "step":
                steps.setdefault(mark["step"], []).extend(mark["samples"])
        return {step: sorted(samples) for step, samples in steps.items()}

    def losses(self) -> list[str]:
        """As they stand in the metrics, with the step before each."""
        with (self.run_dir / "metrics.csv").open(newline="") as stream:
            return [f"{row['optimizer_step']}: {row['loss']}" for row in csv.DictReader(stream)]

    def digest(self, step: int | None = None) -> str:
        """Of weights, averages and optimizer state after a step, the last one unless named."""
        return digest_of(self.checkpoints / f"step={step or self.steps}")

    def files(self) -> set[str]:
        """Every file and folder of the run and below its TMPDIR. Event files are named after process and second. Left
        out are the sockets of Python's fork server for loader processes: `kill -9` leaves the name of one in TMPDIR,
        without a byte of content."""
        below = [path.relative_to(self.run_dir).as_posix() for path in self.run_dir.rglob("*")]
        temporary = [f"TMPDIR/{path.relative_to(self.temporary)}" for path in self.temporary.rglob("*")]
        temporary = [name for name in temporary if not re.fullmatch(r"TMPDIR/pymp-\w+(/listener-\w+)?", name)]
        return {name for name in below if "events.out.tfevents" not in name} | set(temporary)

    def remove(self) -> None:
        """All of it."""
        for folder in (self.home, self.temporary):
            shutil.rmtree(folder, ignore_errors=True)


def make_tiny_parts(server: ForkServer, folder: Path) -> Path:
    """`make_parts`, in a child; returns the folder."""
    folder.mkdir(parents=True)
    server.call("tests.faults.tiny_run:make_parts", [str(folder)], folder / "log.txt")
    return folder


def run_to_end(server: ForkServer, run: TinyRun, ranks: int = 1, limit_s: float = 300) -> None:
    """Starts it once and waits.

    Raises:
        RuntimeError: it did not end well.
    """
    statuses = [child.wait(limit_s) for child in run.start(server, ranks)]
    if statuses != [0] * ranks:
        raise RuntimeError(f"a run that nothing was done to ended with {statuses}:\n{tail(run.home / 'log.txt')}")


RUN_MODULE = f"{__name__}:run_module"
"""For `ForkServer.start`."""


def run_module(words: list[str]) -> None:
    """In a forked process: `python -m words[0] words[1] …`."""
    _run_program(words, partial(runpy.run_module, alter_sys=True))


RUN_HERE = f"{__name__}:run_here"
"""For `ForkServer.start`."""


def run_here(words: list[str]) -> None:
    """In a forked process: `python words[2] words[3] … 2>words[1]` of a script, or `-m` module, in the folder words[0].
    Without words[1] stderr goes where stdout does."""
    folder, errors, *program = words
    os.chdir(folder)
    if errors:
        os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), 2)
    run_module(program[1:]) if program[0] == "-m" else _run_program(program, runpy.run_path)


def _run_program(words: list[str], run: Callable[..., object]) -> None:
    import torch

    torch.set_num_threads(1)
    sys.argv = list(words)
    run(words[0], run_name="__main__")


ONE_MACHINE = ("--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0")
"""Options of torchrun."""
TORCHRUN = f"{__name__}:torchrun"
"""For `ForkServer.start`."""


class _ForkedCommand(subprocess.Popen[bytes]):
    """What torchrun starts by `python -u -m module …` or `python -u script …`, forked from its own process instead."""

    def _execute_child(self, args: Any, *given: Any) -> None:
        environment = given[5]  # after executable, preexec_fn, close_fds, pass_fds and cwd
        self.pid, self._child_created = os.fork(), True
        if self.pid == 0:
            os.setsid()
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):  # for which torchrun has handlers
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.environ.clear()
            os.environ.update(environment)
            words = list(args[args.index("-u") + 1 :])
            do_and_end(lambda: run_here([os.getcwd(), "", *words]))


def torchrun(words: list[str]) -> None:
    """In a forked process: `torchrun words…`. Only the processes that it starts are forked as well."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import subprocess_handler

    starts: Any = subprocess_handler.subprocess_handler
    starts.Popen = _ForkedCommand
    run.main(words)


def run_as_torchrun(words: list[str], log: Path, ranks: int, limit_s: float = 900) -> list[int | None]:
    """Exit statuses of `python -m words[0] words[1] …` in processes that see what torchrun shows its own. When one
    fails the others get SIGTERM.

    They are forked from a server that has imported the trainer once: torchrun's would spend ten seconds each on that.
    """
    server = shared_server()
    started = [server.start(RUN_MODULE, words, log, {**os.environ, **own}) for own in as_torchrun(ranks)]
    end_s = time.monotonic() + limit_s
    while any(child.poll() is None for child in started) and time.monotonic() < end_s:
        if any(child.poll() for child in started):
            break
        time.sleep(0.02)
    stop_all(started, 60)
    return [child.poll() for child in started]


def stop_all(children: Sequence[Child], limit_s: float = 30) -> int:
    """What torchrun does when one process has ended badly: SIGTERM to the others, and SIGKILL when that did not help.
    Returns how many had to be killed."""
    killed = 0
    for child in children:
        if child.poll() is None:
            child.send(signal.SIGTERM)
    for child in children:
        if child.wait(limit_s) is None:
            child.send(signal.SIGKILL)
            child.wait(limit_s)
            killed += 1
    return killed


def tail(log: Path) -> str:
    """The last lines."""
    return "\n".join(log.read_text().splitlines()[-20:])


def digest_of(checkpoint: Path) -> str:
    """SHA-256 over name, type, shape and bytes of every tensor of a checkpoint, whichever process wrote it."""
    import torch

    from sd_training.checkpoint.save import open_checkpoint

    digest = hashlib.sha256()
    stored: Mapping[str, Mapping[str, Any]] = open_checkpoint(checkpoint).parts
    for part in sorted(stored):
        for name in sorted(stored[part]):
            tensor = stored[part][name]
            digest.update(f"{part}/{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
            digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def other_file_system(folder: Path) -> Path | None:
    """A folder that is in memory, where `folder` is not; null where the system has none."""
    memory = Path("/dev/shm")
    if not memory.is_dir() or not os.access(memory, os.W_OK) or memory.stat().st_dev == folder.stat().st_dev:
        return None
    return memory / f"campaign_{os.getpid()}"
