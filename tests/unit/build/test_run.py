"""How a run ends that cannot begin. Whole runs are in tests/integration."""

import pytest

from sd_training.build.start import _unreadable
from sd_training.checkpoint.mirror import MirrorError
from sd_training.data.retries import StatusError
from sd_training.exit_status import MISTAKE, STOPPED


@pytest.mark.parametrize(
    ("cause", "status"),
    [
        (StatusError(503, "Busy"), STOPPED),
        (ConnectionRefusedError("refused"), STOPPED),
        (StatusError(403, "Forbidden"), MISTAKE),
        (NotADirectoryError("no folder"), MISTAKE),
    ],
    ids=repr,
)
def test_a_mirror_that_is_away_asks_for_another_start(cause: Exception, status: int) -> None:
    error = MirrorError("checkpoint.mirror: it cannot be asked")
    error.__cause__ = cause
    assert _unreadable(error).exit_status == status
