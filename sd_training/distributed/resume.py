"""All ranks resume from the same checkpoint: the first one verifies and chooses, the others follow."""

from pathlib import Path

from sd_training.checkpoint.seal import folder_name, newest_verified, step_of
from sd_training.distributed.peers import Peers
from sd_training.errors import CheckpointError


def choose_checkpoint(root: Path, peers: Peers) -> Path:
    """Collective: the newest verified checkpoint below `root`, the same on every process.

    Raises:
        CheckpointError: none of them verifies; with the same words on every process.
    """
    return root / folder_name(peers.on_first(lambda: _choose(root)))


def _choose(root: Path) -> int:
    newest = newest_verified(root)
    if newest is None:
        raise CheckpointError(f"{root}: no checkpoint was ever finished")
    return step_of(newest)
