import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from sd_training.config.filter_grammar import parse_filters
from sd_training.data.filters import evaluate
from tests import makers
from tests.unit.data.making import tar_index

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
        ("in [5, abc]", ["5", '"5"', '"abc"']),
        ("not in [5, abc]", ["7.5", "true", '"nan"']),
        ("null", ["null", "NaN", "[5]", None]),
        ("not null", ["5", '"5"', '"abc"', "7.5", "true", '"nan"']),
        ("not >=5", ["true"]),
        ("not (>=5 or null)", ["true"]),
        ("null or 6..", ["null", "NaN", "7.5", "[5]", None]),
        ("5..7", ["5", '"5"']),
    ],
)
def test_comparisons(shard: Path, written: str | int, passing: list[str]) -> None:
    (comparison,), _ = parse_filters({"v": written})
    index = tar_index([shard], ["v"])
    mask = evaluate(comparison, index.columns, len(index))
    assert [value for value, passed in zip(VALUES, mask, strict=True) if passed] == passing


@pytest.mark.parametrize("written", [">=0", "!=0", "abc", "!=abc"])
def test_a_field_nobody_has_drops_everything(shard: Path, written: str) -> None:
    (comparison,), _ = parse_filters({"absent": written})
    index = tar_index([shard], ["absent"])
    assert not evaluate(comparison, index.columns, len(index)).any()


def test_fields_of_the_index_itself(tmp_path: Path) -> None:
    samples = [*makers.caption_samples(2, width=50, height=20), {"__key__": "x", "jpg": b"no image", "txt": b"a"}]
    samples[1]["json"] = b'{"height": 7}'
    index = tar_index([makers.write_shard(tmp_path / "a.tar", samples)], ["width", "height"])
    for text, expected in {
        "width == 50": [True, True, False],
        "aspect_ratio > 2": [True, True, False],
        "caption_length > 5": [True, True, False],
        "height == 20": [False, False, False],  # some sample has a metadata field of that name
        "height == 7": [False, True, False],
        "width null": [False, False, True],
    }.items():
        (rule,), _ = parse_filters({"where": text})
        assert evaluate(rule, index.columns, 3).tolist() == expected, text


def test_a_million_samples_are_filtered_in_a_moment() -> None:
    n = 1_000_000
    rng = np.random.default_rng(0)
    columns = pa.table(
        {
            "number:a": rng.random(n),
            "number:b": pa.array(rng.integers(0, 9, n).astype(float), mask=rng.random(n) < 0.1),
            "text:c": pa.array(np.array(["en", "de", "fr"])[rng.integers(0, 3, n)], pa.large_string()),
        }
    )
    rules, _ = parse_filters({"a": ">=0.5", "b": "in [1, 2, 3]", "where": "c == en or not a > 0.9"})
    start = time.perf_counter()
    masks = [evaluate(rule, columns, n) for rule in rules]
    assert time.perf_counter() - start < 2  # 0.1 s alone on one core
    assert 0.4 < masks[0].mean() < 0.6
    assert 0.2 < masks[1].mean() < 0.4
