"""How a run ends that cannot begin. Whole runs are in tests/integration."""

import pytest

from sd_training.build.start import _unreadable
from sd_training.checkpoint.mirror import MirrorError
from sd_training.exit_status import MISTAKE, STOPPED
from sd_training.object_store import is_outage


@pytest.mark.parametrize(
    ("cause", "status"),
    [
        ("Generic S3 error: after 5 retries - Server returned non-2xx status code: 503 Slow Down", STOPPED),
        ("Generic S3 error: after 5 retries - HTTP error: error sending request", STOPPED),
        ("Generic HTTP error: HTTP error: error sending request: invalid peer certificate", MISTAKE),
        ("Server returned non-2xx status code: 403 Forbidden", MISTAKE),
        ("Not a directory (os error 20)", MISTAKE),
    ],
)
def test_a_mirror_that_is_away_asks_for_another_start(cause: str, status: int) -> None:
    error = MirrorError(f"checkpoint.mirror: {cause}", is_outage(OSError(cause)))
    assert _unreadable(error).exit_status == status
