"""Every file of a checkpoint, of one process or of two, damaged in every way: found, and the checkpoint before it is
used; all of them damaged: refused, and nothing is started afresh."""

import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from scripts.campaign.fork_server import ForkServer, shared_server
from scripts.campaign.row import Row
from scripts.campaign.tiny_run import TinyRun, make_tiny_parts, run_to_end, stop_all, tail
from sd_training.checkpoint import seal
from sd_training.errors import CheckpointError

STEPS, SAVE_EVERY = 4, 2
ENGINES = ("ddp", "fsdp", "deepspeed_3")
"""Of the checkpoints that two processes write, each its own files."""
RESUMED_ONE_OF = 5
"""Of so many cases one is resumed from. Not a multiple of the kinds of damage, so that each has its turn."""
_LIMIT_S = 300
"""Python compiles DeepSpeed when it is imported for the first time."""
_PROMISE = "found; the checkpoint before it is used, and the run ends as if nothing had been done to it"
_REFUSED = "refused with a sentence that names each of them; nothing starts afresh"
Case = tuple[str, str]
"""Name of a file of the newest checkpoint, and what is done to it."""


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


@dataclass(frozen=True)
class Sound:
    """A run that nothing was done to: as it is when its copies are damaged, and as they have to end."""

    whole: TinyRun
    longer: TinyRun
    ranks: int = 1

    @classmethod
    def make(cls, server: ForkServer, parts: Path, folder: Path, ranks: int = 1, more: tuple[str, ...] = ()) -> "Sound":
        """Trains both."""
        whole = TinyRun(parts, folder / "whole", STEPS, SAVE_EVERY, folder.parent / "tmp", more)
        longer = replace(whole, home=folder / "longer", steps=STEPS + SAVE_EVERY)
        for one in (whole, longer):
            run_to_end(server, one, ranks, _LIMIT_S)
        return cls(whole, longer, ranks)

    def cases(self) -> list[Case]:
        """All that can be done to one file."""
        newest = self.whole.checkpoints / seal.folder_name(STEPS)
        return [(path.name, damage) for path in sorted(newest.iterdir()) for damage in DAMAGES]


def run(folder: Path, is_quick: bool) -> list[Row]:
    """Five rows: damages of one checkpoint and real resumes after some of them, of one process and of two; damages of
    all."""
    server = shared_server()
    parts = make_tiny_parts(server, folder / "parts")
    alone = Sound.make(server, parts, folder / "alone")
    cases = alone.cases()
    resumed = cases[:: len(cases) // 2][:2] if is_quick else cases
    return [
        _found_row([alone], folder / "one", "each of the {} files of the newest checkpoint"),
        _resumed_row(server, [(alone, resumed)], folder / "resumed", "the same, and the run is started again"),
        *_rows_of_ranks(server, parts, folder, ENGINES[:1] if is_quick else ENGINES, is_quick),
        _refused(server, alone.whole, folder / "all", list(DAMAGES)[:1] if is_quick else list(DAMAGES)),
    ]


def _rows_of_ranks(
    server: ForkServer, parts: Path, folder: Path, engines: Sequence[str], is_quick: bool
) -> Iterator[Row]:
    """Of two processes; the same with each engine."""
    sounds = [Sound.make(server, parts, folder / name, 2, (f"distributed.strategy={name}",)) for name in engines]
    names = f"two processes ({', '.join(engines)})"
    yield _found_row(sounds, folder / "one", f"each of the {{}} files of the newest checkpoint of {names}")
    each = [(sound, sound.cases()[-1:] if is_quick else sound.cases()[::RESUMED_ONE_OF]) for sound in sounds]
    yield _resumed_row(server, each, folder / "resumed", f"some of these, and {names} are started again")


def _found_row(sounds: Sequence[Sound], place: Path, what: str) -> Row:
    missed = [problem for sound in sounds for problem in not_found(sound, place)]
    _tell(missed)
    trials = sum(len(sound.cases()) for sound in sounds)
    num_files = trials // len(DAMAGES)
    figure = f"{trials - len(missed)} of {trials} found, set aside, and the one before chosen"
    return Row(f"{what.format(num_files)} × {', '.join(DAMAGES)}", _PROMISE, trials, figure, not missed)


def _resumed_row(server: ForkServer, each: Sequence[tuple[Sound, Sequence[Case]]], place: Path, fault: str) -> Row:
    wrong = [problem for sound, cases in each for case in cases for problem in not_gone_on(server, sound, place, case)]
    _tell(wrong)
    trials = sum(len(cases) for _, cases in each)
    figure = f"{trials - len(wrong)} of {trials} went on from the one before and ended with the same bits and losses"
    return Row(fault, _PROMISE, trials, figure, not wrong)


def not_found(sound: Sound, place: Path) -> Iterator[str]:
    """Cases of which a resume would not know; in this process, as a resume chooses."""
    newest = seal.folder_name(STEPS)
    for name, damage in sound.cases():
        shutil.copytree(sound.whole.checkpoints, place)
        DAMAGES[damage](place / newest / name)
        logging.disable(logging.ERROR)  # each of them is told
        try:
            chosen = seal.newest_verified(place)
        finally:
            logging.disable(logging.NOTSET)
        is_set_aside = (place / f"{newest}.damaged").is_dir() and not (place / newest).exists()
        if chosen != place / seal.folder_name(STEPS - SAVE_EVERY) or not is_set_aside:
            yield f"{damage} of {name}, {sound.whole.more}: {chosen}"
        shutil.rmtree(place)


def not_gone_on(server: ForkServer, sound: Sound, place: Path, case: Case) -> Iterator[str]:
    """What is wrong with a real resume after that, against the run that nothing was done to."""
    name, damage = case
    run = _copy(sound.whole, place, sound.longer.steps)
    DAMAGES[damage](run.checkpoints / seal.folder_name(STEPS) / name)
    children = run.start(server, sound.ranks)
    statuses = [child.wait(_LIMIT_S) for child in children]
    stop_all(children, 1)
    text = (run.home / "log.txt").read_text()
    has_fallen_back = f"resuming after optimizer step {STEPS - SAVE_EVERY:,} of " in text
    is_whole = statuses == [0] * sound.ranks
    is_same = is_whole and run.digest() == sound.longer.digest() and run.losses() == sound.longer.losses()
    if not has_fallen_back or not is_same:
        what = f"{damage} of {name}, {run.more}: statuses {statuses}"
        yield f"{what}, fell back: {has_fallen_back}, the same: {is_same}\n{tail(run.home / 'log.txt')}"
    shutil.rmtree(place)


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
