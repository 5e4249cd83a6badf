"""Fixtures shared by all tests. One OpenMP thread, set before torch starts: two on two busy cores are slow."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import makers

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell that starts the tests in the background has Ctrl-C ignored, and so would every run that a test starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def pipeline_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny diffusers pipeline folder; read-only by convention."""
    return makers.save_tiny_pipeline(tmp_path_factory.mktemp("tiny") / "pipeline")


@pytest.fixture(scope="session")
def shards_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards of 16 captioned JPEGs with metadata; read-only by convention."""
    return makers.caption_shards(tmp_path_factory.mktemp("shards"))


@pytest.fixture(autouse=True)
def environment_of_before() -> Iterator[None]:
    """What a test leaves in the environment would reach every later run: W&B, for one, says there which process serves
    it, and runs of other tests would share that process and its list of runs in progress."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(autouse=True)
def handlers_of_before() -> Iterator[None]:
    """A run that was asked to stop goes on noting signals to its end; the processes of later tests would inherit it."""
    numbers = signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        if handler is not None and signal.getsignal(number) is not handler:
            signal.signal(number, handler)


@pytest.fixture(autouse=True)
def private_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps the shard index of a test inside its own folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
