"""docs/seeds.md says where everything of the four seeds is and which test shows it: files, options, links and tests
exist, and a row without a test says why."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.unit.test_coming_from import ROOT, broken_links, problems

PAGE = ROOT / "docs" / "seeds.md"
SEEDS = ("MaxDiffusion", "sd-training", "LunNova's trainer", "Stable Diffusion 3 from scratch")

_TEST = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")
_REASON = re.compile(r"not yet|not, because \S")


@cache
def functions(file: Path) -> frozenset[str]:
    """The test functions of a module."""
    body = ast.parse(file.read_text(encoding="utf-8")).body
    return frozenset(node.name for node in body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"))


def problems_of_row(row: str) -> list[str]:
    """Of a table row: what the seed has, where it is here, its tests."""
    cells = [cell.strip() for cell in row.split("|")[1:-1]]
    if len(cells) != 3 or not all(cells):
        return [f"{row}: not three cells"]
    _, here, shown = cells
    found = [*problems(row), *broken_links(row, PAGE)]
    tests = _TEST.findall(shown)
    for name, function in tests:
        if (ROOT / name).is_file() and function and function not in functions(ROOT / name):
            found.append(f"{name} has no {function}")
    if not tests and not _REASON.search(f"{here} {shown}"):
        found.append(f"{row}: neither a test nor a reason")
    if tests and _TEST.sub("", shown).strip(", "):
        found.append(f"{shown}: more than tests")
    return found


def rows(text: str) -> list[str]:
    """Of all tables, without their heads."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [line for line in lines if not line.startswith(("|---", "| what the seed has |"))]


def test_rows_name_what_exists() -> None:
    text = PAGE.read_text(encoding="utf-8")
    found = [problem for row in rows(text) for problem in problems_of_row(row)]
    assert not found
    assert not problems(text.partition("\n## ")[0])


def test_every_seed_has_its_tables() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert tuple(re.findall(r"^## (.+)$", text, flags=re.M)) == SEEDS
    for part in re.split(r"^## ", text, flags=re.M)[1:]:
        assert len(rows(part)) > 40
        for section in re.split(r"^### ", part, flags=re.M)[1:]:
            firsts = [row.split("|")[1] for row in rows(section)]
            assert firsts and len({*firsts}) == len(firsts), "listed twice"


HERE = "`tests/unit/test_seed_table.py::test_rows_name_what_exists`"


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (f"| a | `system.batchsize` | {HERE} |", "system.batchsize: no such option"),
        (f"| a | `scripts/no_such.py` | {HERE} |", "scripts/no_such.py: no such file"),
        ("| a | here | `tests/unit/test_no_such.py::test_a` |", "tests/unit/test_no_such.py: no such file"),
        ("| a | here | `tests/unit/test_seed_table.py::test_no` |", "tests/unit/test_seed_table.py has no test_no"),
        (f"| a | [b](no_such.md) | {HERE} |", "no_such.md: no such page or heading"),
        (f"| a | [b](data.md#no-such) | {HERE} |", "data.md#no-such: no such page or heading"),
        ("| a | here | – |", "| a | here | – |: neither a test nor a reason"),
        (f"| a | here | {HERE}, in part |", f"{HERE}, in part: more than tests"),
        ("| a | not, because nobody asked |", "| a | not, because nobody asked |: not three cells"),
    ],
)
def test_wrong_rows_are_found(row: str, problem: str) -> None:
    assert problems_of_row(row) == [problem]


@pytest.mark.parametrize("row", ["| a | not, because nobody asked | – |", "| a | not yet | not yet |"])
def test_reasons_pass(row: str) -> None:
    assert problems_of_row(row) == []
