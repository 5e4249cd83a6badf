"""Disks that fill up under a run, files that may not grow, folders that become read-only: and then all is well again,
or it is not."""

import errno
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sd_training.checkpoint.folder import newest_verified, sealed_checkpoints, verify_checkpoint
from sd_training.errors import SaveError
from tests.faults.fork_server import Child, ForkServer, shared_server
from tests.faults.row import Row
from tests.faults.tiny_run import TinyRun, make_tiny_parts, run_to_end, tail

STEPS, SAVE_EVERY = 12, 2
_BEGINS, _ENDS_AT = SAVE_EVERY, 2 * SAVE_EVERY + 1
"""Steps before which a run waits for its fault, after its first save, and for the end of it, after the second one."""
_LIMIT_S = 300
_TMPFS_MIB = 48
_MAX_FILE_BYTES = 100_000
"""Less than the weights, more than a log."""
_GOES_ON = "older saves intact, the temporary removed, an alarm; the run goes on and saves when it can again"
_ENDS = "the run ends with status 74 and says why; older saves intact"


@dataclass(frozen=True)
class Fault:
    """One way to keep a run from writing."""

    name: str
    errors: tuple[int, ...]
    """What the system says then."""
    prepare: Callable[[TinyRun, ExitStack], None]
    """Before the run starts."""
    begin: Callable[[TinyRun, Child, ExitStack], None]
    """While it runs; leaving the stack ends the fault."""


def run(folder: Path, is_quick: bool) -> list[Row]:
    """A row per fault, and one for a fault that does not end."""
    server = shared_server()
    parts = make_tiny_parts(server, folder / "parts")
    whole = TinyRun(parts, folder / "whole", STEPS, SAVE_EVERY, folder / "tmp")
    run_to_end(server, whole)
    trials, rows = 1 if is_quick else 10, []
    for number, fault in enumerate(FAULTS):
        problems: list[str] = []
        try:
            for trial in range(trials):
                home = folder / f"{number}-{trial}"
                tiny = replace(whole, home=home, temporary=folder / f"tmp-{number}-{trial}", holds=(_BEGINS, _ENDS_AT))
                problems += _survives(server, tiny, fault, whole.digest())
        except PermissionError as error:
            rows.append(Row(fault.name, _GOES_ON, 0, f"not done: {error}", True))
            continue
        figure = f"{trials - len(problems)} of {trials} went on, saved again and ended with the same bits"
        rows.append(_row(fault.name, _GOES_ON, trials, figure, problems))
    problems = [p for trial in range(trials) for p in _never_ends(server, parts, folder / f"ends-{trial}")]
    figure = f"{trials - len(problems)} of {trials}"
    return [*rows, _row("a fault that does not end", _ENDS, trials, figure, problems)]


def _row(fault: str, promise: str, trials: int, figure: str, problems: list[str]) -> Row:
    for problem in problems:
        print(f"disk: {fault}: {problem}", file=sys.stderr)
    return Row(fault, promise, trials, figure, not problems)


def _survives(server: ForkServer, tiny: TinyRun, fault: Fault, expected: str) -> list[str]:
    """At most one problem."""
    with ExitStack() as always:
        tiny.run_dir.mkdir(parents=True)
        fault.prepare(tiny, always)
        (child,) = tiny.start(server, more=["checkpoint.max_failed_saves=1000"])
        _wait(child, (tiny.run_dir / "exported_step").exists)
        with ExitStack() as while_it_lasts:
            fault.begin(tiny, child, while_it_lasts)
            tiny.let_go(_BEGINS)
            _wait(child, lambda: "save of step" in (tiny.home / "log.txt").read_text())
            is_hurt = _hurt(tiny)
        tiny.let_go(_ENDS_AT)
        status = child.wait(_LIMIT_S)
        incidents = _incidents(tiny)
        told = [i for i in incidents if any(os.strerror(number) in i["cause"] for number in fault.errors)]
        if status != 0 or not incidents or told != incidents or is_hurt:
            causes = [incident["cause"] for incident in incidents]
            return [f"status {status}, {is_hurt}, causes {causes}\n{tail(tiny.home / 'log.txt')}"]
        if tiny.digest() != expected or list(tiny.run_dir.rglob("*.partial*")):
            return ["other bits at the end, or something is left behind"]
    tiny.remove()
    return []


