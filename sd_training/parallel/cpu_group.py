"""What the processes of a run tell each other while they save: over gloo, as JSON, on a group of their own.

No device takes part and nothing is unpickled; a thread that saves in the background may use its group while training
uses the others.
"""

import errno
import json
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed

from sd_training.errors import CheckpointError, DamagedCheckpointsError, DataError, OutageError, TakenOverError

_Result = TypeVar("_Result")
_KINDS = {
    kind.__name__: kind for kind in (CheckpointError, DamagedCheckpointsError, DataError, OutageError, TakenOverError)
}
"""Errors of one process that are the same error on the others."""
_HASTE = timedelta(seconds=30)
"""A process waits so long for one that may be about to die as well; mostly it is not."""
_POLL_S = 0.2


class CpuGroup:
    """All processes of the run.

    Args:
        rank: number of this process.
        count: how many there are; making the group is collective where there are several.
        timeout: how long they wait for each other, such as for one that writes slowly; null: as long as torch likes.
    """

    def __init__(self, rank: int, count: int, timeout: timedelta | None = None) -> None:
        self.rank = rank
        self.count = count
        self._group = distributed.new_group(backend="gloo", timeout=timeout) if count > 1 else None
        self._hasty_group = distributed.new_group(backend="gloo", timeout=_HASTE) if count > 1 else None

    def all_gather(self, value: Any) -> list[Any]:
        """Collective: what every process said, by rank.

        Args:
            value: JSON.
        """
        return self._tell(value, self._group)

    def _tell(self, value: Any, group: distributed.ProcessGroup | None) -> list[Any]:
        if group is None:
            return [value]
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.count)]
        distributed.all_gather(sizes, torch.tensor([text.numel()]), group=group)
        longest = int(torch.cat(sizes).max())
        texts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.count)]
        padded = torch.cat([text, text.new_zeros(longest - text.numel())])
        distributed.all_gather(texts, padded, group=group)
        return [json.loads(bytes(t[: int(size)].tolist())) for t, size in zip(texts, sizes, strict=True)]

    def barrier(self, meanwhile: Callable[[], None]) -> None:
        """Collective: waits for all. Python's handlers of signals run meanwhile, as they do not inside a collective.

        Args:
            meanwhile: called a few times a second until all are here.
        """
        if self._group is None:
            return
        arrival = distributed.all_reduce(torch.zeros(1), group=self._group, async_op=True)
        while not arrival.is_completed():
            meanwhile()
            time.sleep(_POLL_S)
        arrival.wait()

    def agree(self, value: Any) -> bool:
        """Whether all processes come here within half a minute, and say the same. Of use once: a process that waited in
        vain cannot ask again.

        Args:
            value: JSON.
        """
        try:
            return all(said == value for said in self._tell(value, self._hasty_group))
        except RuntimeError:  # it took too long, or the others have ended
            return False

    def raise_first(self, failure: Exception | None) -> None:
        """Collective: all processes fail when one does, with the same kind of error.

        Args:
            failure: what went wrong here.

        Raises:
            OSError: some process could not write.
            UserError: one of `_KINDS`, on some process.
            Exception: this process's own failure of another kind; RuntimeError with its text on the others.
        """
        told = [one for one in self.all_gather(None if failure is None else _described(failure)) if one is not None]
        if not told:
            return
        # One process alone must not go on after a full disk while another one ends with a worse error.
        worst = next((one for one in told if "errno" not in one), told[0])
        is_own = failure is not None and isinstance(failure, OSError) == ("errno" in worst)
        raise failure if failure is not None and is_own else _error(worst)

    def on_rank0(self, act: Callable[[], _Result]) -> _Result:
        """Collective: the first process acts; all get its result, which must be JSON, or its error as above."""
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


def _described(failure: Exception) -> dict[str, Any]:
    if isinstance(failure, OSError):
        return {"errno": failure.errno or errno.EIO, "text": failure.strerror or str(failure)}
    return {"kind": type(failure).__name__, "text": str(failure)}


def _error(described: dict[str, Any]) -> Exception:
    if "errno" in described:
        return OSError(described["errno"], described["text"])
    return _KINDS.get(described["kind"], RuntimeError)(described["text"])
