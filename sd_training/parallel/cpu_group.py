"""JSON collectives among the ranks over gloo, on a group of its own, and errors that all ranks raise alike.

No device takes part and nothing is unpickled. A thread that saves in the background may use its group while training
uses the others.
"""

import errno
import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed

from sd_training.errors import CheckpointError, DamagedCheckpointsError, DataError, OutageError, TakenOverError

_Result = TypeVar("_Result")
_SHARED_ERRORS = {
    kind.__name__: kind for kind in (CheckpointError, DamagedCheckpointsError, DataError, OutageError, TakenOverError)
}
"""Errors of one rank that are raised as the same class on the others."""
AGREE_TIMEOUT = timedelta(seconds=30)
"""How long `agree` waits for a rank that may be about to fail as well. A rank that has ended closes its connections,
which ends the wait at once; one that waits in a collective looks the same as one that is about to fail."""


class CpuGroup:
    """All ranks of the run.

    Args:
        rank: of this process.
        world_size: number of ranks; making the group is collective where there are several.
        timeout: how long ranks wait for each other, such as for one that writes slowly; None: torch's default.
    """

    def __init__(self, rank: int, world_size: int, timeout: timedelta | None = None) -> None:
        self.rank = rank
        self.world_size = world_size
        self._group = distributed.new_group(backend="gloo", timeout=timeout) if world_size > 1 else None
        self._agree_group = distributed.new_group(backend="gloo", timeout=AGREE_TIMEOUT) if world_size > 1 else None

    def all_gather(self, value: Any) -> list[Any]:
        """Collective: the JSON value of every rank, by rank."""
        return self._all_gather(value, self._group)

    def _all_gather(self, value: Any, group: distributed.ProcessGroup | None) -> list[Any]:
        if group is None:
            return [value]
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        distributed.all_gather(sizes, torch.tensor([text.numel()]), group=group)
        longest = int(torch.cat(sizes).max())
        texts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.world_size)]
        padded = torch.cat([text, text.new_zeros(longest - text.numel())])
        distributed.all_gather(texts, padded, group=group)
        return [json.loads(bytes(t[: int(size)].tolist())) for t, size in zip(texts, sizes, strict=True)]

    def agree(self, value: Any) -> bool:
        """Whether all ranks call this within `AGREE_TIMEOUT` with the same JSON value. After a timeout it cannot be
        used again."""
        try:
            return all(other == value for other in self._all_gather(value, self._agree_group))
        except RuntimeError:  # the timeout, or a rank has ended
            return False

    def raise_first(self, failure: Exception | None) -> None:
        """Collective: all ranks fail when one does, with the same class of error.

        Args:
            failure: of this rank.

        Raises:
            OSError: some rank could not write.
            UserError: one of `_SHARED_ERRORS`, on some rank.
            Exception: this rank's own failure of another class; RuntimeError with its text on the others.
        """
        own: dict[str, Any] | None = None
        if isinstance(failure, OSError):
            own = {"errno": failure.errno or errno.EIO, "text": failure.strerror or str(failure)}
        elif failure is not None:
            own = {"kind": type(failure).__name__, "text": str(failure)}
        found = [one for one in self.all_gather(own) if one is not None]
        if not found:
            return
        # A rank must not continue after a full disk while another one ends with a worse error.
        worst = next((one for one in found if "errno" not in one), found[0])
        if failure is not None and isinstance(failure, OSError) == ("errno" in worst):
            raise failure
        if "errno" in worst:
            raise OSError(worst["errno"], worst["text"])
        raise _SHARED_ERRORS.get(worst["kind"], RuntimeError)(worst["text"])

    def on_rank0(self, act: Callable[[], _Result]) -> _Result:
        """Collective: rank 0 acts; all ranks get its result, which must be JSON, or its error as in `raise_first`."""
        result: Any = None
        failure: Exception | None = None
        if self.rank == 0:
            try:
                result = act()
            except Exception as error:
                failure = error
        self.raise_first(failure)
        answer: _Result = self.all_gather(result)[0]
        return answer
