import math
import subprocess
import sys

import pytest

from sd_training.config.filters import GRAMMAR, Filter, Value, parse_filters


def compared(field: str, operator: str, value: Value) -> Filter:
    return Filter(operator, field, (value,))


def one_of(field: str, *values: Value) -> Filter:
    return Filter("in", field, values)


def null(field: str) -> Filter:
    return Filter("null", field)


def negated(part: Filter) -> Filter:
    return Filter("not", parts=(part,))


def joined(word: str, *parts: Filter) -> Filter:
    return Filter(word, parts=parts)


@pytest.mark.parametrize(
    ("written", "operator", "value"),
    [
        (">=512", ">=", 512.0),
        ("<= 0.5", "<=", 0.5),
        (" > -1e-3 ", ">", -0.001),
        ("<.5", "<", 0.5),
        ("==1", "==", 1.0),
        ("!=3", "!=", 3.0),
        ("512", "==", 512.0),
        (512, "==", 512.0),
        (True, "==", "true"),
        (False, "==", "false"),
        ("false", "==", "false"),
        ("'a\\b'", "==", "a\\b"),
        (0.25, "==", 0.25),
        ("en", "==", "en"),
        ("!=en", "!=", "en"),
        ('=="two words"', "==", "two words"),
        ("== ''", "==", ""),
        ("'512'", "==", "512"),
    ],
)
def test_reads_the_grammar(written: str | int | float, operator: str, value: float | str) -> None:
    assert parse_filters({"field": written}) == ([compared("field", operator, value)], [])


@pytest.mark.parametrize(
    "written",
    [
        "",
        "  ",
        ">=",
        ">= large",
        "=>5",
        "and",
        "nan",
        "==null",
        ">=1e999",
        math.inf,
        -math.inf,
        math.nan,
        "inf",
        ">=.inf",
        "!=.nan",
        "in [.inf]",
        "..inf",
        "7..5",
        "5...7",
        "NULL",
        "__import__('os').system('true')",
        ">=0 or __import__('os')",
        ">=len('x')",
        "lambda: 0",
        '"a" + "b"',
        '"unclosed',
        "[1, 2]",
        "5 px",
        "１",
    ],
)
def test_anything_else_is_a_problem_that_shows_value_and_grammar(written: str | float) -> None:
    comparisons, problems = parse_filters({"width": written, "good": ">1"})
    assert comparisons == [compared("good", ">", 1.0)]
    (problem,) = problems
    assert problem.startswith("dataset.params.filters.width: ")
    assert repr(written) in problem
    assert GRAMMAR in problem


A_HIGH, A_LOW = compared("a", ">=", 5.0), compared("a", "<=", 9.0)


@pytest.mark.parametrize(
    ("written", "rule"),
    [
        (">=5 and <=9", joined("and", A_HIGH, A_LOW)),
        ("5..9", joined("and", A_HIGH, A_LOW)),
        ("5..", A_HIGH),
        ("..9", A_LOW),
        ("in [en, 3, 'x y']", one_of("a", "en", 3.0, "x y")),
        ("not in [en]", negated(one_of("a", "en"))),
        ("null", null("a")),
        ("not null", negated(null("a"))),
        ("is not null", negated(null("a"))),
        ("null or >=5", joined("or", null("a"), A_HIGH)),
        ("not (>=5 or null)", negated(joined("or", A_HIGH, null("a")))),
        ("<=9 or >=5 and ==x", joined("or", A_LOW, joined("and", A_HIGH, compared("a", "==", "x")))),
    ],
)
def test_conditions_of_one_field(written: str, rule: Filter) -> None:
    assert parse_filters({"a": written}) == ([rule], [])


def test_across_fields() -> None:
    b = compared("b.c", "==", "x")
    mixed = joined("or", A_HIGH, joined("and", A_LOW, b))
    for filters in (
        {"where": "a >= 5 or a <= 9 and b.c == x"},
        {"where": "`a` >= 5 or (a<=9 and (b.c == 'x'))"},
        {"any_of": [{"a": ">=5"}, {"a": "<=9", "b.c": "x"}]},
        {"any_of": [{"a": ">=5"}, {"all_of": [{"a": "<=9"}, {"b.c": "==x"}]}]},
    ):
        (rule,), problems = parse_filters(filters)
        assert (rule, problems) == (mixed, [])
        assert rule.fields() == {"a", "b.c"}
    assert str(mixed) == 'a >= 5 or (a <= 9 and b.c == "x")'
    for text in ("`odd name` is null and not b in [1]", """"odd name" null and b not in [1]"""):
        (rule,), _ = parse_filters({"where": text})
        assert rule == joined("and", null("odd name"), negated(one_of("b", 1.0)))
    assert parse_filters({"where": "a 5..9"}) == parse_filters({"a": "5..9"})