def _hurt(tiny: TinyRun) -> list[str]:
    """What is wrong while nothing can be written."""
    found = [problem for folder in sealed_checkpoints(tiny.checkpoints) for problem in verify_checkpoint(folder)]
    exported = tiny.run_dir / "current_pipeline" / "model_index.json"
    return found + ([] if exported.is_file() else ["no pipeline"])


def _never_ends(server: ForkServer, parts: Path, home: Path) -> list[str]:
    tiny = TinyRun(parts, home, STEPS, SAVE_EVERY, home / "tmp", holds=(_BEGINS,))
    (child,) = tiny.start(server, more=["checkpoint.max_failed_saves=2"])
    _wait(child, (tiny.run_dir / "exported_step").exists)
    _limit(child.pid, _MAX_FILE_BYTES)
    tiny.let_go(_BEGINS)
    status = child.wait(_LIMIT_S)
    text, newest = (home / "log.txt").read_text(), newest_verified(tiny.checkpoints)
    is_clear = "error: 2 saves in a row failed (checkpoint.max_failed_saves)" in text and "Traceback" not in text
    if status != SaveError.exit_status or not is_clear or newest is None:
        return [f"status {status}, newest {newest}\n{tail(home / 'log.txt')}"]
    shutil.rmtree(home)
    return []


def _incidents(tiny: TinyRun) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in (tiny.run_dir / "incidents").glob("step=*.save.json")]


def _wait(child: Child, until: Callable[[], bool]) -> None:
    """Until something is seen, or the run has ended."""
    end_s = time.monotonic() + _LIMIT_S
    while not until() and child.poll() is None and time.monotonic() < end_s:
        time.sleep(0.02)


def _limit(pid: int, size: int) -> None:
    """Of the files that a process writes [bytes]."""
    with suppress(ProcessLookupError):
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def _nothing(*_: Any) -> None:
    """To prepare."""


def _mount(*words: str) -> None:
    done = subprocess.run(["mount", *words], capture_output=True, text=True)
    if done.returncode:
        raise PermissionError(f"mount: {done.stderr.strip()}")


def _small_disk(tiny: TinyRun, stack: ExitStack) -> None:
    _mount("-t", "tmpfs", "-o", f"size={_TMPFS_MIB}m", "tmpfs", str(tiny.run_dir))
    stack.callback(subprocess.run, ["umount", "-l", str(tiny.run_dir)], check=True)


def _fill(tiny: TinyRun, child: Child, stack: ExitStack) -> None:
    """All but a little, so that a save begins and does not end where the look at the free space lets it."""
    ballast = tiny.run_dir / "ballast"
    free = shutil.disk_usage(tiny.run_dir).free
    with ballast.open("wb") as stream, suppress(OSError):
        os.posix_fallocate(stream.fileno(), 0, max(1, free - 200_000))
    stack.callback(ballast.unlink)


def _limit_files(tiny: TinyRun, child: Child, stack: ExitStack) -> None:
    _limit(child.pid, _MAX_FILE_BYTES)
    stack.callback(_limit, child.pid, resource.RLIM_INFINITY)


def _read_only(tiny: TinyRun, child: Child, stack: ExitStack) -> None:
    """Modes do not stop root; a mount does."""
    folder = str(tiny.checkpoints)
    if os.geteuid():
        tiny.checkpoints.chmod(0o555)
        stack.callback(tiny.checkpoints.chmod, 0o755)
        return
    _mount("--bind", folder, folder)
    stack.callback(subprocess.run, ["umount", "-l", folder], check=True)
    _mount("-o", "remount,bind,ro", folder)


FAULTS = (
    Fault(f"a disk of {_TMPFS_MIB} MiB becomes full", (errno.ENOSPC,), _small_disk, _fill),
    Fault("files may not grow beyond 100 kB (RLIMIT_FSIZE)", (errno.EFBIG,), _nothing, _limit_files),
    Fault("the folder of checkpoints becomes read-only", (errno.EROFS, errno.EACCES), _nothing, _read_only),
)
