import math
import subprocess
import sys

import pytest

from sd_training.config.filter_grammar import GRAMMAR, Comparison, parse_filters


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
        (0.25, "==", 0.25),
        ("en", "==", "en"),
        ("!=en", "!=", "en"),
        ('=="two words"', "==", "two words"),
        ("== ''", "==", ""),
        ("'512'", "==", "512"),
    ],
)
def test_reads_the_grammar(written: str | int | float, operator: str, value: float | str) -> None:
    assert parse_filters({"field": written}) == ([Comparison("field", operator, value)], [])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "written",
    [
        "",
        "  ",
        ">=",
        ">= large",
        "=>5",
        ">=5 and <9",
        "and",
        "not null",
        "nan",
        "==null",
        ">=1e999",
        math.inf,
        True,
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
    assert comparisons == [Comparison("good", ">", 1.0)]
    (problem,) = problems
    assert problem.startswith("dataset.params.filters.width: ")
    assert repr(written) in problem
    assert GRAMMAR in problem


def test_long_values_are_cut_in_the_problem() -> None:
    _, (problem,) = parse_filters({"width": "(" * 10_000})
    assert len(problem) < 400


def test_no_filters() -> None:
    assert parse_filters(None) == ([], [])
    assert parse_filters({}) == ([], [])


def test_shows_itself_in_its_own_grammar() -> None:
    assert str(Comparison("a", ">=", 512.0)) == "a >= 512"
    assert str(Comparison("a", "!=", "en")) == 'a != "en"'


def test_does_not_import_torch() -> None:
    code = "import sys, sd_training.config.filter_grammar as g; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
