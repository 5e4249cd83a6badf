import operator
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from sd_training.config.filters import Filter, parse_filters
from sd_training.data.index.selection import evaluate
from sd_training.data.sources.base import metadata_columns
from tests import makers
from tests.cpu_time import least_cpu_s
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
        (True, ["true"]),
        (False, []),
        ("in ['1_0', '٥', 7.5]", ["7.5"]),
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
        ("..5", ["5", '"5"', "true"]),
        ("5..7.5", ["5", '"5"', "7.5"]),
        ("not 5..7", ["7.5", "true"]),
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


ROWS: list[dict[str, Any]] = [
    {name: value for name, value in (("a", a), ("b", b)) if value is not None}
    for a in (None, 1.0, 2.0, "2", "x")
    for b in (None, 2.0, 3.0, "x", "true")
]


def random_rule(draw: random.Random, depth: int) -> Filter:
    field = draw.choice(["a", "b", "missing"])
    values = [1.0, 2.0, 2.5, "2", "x", "true", "none of them"]
    kind = draw.randrange(6 if depth else 3)
    if kind == 0:
        order = draw.choice([">=", "<=", ">", "<"])
        return Filter(order, field, (draw.choice([1.0, 2.0, 2.5]),))
    if kind == 1:
        equality = draw.choice(["==", "!="])
        return Filter(equality, field, (draw.choice(values),))
    if kind == 2:
        return draw.choice([Filter("null", field), Filter("in", field, tuple(draw.sample(values, 3)))])
    if kind == 3:
        return Filter("not", parts=(random_rule(draw, depth - 1),))
    word = draw.choice(["and", "or"])
    return Filter(word, parts=tuple(random_rule(draw, depth - 1) for _ in range(draw.choice([2, 3]))))


def as_number(value: Any) -> float | None:
    return {"2": 2.0, "true": 1.0}.get(value) if isinstance(value, str) else value


def truth(rule: Filter, row: dict[str, Any]) -> bool | None:
    """Of one row, by the tables of three-valued logic; None is unknown."""
    if rule.operator == "not":
        inner = truth(rule.parts[0], row)
        return None if inner is None else not inner
    if rule.parts:
        parts = [truth(part, row) for part in rule.parts]
        settled = rule.operator == "or"
        return settled if settled in parts else None if None in parts else not settled
    value = row.get(rule.field)
    if rule.operator == "null":
        return value is None
    if value is None:
        return None
    if rule.operator == "in":
        return any(same(value, wanted) for wanted in rule.values)
    if rule.operator in ("==", "!="):
        return same(value, rule.values[0]) == (rule.operator == "==")
    number = as_number(value)
    compare = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}[rule.operator]
    return None if number is None else bool(compare(number, rule.values[0]))


def same(value: Any, wanted: Any) -> bool:
    number = None if wanted == "true" else as_number(wanted)  # the word true is not the number 1; 1 is true
    return bool(value == wanted or (number is not None and as_number(value) == number))


@pytest.mark.parametrize("chunk", [3, 1000])
def test_thousands_of_rules_agree_with_three_valued_logic_row_by_row(chunk: int) -> None:
    columns = metadata_columns(ROWS)
    table = pa.Table.from_batches(pa.table(columns).to_batches(max_chunksize=chunk))
    draw, outcomes = random.Random(0), set()
    for _ in range(1_500):
        rule = random_rule(draw, 3)
        expected = [truth(rule, row) is True for row in ROWS]
        assert evaluate(rule, table, len(ROWS)).tolist() == expected, str(rule)
        (again,), _ = parse_filters({"where": str(rule)})
        assert str(again) == str(rule) and evaluate(again, table, len(ROWS)).tolist() == expected, str(rule)
        outcomes.add(sum(expected))
    assert len(outcomes) > 15


@pytest.mark.parametrize("text", [pa.string(), pa.large_string()])
def test_no_rows_and_both_kinds_of_text(text: pa.DataType) -> None:
    (rule,), _ = parse_filters({"where": "a == x or not a null and a in [y, z]"})
    for rows in ([], ["x", None, "z", "w"]):
        columns = pa.table({"number:a": pa.nulls(len(rows), pa.float64()), "text:a": pa.array(rows, text)})
        assert evaluate(rule, columns, len(rows)).tolist() == [row in ("x", "z") for row in rows]


def test_long_lists_cost_no_more_than_short_ones() -> None:
    """A thousand names compared one by one took 16 s and 2 GB: a hundred times what ten take."""
    n = 200_000
    names = np.array([f"name{i}" for i in range(2_000)])
    drawn = np.random.default_rng(0).integers(0, 2_000, n)
    columns = pa.table({"number:c": pa.nulls(n, pa.float64()), "text:c": pa.array(names[drawn], pa.large_string())})
    took = {}
    for length in (10, 1_000):
        (rule,), _ = parse_filters({"c": f"in [{', '.join(names[:length])}]"})
        np.testing.assert_array_equal(evaluate(rule, columns, n), drawn < length)
        took[length] = least_cpu_s(lambda rule=rule: evaluate(rule, columns, n))  # type: ignore[misc]
    assert took[1_000] < 10 * took[10]  # twice


def test_a_million_samples_are_filtered_as_by_hand() -> None:
    """Row by row, in Python, it would be a hundred times slower."""
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
    masks = [evaluate(rule, columns, n) for rule in rules]

    def by_hand() -> None:
        pc.greater_equal(columns["number:a"], 0.5)
        pc.is_in(columns["number:b"], pa.array([1.0, 2.0, 3.0]))
        pc.or_(pc.equal(columns["text:c"], "en"), pc.invert(pc.greater(columns["number:a"], 0.9)))

    ours = least_cpu_s(lambda: [evaluate(rule, columns, n) for rule in rules])
    assert ours < 10 * least_cpu_s(by_hand)  # twice
    assert 0.4 < masks[0].mean() < 0.6
    assert 0.2 < masks[1].mean() < 0.4
