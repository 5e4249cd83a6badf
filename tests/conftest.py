"""Fixtures shared by all tests. One OpenMP thread, set before torch starts: two on two busy cores are slow."""

import gc
import os
import tempfile

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["WANDB_MODE"] = "disabled"
# Compiled code of another session, another instruction set or a process that was killed while it wrote is never loaded.
os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="inductor-")
if "TORCH_EXTENSIONS_DIR" not in os.environ:
    # DeepSpeed compiles its Adam for CPUs where the cache folder is new, as it is in every test (`private_index`).
    # This one is shared; workers of pytest inherit it. Half of the minute would go into optimization and debug symbols.
    os.environ["TORCH_EXTENSIONS_DIR"] = tempfile.mkdtemp(prefix="extensions-")
    os.environ["CXX"] = os.environ["TORCH_EXTENSIONS_DIR"] + "/g++"
    # And a third of the rest into headers that it does not use: of modules, data loaders and optimizers in C++.
    os.mkdir(headers := os.environ["TORCH_EXTENSIONS_DIR"] + "/torch")
    with open(headers + "/extension.h", "w") as header:
        header.write("#include <torch/types.h>\n#include <torch/csrc/utils/pybind.h>\n")
    with open(os.environ["CXX"], "w", opener=lambda path, flags: os.open(path, flags, 0o755)) as script:
        script.write(f'#!/bin/sh\nexec c++ -I{os.path.dirname(headers)} "$@" -O0 -g0\n')
if os.environ.get("ATEN_CPU_CAPABILITY") in ("default", "avx2"):
    # The tests as on a smaller CPU. torch's attention asks oneDNN whether bfloat16 may be packed for AMX, and its own
    # kernels of this capability then refuse to ("pack_vnni2 is only supported when avx512 is supported").
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")
# A login of whoever runs the tests would send their runs to W&B.
os.environ["NETRC"] = os.environ["WANDB_CONFIG_DIR"] = "/nonexistent"

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from sd_training.signals import FOR_THE_TRAINING_PROCESS
from tests import makers

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell that starts the tests in the background has Ctrl-C ignored, and so would every run that a test starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
gc.disable()  # until everything is imported: see `pytest_collection_finish`
_HANDLERS = {number: signal.getsignal(number) for number in FOR_THE_TRAINING_PROCESS}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that wait or compute for a minute, and would come last, come first: at the end nothing would be left to do
    meanwhile."""
    items.sort(key=lambda item: item.path.name not in ("test_hang_watch.py", "test_execution.py"))


def pytest_collection_finish() -> None:
    """Collections pass over what was imported: looking at it takes half a second, hundreds of times."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def pipeline_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny diffusers pipeline folder; read-only by convention."""
    return makers.save_tiny_pipeline(tmp_path_factory.mktemp("tiny") / "pipeline", unet=makers.SMALLER_UNET)


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
    """A run that was asked to stop, or that a test broke off, goes on noting signals. Processes that a later test forks
    would inherit that, and not end when they are told to. Also those of runs that a fixture of wider scope made."""
    _restore_handlers()
    yield
    _restore_handlers()


def _restore_handlers() -> None:
    for number, handler in _HANDLERS.items():
        if signal.getsignal(number) is not handler:
            signal.signal(number, handler)


@pytest.fixture(autouse=True)
def private_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps the shard index of a test inside its own folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
