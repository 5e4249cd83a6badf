"""Which checkpoints of a run folder are deleted, and how. Needs no torch.

The newest stay, and those that their manifest marks: milestones, and those with the lowest loss. As both are in
the manifest, they outlive the run that wrote them and a change of its options.
"""

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from sd_training.checkpoint.atomic_io import remove_durably
from sd_training.checkpoint.folder import read_info, sealed_checkpoints, verify_checkpoint
from sd_training.checkpoint.run_lock import NO_LOCK, RunLock
from sd_training.errors import CheckpointError

MIN_KEPT = 2
"""`rotate` never leaves fewer verified checkpoints: the newest may turn out damaged [count]."""
_Name = TypeVar("_Name")
_STORED_AS = {"training_loss": "mean_loss", "validation_loss": "validation_loss"}
"""`checkpoint.best_by` → name in a manifest."""


def retention_info(
    *, is_milestone: bool, mean_loss: float | None, validation_loss: float | None = None
) -> dict[str, Any]:
    """What a manifest records for the functions below.

    Args:
        is_milestone: never to be deleted.
        mean_loss: of the training since the save before; None when nothing finite is known.
        validation_loss: after the checkpoint's step; None when it was not measured then, or is not finite.
    """
    return {"is_milestone": is_milestone, "mean_loss": mean_loss, "validation_loss": validation_loss}


def protected_checkpoints(root: Path, num_best: int, best_by: str = "training_loss") -> list[Path]:
    """Milestones, and the `num_best` checkpoints with the lowest loss.

    Args:
        root: the run's folder of checkpoints.
        num_best: how many, the newest ones included.
        best_by: as `checkpoint.best_by`.
    """
    infos: dict[Path, dict[str, Any]] = {}
    for folder in sealed_checkpoints(root):
        try:
            infos[folder] = read_info(folder)
        except CheckpointError:
            continue  # rotation leaves damaged ones anyway
    return to_keep(infos, num_best, best_by)


def to_keep(infos: Mapping[_Name, Mapping[str, Any]], num_best: int, best_by: str = "training_loss") -> list[_Name]:
    """The same of checkpoints that are known by their manifests' `info`."""
    key = _STORED_AS[best_by]
    losses = {name: info[key] for name, info in infos.items() if isinstance(info.get(key), float)}
    best = sorted(losses, key=lambda name: losses[name])[:num_best]
    return [*best, *(name for name, info in infos.items() if info.get("is_milestone") is True)]


def rotate(
    root: Path,
    keep: int,
    trusted: Collection[Path] = (),
    protected: Collection[Path] = (),
    run_lock: RunLock = NO_LOCK,
) -> list[Path]:
    """Deletes checkpoints older than the `keep` newest verified ones.

    Args:
        root: the run's folder of checkpoints.
        keep: verified checkpoints to leave [count]; fewer than 2 count as 2. Damaged ones do not count.
        trusted: checkpoints that were verified a moment ago and are not read again.
        protected: older ones that are left as well.
        run_lock: of this start of the run.

    Returns:
        What was deleted. An older one that is itself damaged is left for a person to look at.
    """
    good, deleted = 0, []
    for folder in reversed(sealed_checkpoints(root)):
        if good < max(keep, MIN_KEPT):
            good += folder in trusted or not verify_checkpoint(folder)
        elif folder not in protected and not verify_checkpoint(folder, contents=False):
            run_lock.check()
            discard_checkpoint(folder)
            deleted.append(folder)
    return deleted


def discard_checkpoint(folder: Path) -> None:
    """Deletes a checkpoint; of a link, the link alone. It is renamed first, so a kill half way leaves no damaged
    `step=N`."""
    if not os.path.lexists(folder):
        return
    doomed = folder.with_name(f"{folder.name}.deleting")
    remove_durably(doomed)
    os.rename(folder, doomed)
    remove_durably(doomed)
