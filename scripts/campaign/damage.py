"""Every file of a checkpoint, damaged in every way: found, and the checkpoint before it is used; all of them damaged:
refused, and nothing is started afresh."""

import logging
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from scripts.campaign.fork_server import ForkServer, shared_server
from scripts.campaign.row import Row
from scripts.campaign.tiny_run import TinyRun, make_tiny_parts, run_to_end
from sd_training.checkpoint import seal
from sd_training.errors import CheckpointError

STEPS, SAVE_EVERY = 4, 2
_LIMIT_S = 120
_PROMISE = "found; the checkpoint before it is used, and the run ends as if nothing had been done to it"
_REFUSED = "refused with a sentence that names each of them; nothing starts afresh"


def _flip_bit(path: Path) -> None:
    """In the middle; sizes stay."""
    with path.open("r+b") as stream:
        stream.seek(path.stat().st_size // 2)
        byte = stream.read(1)[0]
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte ^ 1]))


DAMAGES: dict[str, Callable[[Path], None]] = {
    "bit flip": _flip_bit,
    "truncation": lambda path: os.truncate(path, path.stat().st_size - 1),
    "removal": lambda path: path.unlink(),
    "emptying": lambda path: os.truncate(path, 0),
}


def run(folder: Path, is_quick: bool) -> list[Row]:
    """Three rows: damages of one, real resumes after some of them, damages of all."""
    server = shared_server()
    parts = make_tiny_parts(server, folder / "parts")
    whole = TinyRun(parts, folder / "whole", STEPS, SAVE_EVERY, folder / "tmp")
    run_to_end(server, whole)
    longer = replace(whole, home=folder / "longer", steps=STEPS + SAVE_EVERY)
    run_to_end(server, longer)
    newest = whole.checkpoints / seal.folder_name(STEPS)
    cases = [(path.name, damage) for path in sorted(newest.iterdir()) for damage in DAMAGES]
    resumed = cases[:: len(cases) // 2] if is_quick else cases
    return [
        _found(whole, folder / "one", cases),
        _resumed(server, whole, longer.digest(), folder / "resumed", resumed[:2] if is_quick else resumed),
        _refused(server, whole, folder / "all", list(DAMAGES)[:1] if is_quick else list(DAMAGES)),
    ]


def _found(whole: TinyRun, place: Path, cases: list[tuple[str, str]]) -> Row:
    """In this process, as a resume chooses."""
    missed = []
    for name, damage in cases:
        shutil.copytree(whole.checkpoints, place)
        DAMAGES[damage](place / seal.folder_name(STEPS) / name)
        logging.disable(logging.ERROR)  # each of them is told
        try:
            chosen = seal.newest_verified(place)
        finally:
            logging.disable(logging.NOTSET)
        is_set_aside = (place / f"{seal.folder_name(STEPS)}.damaged").is_dir()
        if chosen != place / seal.folder_name(STEPS - SAVE_EVERY) or not is_set_aside:
            missed.append(f"{damage} of {name}: {chosen}")
        shutil.rmtree(place)
    _tell(missed)
    num_files = len({name for name, _ in cases})
    figure = f"{len(cases) - len(missed)} of {len(cases)} found, set aside, and the one before chosen"
    fault = f"each of the {num_files} files of the newest checkpoint × {', '.join(DAMAGES)}"
    return Row(fault, _PROMISE, len(cases), figure, not missed)


def _resumed(server: ForkServer, whole: TinyRun, expected: str, place: Path, cases: list[tuple[str, str]]) -> Row:
    """The whole way, against a run that nothing was done to."""
    wrong = []
    for name, damage in cases:
        run = _copy(whole, place, STEPS + SAVE_EVERY)
        DAMAGES[damage](run.checkpoints / seal.folder_name(STEPS) / name)
        status = run.start(server)[0].wait(_LIMIT_S)
        text = (run.home / "log.txt").read_text()
        has_fallen_back = f"resuming from {run.checkpoints / seal.folder_name(STEPS - SAVE_EVERY)}" in text
        if status != 0 or not has_fallen_back or run.digest() != expected:
            wrong.append(f"{damage} of {name}: status {status}, fell back: {has_fallen_back}")
        shutil.rmtree(place)
    _tell(wrong)
    figure = f"{len(cases) - len(wrong)} of {len(cases)} went on from the one before and ended with the same bits"
    return Row("the same, and the run is started again", _PROMISE, len(cases), figure, not wrong)


def _refused(server: ForkServer, whole: TinyRun, place: Path, damages: list[str]) -> Row:
    """One file of each checkpoint is damaged."""
    wrong = []
    for damage in damages:
        run = _copy(whole, place, STEPS + SAVE_EVERY)
        before = sorted(path.name for path in run.checkpoints.iterdir())
        for checkpoint in run.checkpoints.iterdir():
            DAMAGES[damage](checkpoint / "weights.safetensors")
        status = run.start(server)[0].wait(_LIMIT_S)
        text = (run.home / "log.txt").read_text()
        is_clear = all(part in text for part in (*before, "none of them can be used")) and "Traceback" not in text
        is_untouched = sorted(path.name for path in run.checkpoints.iterdir()) == before and not run.marks()
        try:
            seal.newest_verified(run.checkpoints)
            is_clear = False
        except CheckpointError:
            pass
        if status in (0, None) or not is_clear or not is_untouched:
            wrong.append(f"all, {damage}: status {status}, clear: {is_clear}, untouched: {is_untouched}")
        shutil.rmtree(place)
    _tell(wrong)
    figure = f"{len(damages) - len(wrong)} of {len(damages)} refused"
    return Row("all checkpoints of a run damaged", _REFUSED, len(damages), figure, not wrong)


def _copy(whole: TinyRun, home: Path, steps: int) -> TinyRun:
    shutil.copytree(whole.run_dir, home / "run", symlinks=True)
    return replace(whole, home=home, steps=steps)


def _tell(problems: list[str]) -> None:
    for problem in problems:
        print(f"damage: {problem}", file=sys.stderr)
