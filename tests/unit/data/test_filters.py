from pathlib import Path

import pytest

from sd_training.config.filter_grammar import parse_filters
from sd_training.data.filters import evaluate
from sd_training.data.index import load_index
from tests import makers

VALUES = ["5", '"5"', '"abc"', "null", "NaN", "7.5", "true", '"nan"', "[5]", None]


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sample i has `{"v": VALUES[i]}`; the last has no metadata at all."""
    samples = [
        {"__key__": f"{i}", "jpg": b"x", "txt": "x"} | ({} if v is None else {"json": b'{"v": %s}' % v.encode()})
        for i, v in enumerate(VALUES)
    ]
    return makers.write_shard(tmp_path_factory.mktemp("filters") / "a.tar", samples)


@pytest.mark.parametrize(
    ("written", "passing"),
    [
        (">=5", ["5", '"5"', "7.5"]),
        (">5", ["7.5"]),
        ("<5", ["true"]),
        ("<=5", ["5", '"5"', "true"]),
        ("==5", ["5", '"5"']),
        (5, ["5", '"5"']),
        ("!=5", ['"abc"', "7.5", "true", '"nan"']),
        ("abc", ['"abc"']),
        ("!=abc", ["5", '"5"', "7.5", "true", '"nan"']),
        ("=='5'", ["5", '"5"']),
        ("true", ["true"]),
        (">=100", []),
    ],
)
def test_comparisons(shard: Path, written: str | int, passing: list[str]) -> None:
    (comparison,), _ = parse_filters({"v": written})
    index = load_index([shard], None, ["v"])
    mask = evaluate(comparison, index.metadata, len(index))
    assert [value for value, passed in zip(VALUES, mask, strict=True) if passed] == passing


@pytest.mark.parametrize("written", [">=0", "!=0", "abc", "!=abc"])
def test_a_field_nobody_has_drops_everything(shard: Path, written: str) -> None:
    (comparison,), _ = parse_filters({"absent": written})
    index = load_index([shard], None, ["absent"])
    assert not evaluate(comparison, index.metadata, len(index)).any()
