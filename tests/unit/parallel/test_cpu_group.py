"""Collectives and errors of the ranks; two real ones are in tests/integration/test_failed_saves.py."""

import errno
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
from torch import distributed

from sd_training.errors import CheckpointError, DamagedCheckpointsError, TakenOverError
from sd_training.parallel.strategies import CpuGroup


class Told(CpuGroup):
    """This process is the second of three; the others say what they are given."""

    def __init__(self, others: list[object]) -> None:
        super().__init__(1, 1)
        self.others = others

    def all_gather(self, value: object) -> list[object]:
        first, last = self.others
        return [first, value, last]


FULL = {"errno": errno.ENOSPC, "text": "full"}
DEFECT = {"kind": "ZeroDivisionError", "text": "a defect"}


def test_one_process_alone() -> None:
    cpu_group = CpuGroup(0, 1)
    assert cpu_group.all_gather({"a": [1, None]}) == [{"a": [1, None]}]
    assert cpu_group.on_rank0(lambda: 3) == 3
    cpu_group.raise_first(None)
    with pytest.raises(ZeroDivisionError):
        cpu_group.on_rank0(lambda: 1 // 0)


@pytest.mark.parametrize(
    ("others", "own", "expected", "text"),
    [
        ([FULL, None], None, OSError, "full"),
        ([None, FULL], OSError(errno.EIO, "mine"), OSError, "mine"),
        ([FULL, DEFECT], None, RuntimeError, "a defect"),
        ([None, DEFECT], OSError(errno.EIO, "mine"), RuntimeError, "a defect"),
        ([FULL, None], TypeError("mine"), TypeError, "mine"),
        ([{"kind": "TakenOverError", "text": "gone"}, None], None, TakenOverError, "gone"),
        ([{"kind": "CheckpointError", "text": "other"}, None], None, CheckpointError, "other"),
        ([{"kind": "DamagedCheckpointsError", "text": "bad"}, None], None, DamagedCheckpointsError, "bad"),
    ],
)
def test_the_same_kind_of_error_everywhere(
    others: list[object], own: Exception | None, expected: type[Exception], text: str
) -> None:
    with pytest.raises(expected, match=text) as error:
        Told(others).raise_first(own)
    if expected is OSError and own is None:
        assert error.value.errno == errno.ENOSPC  # type: ignore[attr-defined]


def test_they_wait_as_long_as_they_are_told() -> None:
    """A process that never comes is missed after this time, not after one of this module's own."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        group = CpuGroup(0, 2, timedelta(seconds=123))._group
        assert group is not None
        assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=123)
    finally:
        distributed.destroy_process_group()


def test_others_do_not_act() -> None:
    act: Callable[[], None] = lambda: pytest.fail("only the first process acts")  # noqa: E731
    assert CpuGroup(1, 1).on_rank0(act) is None
