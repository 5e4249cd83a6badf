"""All ranks resume from the same checkpoint: the first one verifies and chooses, the others follow."""

from pathlib import Path

import torch
from torch import distributed

from sd_training.checkpoint.seal import folder_name, newest_verified, step_of
from sd_training.errors import CheckpointError

_NONE_USABLE = -1


def choose_checkpoint(root: Path) -> Path:
    """Collective: the newest verified checkpoint below `root`, the same on every process.

    Raises:
        CheckpointError: none of them verifies.
    """
    return root / folder_name(_agree(root))


def _agree(root: Path) -> int:
    """Optimizer steps of the checkpoint that rank 0 chose."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return _choose(root)
    failure: CheckpointError | None = None
    step = _NONE_USABLE
    if distributed.get_rank() == 0:
        try:
            step = _choose(root)
        except CheckpointError as error:
            failure = error
    device = torch.device("cuda", torch.cuda.current_device()) if distributed.get_backend() == "nccl" else "cpu"
    message = torch.tensor([step], dtype=torch.int64, device=device)
    distributed.broadcast(message, src=0)
    if failure is not None:
        raise failure
    if int(message) == _NONE_USABLE:
        raise CheckpointError(f"{root}: no checkpoint verifies; the first process says why")
    return int(message)


def _choose(root: Path) -> int:
    newest = newest_verified(root)
    if newest is None:
        raise CheckpointError(f"{root}: no checkpoint was ever finished")
    return step_of(newest)
