"""Checkpoints that rotation leaves: milestones, and those with the lowest loss. Needs no torch.

Both are facts in a checkpoint's manifest, so they outlive the run that wrote them and a change of its options.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from sd_training.checkpoint.seal import read_info, sealed
from sd_training.errors import CheckpointError

_Name = TypeVar("_Name")
_IS_MILESTONE = "is_milestone"
_STORED_AS = {"training_loss": "mean_loss", "validation_loss": "validation_loss"}
"""`checkpoint.best_by` → name in a manifest."""


def info_of(*, is_milestone: bool, mean_loss: float | None, validation_loss: float | None = None) -> dict[str, Any]:
    """What a manifest says of its checkpoint.

    Args:
        is_milestone: never to be rotated.
        mean_loss: of the training since the save before; null when nothing finite is known.
        validation_loss: after the checkpoint's step; null when it was not measured then, or is not finite.
    """
    return {_IS_MILESTONE: is_milestone, "mean_loss": mean_loss, "validation_loss": validation_loss}


def protected(root: Path, num_best: int, best_by: str = "training_loss") -> list[Path]:
    """Milestones, and the `num_best` checkpoints with the lowest loss.

    Args:
        root: the run's folder of checkpoints.
        num_best: how many, the newest ones included.
        best_by: as `checkpoint.best_by`.
    """
    return to_keep({folder: _info(folder) for folder in sealed(root)}, num_best, best_by)


def to_keep(infos: Mapping[_Name, Mapping[str, Any]], num_best: int, best_by: str = "training_loss") -> list[_Name]:
    """The same of checkpoints that are known by what their manifests say."""
    key = _STORED_AS[best_by]
    losses = {name: info[key] for name, info in infos.items() if isinstance(info.get(key), float)}
    best = sorted(losses, key=lambda name: losses[name])[:num_best]
    return [*best, *(name for name, info in infos.items() if info.get(_IS_MILESTONE) is True)]


def _info(folder: Path) -> dict[str, Any]:
    try:
        return read_info(folder)
    except CheckpointError:
        return {}  # rotation leaves damaged ones anyway
