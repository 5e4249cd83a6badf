"""Starts runs in a second instead of ten: a process that has imported torch, Lightning, diffusers and the trainer once
forks a child for every run. It has no threads of its own and no process group, so a child is as good as a new process.

Started by `ForkServer`, which speaks JSON lines with it: python -m tests.faults.fork_server
"""

import atexit
import functools
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from sd_training.cli import end_process

ROOT = Path(__file__).resolve().parents[2]
_LOOK_EVERY_S = 0.005


class Child:
    """A process of a run. It leads a session of its own, so that whatever it leaves behind can be found."""

    def __init__(self, server: "ForkServer", pid: int, log: Path) -> None:
        self.pid = pid
        self.log = log
        """What it prints."""
        self._server = server
        self._status: int | None = None

    def poll(self) -> int | None:
        """None while it runs, then its exit status; below zero the signal that killed it."""
        if self._status is None:
            self._status = self._server.ask({"do": "poll", "pid": self.pid})["status"]
        return self._status

    def wait(self, limit_s: float) -> int | None:
        """Its exit status, None when it did not end in time."""
        end_s = time.monotonic() + limit_s
        while self.poll() is None and time.monotonic() < end_s:
            time.sleep(_LOOK_EVERY_S)
        return self.poll()

    def send(self, number: signal.Signals) -> None:
        """A signal, unless it has ended. Its id is not given away before `poll` has seen its end."""
        if self._status is None:
            os.kill(self.pid, number)

    def left_behind(self, grace_s: float = 240) -> list[int]:
        """Processes of its session that still run, so long after its end. Loader processes look every second whether
        the process that they work for is there; the server that forks them first imports what it was told to."""
        end_s = time.monotonic() + grace_s
        while (found := self._others()) and time.monotonic() < end_s:
            time.sleep(0.1)
        return found

    def _others(self) -> list[int]:
        return [pid for pid in _processes() if pid != self.pid and _session_of(pid) == self.pid]


class ForkServer:
    """The process to fork from.

    Args:
        environment: variables that a process must have from its beginning, such as those of the allocator.
    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        own = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.fork_server"],
            cwd=ROOT,
            env={**os.environ, **own, **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._children: list[Child] = []
        self._one_asks = threading.Lock()

    def close(self) -> None:
        """Ends it and what still runs."""
        for child in self._children:
            for pid in [*child.left_behind(0), *([child.pid] if child.poll() is None else [])]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._process.communicate()

    def start(self, target: str, words: list[str], log: Path, environment: Mapping[str, str] | None = None) -> Child:
        """Calls a function in a new process.

        Args:
            target: `module:function`; it is called with `words`.
            log: file that gets what it prints, at its end.
            environment: variables beside those of this process.
        """
        job = {"target": target, "words": words, "log": str(log), "environment": dict(environment or {})}
        child = Child(self, self.ask({"do": "start", **job})["pid"], log)
        self._children.append(child)
        return child

    def call(self, target: str, words: list[str], log: Path) -> None:
        """The same, to its end.

        Raises:
            RuntimeError: it failed; with what it printed.
        """
        if self.start(target, words, log).wait(300) != 0:
            raise RuntimeError(f"{target} failed:\n{log.read_text()}")

    def ask(self, request: dict[str, Any]) -> Any:
        """One line there, one line back."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with self._one_asks:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            return json.loads(self._process.stdout.readline())


@functools.cache
def shared_server() -> ForkServer:
    """One for all parts, until this program ends."""
    server = ForkServer()
    atexit.register(server.close)
    return server


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _session_of(pid: int) -> int | None:
    """The session of a process that runs; a dead one that nobody waits for is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[3])


_IMPORTED = (
    "train",
    "sd_training.build.run",
    "tests.faults.watched_run",
    "tests.faults.lightning_run",
    "tests.tiny_parts",
    "omegaconf",
    "diffusers.guiders",
    "pandas",
    "tensorboard.summary",
    "torch.utils.tensorboard",
    "PIL.JpegImagePlugin",
    "PIL.PngImagePlugin",
)


def _import_everything() -> None:
    """What a run imports; a child would spend its time on it."""
    from sd_training.log import quiet_libraries

    quiet_libraries()
    gc.disable()
    for name in _IMPORTED:
        importlib.import_module(name)
    from diffusers import DDPMScheduler, StableDiffusionPipeline  # noqa: F401 - diffusers imports a class when asked
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("clip_text_model")  # compiles hundreds of patterns, once
    DDPMScheduler.from_config(DDPMScheduler().config)  # imports the schedulers that it can be made from
    with suppress(ImportError):
        import cpuinfo

        cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)  # a new process, for which DeepSpeed asks 5 times
    assert threading.active_count() == 1, threading.enumerate()
    gc.collect()
    gc.freeze()  # collecting garbage in a child would copy all of it
    gc.enable()


def _become_child(job: Mapping[str, Any], reply: int) -> Callable[[], None]:
    """In the child: nothing of the server's is left. What it returns is to be called after the server's loop has been
    left, so that the process ends as any other does."""
    os.setsid()
    os.close(reply)
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.environ.update(job["environment"])
    importlib.import_module("sd_training.watchdog").STARTED_NS = time.time_ns()  # type: ignore[attr-defined]
    module, _, function = job["target"].partition(":")
    return lambda: getattr(importlib.import_module(module), function)(job["words"])


def _status(pid: int) -> int | None:
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def _serve() -> Callable[[], None] | None:
    """Until the other side closes; in a child, what is to be done there."""
    reply = os.dup(1)
    os.dup2(2, 1)  # what libraries print is no reply
    _import_everything()
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "poll":
            answer = {"status": _status(request["pid"])}
        else:
            pid = os.fork()
            if pid == 0:
                return _become_child(request, reply)
            answer = {"pid": pid}
        os.write(reply, (json.dumps(answer) + "\n").encode())
    return None


def do_and_end(todo: Callable[[], None]) -> NoReturn:
    """Does it and ends the process. Objects are shared with the server until they are touched; to take them apart would
    take seconds."""
    end_process(_status_of(todo))


def _status_of(todo: Callable[[], None]) -> int:
    try:
        todo()
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())  # torch puts the rank before each line
        return 1
    return 0


if __name__ == "__main__":
    todo = _serve()
    if todo is not None:
        do_and_end(todo)
