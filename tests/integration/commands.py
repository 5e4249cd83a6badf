"""Runs a command in a process of its own, or catches the user error that it ends with."""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from sd_training.errors import UserError

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str | Path, cwd: Path, env: dict[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **(env or {})}
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


def fails(main: Any, *argv: str | Path) -> str:
    """The sentence of the user error that a command ends with."""
    with pytest.raises(UserError) as caught:
        main([str(word) for word in argv])
    return str(caught.value)
