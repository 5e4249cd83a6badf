"""Runs a command in a forked process, or catches the user error that it ends with."""

import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

from sd_training.errors import UserError
from tests.faults.fork_server import shared_server
from tests.faults.tiny_run import RUN_HERE

ROOT = Path(__file__).resolve().parents[2]


def forked(*command: str | Path, cwd: Path) -> "subprocess.CompletedProcess[str]":
    """`python command…` by the fork server, which saves the five seconds of imports."""
    with tempfile.TemporaryDirectory() as folder:
        out, errors = Path(folder) / "out", Path(folder) / "errors"
        words = [str(cwd), str(errors), *map(str, command)]
        status = shared_server().start(RUN_HERE, words, out, os.environ).wait(900)
        assert status is not None, errors.read_text()
        return subprocess.CompletedProcess(words, status, out.read_text(), errors.read_text())


def fails(main: Any, *argv: str | Path) -> str:
    """The sentence of the user error that a command ends with."""
    with pytest.raises(UserError) as caught:
        main([str(word) for word in argv])
    return str(caught.value)
