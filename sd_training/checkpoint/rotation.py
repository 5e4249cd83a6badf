"""Which checkpoints of a run folder are deleted, and how. Needs no torch."""

import os
from collections.abc import Collection
from pathlib import Path

from sd_training.checkpoint import durable, seal
from sd_training.checkpoint.writer import UNFENCED, Fence

MIN_KEPT = 2
"""`rotate` never leaves fewer verified checkpoints: the newest may turn out damaged [count]."""


def rotate(
    root: Path,
    keep: int,
    trusted: Collection[Path] = (),
    protected: Collection[Path] = (),
    fence: Fence = UNFENCED,
) -> list[Path]:
    """Deletes checkpoints older than the `keep` newest verified ones.

    Args:
        root: the run's folder of checkpoints.
        keep: verified checkpoints to leave [count]; fewer than 2 count as 2. Damaged ones do not count.
        trusted: checkpoints that were verified a moment ago and are not read again.
        protected: older ones that are left as well (`kinds`).
        fence: of this start of the run.

    Returns:
        What was deleted. An older one that is itself damaged is left for a person to look at.
    """
    good, deleted = 0, []
    for folder in reversed(seal.sealed(root)):
        if good < max(keep, MIN_KEPT):
            good += folder in trusted or not seal.verify(folder)
        elif folder not in protected and not seal.verify(folder, contents=False):
            fence.check()
            discard(folder)
            deleted.append(folder)
    return deleted


def discard(folder: Path) -> None:
    """Deletes a checkpoint; of a link, the link alone. It is renamed first, so a kill half way leaves no damaged
    `step=N`."""
    if not os.path.lexists(folder):
        return
    doomed = folder.with_name(f"{folder.name}.deleting")
    durable.remove(doomed)
    os.rename(folder, doomed)
    durable.remove(doomed)
