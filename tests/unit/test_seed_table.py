"""docs/seeds.md: what it names exists."""

import ast
import re
from pathlib import Path

import pytest

from sd_training.config.fields import groups, options
from tests.unit.test_coming_from import anchors

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "seeds.md"
FOLDERS = ("batch_files/", "configs/", "docs/", "scripts/", "sd_training/", "tests/")


def rows(text: str) -> list[list[str]]:
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:2] == "| "]
    return [row for row in cells if row[0] != "what it has"]


def problems(text: str) -> list[str]:
    """What does not exist, and rows without test or reason."""
    found = []
    for row in rows(text):
        if len(row) != 3:
            found.append(f"{row[0]}: {len(row)} cells")
            continue
        name, here, test = row
        for word in re.findall(r"`([^`]+)`", f"{here} {test}"):
            path, _, function = word.partition("::")
            if path.startswith(FOLDERS):
                found += [f"{name}: {word} is missing"] * (not has(ROOT / path, function))
            elif "." in word and not word.startswith("metrics."):
                key = word.partition("=")[0]
                found += [f"{name}: {key} is no option"] * (key not in options() and key not in groups())
        if not re.fullmatch(r"`tests/[\w/]+\.py(::test_\w+)?`|not, because .+", test):
            found.append(f"{name}: neither a test nor a reason")
        for target, anchor in re.findall(r"\]\(([^)#]+)#?([^)]*)\)", here):
            page = PAGE.parent / target
            if not page.is_file() or (anchor and anchor not in anchors(page.read_text(encoding="utf-8"))):
                found.append(f"{name}: {target}#{anchor} is missing")
    return found


def has(path: Path, function: str) -> bool:
    """Whether there is a file, with a test of this name."""
    if not function or not path.is_file():
        return path.is_file()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return any(isinstance(node, ast.FunctionDef) and node.name == function for node in ast.walk(tree))


def test_every_row_is_true_of_the_files() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert problems(text) == []
    assert len(rows(text)) > 100


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("| a | `scripts/none.py` | not, because |", "is missing"),
        ("| a | `scripts/evaluate.py` | `tests/test_layers.py::test_none` |", "test_none is missing"),
        ("| a | `experiment.none` | not, because so |", "experiment.none is no option"),
        ("| a | here | later |", "neither a test nor a reason"),
        ("| a | [page](data.md#none) | not, because so |", "data.md#none is missing"),
        ("| a | b |", "2 cells"),
    ],
)
def test_what_does_not_exist_is_found(row: str, said: str) -> None:
    assert said in "".join(problems(row))
