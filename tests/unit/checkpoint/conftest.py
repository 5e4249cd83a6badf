from pathlib import Path

import pytest


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Folder of checkpoints of a run that has not begun."""
    return tmp_path / "run" / "checkpoints"
