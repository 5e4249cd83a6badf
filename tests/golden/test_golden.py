"""Today's trainer against the golden record (`tests/golden/record.py` says what it holds)."""

from pathlib import Path

import pytest

from tests.golden import record


def test_nothing_differs_from_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for some losses, which `python -m tests.golden.record` compares."""
    monkeypatch.chdir(record.ROOT)
    found = record.all_differences(record.compute(tmp_path, record.SHAPES_THE_BATCH_ONLY))
    assert sorted(found) == sorted(f"losses.json/{name}: only in the record" for name in record.SHAPES_THE_BATCH_ONLY)


def test_a_difference_is_found() -> None:
    losses = record.stored("losses")
    name = next(iter(losses))
    changed = {**losses, name: [losses[name][0] * (1 + 2 * record.LOSS_RTOL), *losses[name][1:]]}
    (line,) = record.differences(losses, changed, rtol=record.LOSS_RTOL)
    assert line.startswith(f"/{name}/0: ")
    assert list(record.differences({"a": [1, 2]}, {"a": [1, 3]})) == ["/a/1: 2 in the record, now 3"]
    assert list(record.differences({"a": 1}, {})) == ["/a: only in the record"]
    assert list(record.differences({"a": 1}, {"a": True})) == ["/a: 1 in the record, now True"]
