"""Small JSON messages between the processes of a run.

torch's object collectives and Lightning's `Strategy.broadcast` pickle: whoever reaches the port of a process group
could run code in it. Here only numbers and text travel, as bytes in tensors.
"""

import json
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, distributed

JsonValue: TypeAlias = Any
"""None, bool, int, finite float, str, list or str-keyed dict of these."""

MAX_BYTES = 16 * 2**20
"""Longest message of one process [bytes]; none of the trainer's is near it."""


def from_first(act: Callable[[], JsonValue], elsewhere: Callable[[str], Exception]) -> JsonValue:
    """Collective: the first process acts; every process gets what it returned.

    Args:
        act: called on the first process only.
        elsewhere: makes the error that the other processes raise, from the text of the first one's.

    Raises:
        Exception: whatever `act` raised, on the first process; `elsewhere(text)` on the others.
    """
    if not _are_several():
        return act()
    failure: Exception | None = None
    result: JsonValue = None
    if distributed.get_rank() == 0:
        try:
            result = act()
            _bytes(result)
        except Exception as error:  # the others wait, so what cannot be sent must reach them as an error as well
            result, failure = None, error
    result, text = _broadcast([result, None if failure is None else str(failure)])
    if failure is not None:
        raise failure
    if text is not None:
        raise elsewhere(text)
    return result


def from_all(value: JsonValue) -> list[JsonValue]:
    """Collective: the value of every process, by rank."""
    if not _are_several():
        return [value]
    data = _bytes(value)
    lengths = [torch.zeros(1, dtype=torch.int64, device=_device()) for _ in range(distributed.get_world_size())]
    distributed.all_gather(lengths, torch.tensor([len(data)], dtype=torch.int64, device=_device()))
    longest = max(int(length) for length in lengths)
    parts = [torch.empty(longest, dtype=torch.uint8, device=_device()) for _ in lengths]
    distributed.all_gather(parts, _tensor(data.ljust(longest)))
    return [_value(part[: int(length)]) for part, length in zip(parts, lengths, strict=True)]


def _broadcast(value: JsonValue) -> JsonValue:
    """The first process's value."""
    is_first = distributed.get_rank() == 0
    data = _bytes(value) if is_first else b""
    length = torch.tensor([len(data)], dtype=torch.int64, device=_device())
    distributed.broadcast(length, src=0)
    message = _tensor(data) if is_first else torch.empty(int(length), dtype=torch.uint8, device=_device())
    distributed.broadcast(message, src=0)
    return _value(message)


def _are_several() -> bool:
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def _device() -> torch.device:
    is_nccl = distributed.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if is_nccl else torch.device("cpu")


def _bytes(value: JsonValue) -> bytes:
    data = json.dumps(value, allow_nan=False).encode()
    if len(data) > MAX_BYTES:
        raise ValueError(f"a message of {len(data):,} bytes between processes; at most {MAX_BYTES:,} are meant")
    return data


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).to(_device())


def _value(message: Tensor) -> JsonValue:
    return json.loads(message.cpu().numpy().tobytes())
