"""Messages between two real processes over gloo, and in one process alone."""

import multiprocessing
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from sd_training.distributed import messages


def _process(rank: int, folder: Path, act: Callable[[int], Any], answers: Any) -> None:
    torch.set_num_threads(1)
    store = distributed.FileStore(str(folder / "store"), 2)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=20))
    try:
        answers.put((rank, act(rank)))
    except Exception as error:
        answers.put((rank, f"{type(error).__name__}: {error}"))
    distributed.destroy_process_group()


def in_two(folder: Path, act: Callable[[int], Any]) -> list[Any]:
    """What `act(rank)` gave in each of two processes; an error as its text."""
    fork = multiprocessing.get_context("fork")
    answers = fork.SimpleQueue()
    processes = [fork.Process(target=_process, args=(rank, folder, act, answers)) for rank in range(2)]
    for process in processes:
        process.start()
    found = dict(answers.get() for _ in processes)
    for process in processes:
        process.join()
    return [found[0], found[1]]


def _refused() -> None:
    raise ValueError("none verifies")


def test_messages_of_two_processes(tmp_path: Path) -> None:
    def act(rank: int) -> list[Any]:
        chosen = messages.from_first(lambda: {"step": 7, "at": "ä" * 1000}, OSError)
        gathered = messages.from_all([rank, "x" * (1 + 1000 * rank), None])
        failures = []
        for attempt in (_refused, lambda: object()):
            try:
                messages.from_first(attempt, lambda text: OSError(f"elsewhere: {text}"))
            except Exception as error:
                failures.append(f"{type(error).__name__}: {error}")
        return [chosen, gathered, failures]

    first, second = in_two(tmp_path, act)
    assert first[:2] == second[:2]
    assert first[0] == {"step": 7, "at": "ä" * 1000}
    assert first[1] == [[0, "x", None], [1, "x" * 1001, None]]
    assert first[2][0] == "ValueError: none verifies" and second[2][0] == "OSError: elsewhere: none verifies"
    assert first[2][1].startswith("TypeError: ") and second[2][1].startswith("OSError: elsewhere: ")


def test_alone_nothing_travels() -> None:
    assert messages.from_all("x") == ["x"]
    assert messages.from_first(lambda: [1, None], OSError) == [1, None]
    with pytest.raises(ValueError, match="none verifies"):
        messages.from_first(_refused, OSError)


def test_a_message_has_a_largest_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "MAX_BYTES", 10)
    assert messages._bytes("x" * 8) == b'"xxxxxxxx"'
    with pytest.raises(ValueError, match="at most 10"):
        messages._bytes("x" * 9)
