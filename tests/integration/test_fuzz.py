"""A few inputs of the fuzz per surface; the campaign sends thousands."""

from pathlib import Path
from typing import Any

import pytest

from tests.faults import fuzz


def test_every_surface_ends_in_a_result_or_in_our_error(tmp_path: Path) -> None:
    rows = fuzz.fuzz(tmp_path, 15 * len(fuzz.TARGETS), seed=3)
    assert [row.trials for row in rows] == [15] * len(fuzz.TARGETS)
    assert all(row.is_kept for row in rows), rows


@pytest.mark.parametrize("kind", ["traceback", "canary", "memory", "death"])
def test_what_goes_wrong_is_seen(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(data: bytes, folder: Path, inputs: Any) -> bool:
        match kind:
            case "traceback":
                raise KeyError("x")
            case "canary":
                (tmp_path / "canary").mkdir(exist_ok=True)
            case "memory":
                assert bytearray(b"x") * (700 << 20)
            case _:
                fuzz.os._exit(3)
        return True

    monkeypatch.setitem(fuzz.TARGETS, "image", broken)
    inputs = fuzz.Inputs(1, tmp_path / "canary")
    row = fuzz.run_surface("image", 2, tmp_path / "fuzz", inputs, tmp_path / "canary")
    assert not row.is_kept, row


def test_a_seed_makes_the_same_inputs(tmp_path: Path) -> None:
    first, second = (fuzz.Inputs(5, tmp_path / "canary") for _ in range(2))
    for surface, make in first.makers().items():
        made = [make(first.chance(surface, i)) for i in range(5)]
        assert made == [second.makers()[surface](second.chance(surface, i)) for i in range(5)]
        assert len(set(made)) > 1
