"""SIGKILL at random moments of saving and rotating: never without a good checkpoint, never a wrong one."""

import itertools
import random
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from sd_training.checkpoint.folder import (
    newest_verified,
    remove_leftovers,
    rotate,
    sealed_checkpoints,
    step_of,
    verify_checkpoint,
)
from sd_training.checkpoint.save import open_checkpoint, write_state, write_tensors
from tests.checkpoints import write_sealed
from tests.unit.checkpoint.exact import assert_same
from tests.unit.kill import killed_after

KILLS = 15


def tensors_of(step: int) -> dict[str, torch.Tensor]:
    """What the checkpoint of a step must hold; large enough for kills to fall into writes."""
    weights = torch.arange(100_000, dtype=torch.float32) + step
    return {"w": weights, "v": -weights}


def save(root: Path, step: int) -> None:
    def write(folder: Path) -> None:
        for part, tensor in tensors_of(step).items():
            write_tensors(folder, part, {"all": tensor}, 0, 1)
        write_state(folder, {"global_step": step})

    write_sealed(root, step, write, {})


def save_for_ever(root: Path, first: int, done: Callable[[int], None]) -> None:
    for step in itertools.count(first):
        save(root, step)
        done(step)
        rotate(root, 2, newest=root / f"step={step}")


def seconds_of_a_save(root: Path) -> float:
    """How long a save takes here and now, so that kills fall into the first few on any machine."""
    start = time.perf_counter()
    for step in (1, 2, 3):
        save(root, step)
    return (time.perf_counter() - start) / 3


def test_every_kill_leaves_a_good_newest_checkpoint(tmp_path: Path) -> None:
    chance, pace = random.Random(0), seconds_of_a_save(tmp_path / "pace")
    root = tmp_path / "checkpoints"
    root.mkdir()
    acknowledged, interrupted = 0, 0
    for kill in itertools.count(1):
        steps = killed_after(chance.uniform(0, 4 * pace), partial(save_for_ever, root, acknowledged + 1))
        acknowledged = max([acknowledged, *steps])
        pace *= 1 if steps else 1.1  # a child saves more slowly than its parent did, or the machine became busy
        assert kill < 6 * KILLS, f"{acknowledged} saves, {interrupted} of them interrupted"
        interrupted += bool(remove_leftovers(root))
        newest = newest_verified(root)
        if newest is None:
            assert acknowledged == 0
            continue
        assert step_of(newest) in (acknowledged, acknowledged + 1)  # sealed, but killed before it could say so
        acknowledged = step_of(newest)
        stored = open_checkpoint(newest)
        assert stored.state == {"global_step": acknowledged}
        assert_same({part: stored.parts[part]["all"] for part in ("w", "v")}, tensors_of(acknowledged))
        good = [folder for folder in sealed_checkpoints(root) if not verify_checkpoint(folder)]
        assert len(good) >= min(2, acknowledged)
        assert {path.name for path in root.iterdir()} == {path.name for path in good}
        if kill >= KILLS and acknowledged >= 5 and interrupted >= 3:  # kills did fall into saves, and saves went on
            return
