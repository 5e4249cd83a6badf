"""All ranks resume from the same checkpoint: the first one verifies and chooses, the others follow."""

from pathlib import Path
from typing import Any

import torch
from torch import distributed

from sd_training.checkpoint.lightning_io import SealedCheckpointIO
from sd_training.checkpoint.seal import folder_name, newest_verified, step_of
from sd_training.errors import CheckpointError
from sd_training.rank_log import get_logger

log = get_logger(__name__)

_NONE_USABLE = -1


class ResumeFromNewest(SealedCheckpointIO):
    """Loading the folder of checkpoints loads the newest that verifies."""

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """The newest verified checkpoint below `path`, the same on every rank.

        Raises:
            CheckpointError: none of them verifies.
        """
        chosen = Path(path) / folder_name(_agree(Path(path)))
        log.info(f"resuming from {chosen}")
        return super().load_checkpoint(chosen, map_location, weights_only, **kwargs)


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
