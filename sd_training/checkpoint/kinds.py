"""Checkpoints that rotation leaves: milestones, and those with the lowest training loss. Needs no torch.

Both are facts in a checkpoint's manifest, so they outlive the run that wrote them and a change of its options.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from sd_training.checkpoint.seal import read_info, sealed
from sd_training.errors import CheckpointError

_Name = TypeVar("_Name")
_IS_MILESTONE, _MEAN_LOSS = "is_milestone", "mean_loss"


def info_of(*, is_milestone: bool, mean_loss: float | None) -> dict[str, Any]:
    """What a manifest says of its checkpoint.

    Args:
        is_milestone: never to be rotated.
        mean_loss: of the training since the save before; null when nothing finite is known.
    """
    return {_IS_MILESTONE: is_milestone, _MEAN_LOSS: mean_loss}


def protected(root: Path, num_best: int) -> list[Path]:
    """Milestones, and the `num_best` checkpoints with the lowest loss.

    Args:
        root: the run's folder of checkpoints.
        num_best: how many, the newest ones included.
    """
    return to_keep({folder: _info(folder) for folder in sealed(root)}, num_best)


def to_keep(infos: Mapping[_Name, Mapping[str, Any]], num_best: int) -> list[_Name]:
    """The same of checkpoints that are known by what their manifests say."""
    losses = {name: info[_MEAN_LOSS] for name, info in infos.items() if isinstance(info.get(_MEAN_LOSS), float)}
    best = sorted(losses, key=lambda name: losses[name])[:num_best]
    return [*best, *(name for name, info in infos.items() if info.get(_IS_MILESTONE) is True)]


def _info(folder: Path) -> dict[str, Any]:
    try:
        return read_info(folder)
    except CheckpointError:
        return {}  # rotation leaves damaged ones anyway