@pytest.mark.parametrize(
    "filters",
    [
        {"where": "a"},
        {"where": "a >= 5 b"},
        {"where": "a >= 5 and"},
        {"where": "(a >= 5"},
        {"where": ">= 5"},
        {"where": 5},
        {"where": "a.__class__() == 1"},
        {"where": "a >= b"},
        {"where": "(" * 5_000 + "a > 1" + ")" * 5_000},
        {"where": "not " * 50_000 + "a > 1"},
        {"any_of": []},
        {"any_of": "a > 1"},
        {"any_of": {"a": ">1", "b": ">1"}},
        {"any_of": [{}]},
        {"any_of": [{"a": "x" + " y" * 9_000}]},
        {"where": "a 5"},
        {"where": "a > 5 or in > 3"},
        {"where": "'' > 5"},
        {"a": 10**400},
        {"a": "1" * 400},
        {"a": ">" * 30_000},
        {"any_of": [{"a": "x y"}]},
        {"a": "in []"},
        {"a": "in [1"},
        {"a": "5..x"},
        {"a": "not"},
        {"a": [1]},
        {"a": {"b": 1}},
    ],
)
def test_what_is_no_expression(filters: dict[str, object]) -> None:
    rules, (problem,) = parse_filters(filters)
    assert rules == []
    assert GRAMMAR in problem
    assert len(problem) < 600


def test_a_filter_that_the_shell_ate() -> None:
    (problem,) = parse_filters({"a": None})[1]
    assert "quote it" in problem and '"null" in quotes' in problem


@pytest.mark.parametrize("depth", [30, 100_000])
def test_nesting_has_an_end(depth: int) -> None:
    nested: dict[str, object] = {"a": ">1"}
    for _ in range(depth):
        nested = {"any_of": [nested]}
    rules, problems = parse_filters(nested)
    assert (rules, problems) == ([compared("a", ">", 1.0)], []) if depth < 40 else "nested too deeply" in problems[0]


@pytest.mark.parametrize(("depth", "is_read"), [(40, True), (41, False), (600, False), (6000, False)])
def test_nesting_in_a_text_has_an_end(depth: int, is_read: bool) -> None:
    for text in ("not " * depth + "a >= 1", "(" * depth + "a >= 1" + ")" * depth):
        rules, problems = parse_filters({"where": text})
        assert len(rules) == (is_read or (text[0] == "(" and depth < 100)) and len(rules) + len(problems) == 1
        assert [str(rule) for rule in rules] and rules[0].fields() == {"a"} if rules else "not a filter" in problems[0]


def test_a_text_has_a_longest_length() -> None:
    rules, problems = parse_filters({"where": " or ".join(["a >= 1"] * 5_000)})
    assert rules == [] and "longer than 20,000 characters" in problems[0]


def test_long_values_are_cut_in_the_problem() -> None:
    _, (problem,) = parse_filters({"width": "(" * 10_000})
    assert len(problem) < 600


def test_no_filters() -> None:
    assert parse_filters(None) == ([], [])
    assert parse_filters({}) == ([], [])


def test_shows_itself_in_its_own_grammar() -> None:
    assert str(compared("a", ">=", 512.0)) == "a >= 512"
    assert str(compared("a", "!=", "en")) == 'a != "en"'
    for rule in (
        compared("odd name", "==", 'say "x"'),
        compared("in", "<", 0.1 + 0.2),
        compared("a.b", ">=", 1e30),
        negated(one_of("größe", "it's", "and", -3.5)),
        joined("or", negated(null("a")), joined("and", A_LOW, A_HIGH)),
    ):
        assert parse_filters({"where": str(rule)}) == ([rule], [])


def test_does_not_import_torch() -> None:
    code = "import sys, sd_training.config.filters as g; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


LONG = 2**53 + 1


@pytest.mark.parametrize(
    ("written", "rule"),
    [
        (LONG, compared("id", "==", str(LONG))),
        (f"!= {LONG}", compared("id", "!=", str(LONG))),
        (f"in [-{LONG}, 5]", one_of("id", f"-{LONG}", 5.0)),
        (f">= {LONG}", compared("id", ">=", float(LONG))),
        (f"{LONG}..", compared("id", ">=", float(LONG))),
        (2**53 - 1, compared("id", "==", float(2**53 - 1))),
    ],
)
def test_long_integers_stay_apart_from_their_neighbours(written: object, rule: object) -> None:
    assert parse_filters({"id": written}) == ([rule], [])
    (again,), _ = parse_filters({"where": str(rule)})
    assert again == rule
