"""All ranks resume from the same checkpoint: the first one verifies and chooses, the others follow."""

from pathlib import Path

from sd_training.checkpoint.seal import folder_name, newest_verified, step_of
from sd_training.distributed.messages import from_first
from sd_training.errors import CheckpointError


def choose_checkpoint(root: Path) -> Path:
    """Collective: the newest verified checkpoint below `root`, the same on every process.

    Raises:
        CheckpointError: none of them verifies.
    """
    unusable = f"{root}: no checkpoint verifies; the first process says why"
    return root / folder_name(from_first(lambda: _choose(root), lambda _: CheckpointError(unusable)))


def _choose(root: Path) -> int:
    newest = newest_verified(root)
    if newest is None:
        raise CheckpointError(f"{root}: no checkpoint was ever finished")
    return step_of(newest)
