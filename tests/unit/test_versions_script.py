"""`.ci/versions`: what it tries exists, and it says what it could not try. The environments themselves are not made."""

import re
import subprocess

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tests.test_layers import ROOT

SCRIPT = ROOT / ".ci" / "versions"
TEXT = SCRIPT.read_text(encoding="utf-8")
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def run(*pairs: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(["bash", SCRIPT, *pairs], capture_output=True, text=True)


def test_the_tests_that_it_runs_exist() -> None:
    found = re.findall(r"tests/[\w/.]+", TEXT)
    assert len(found) > 5 and all((ROOT / path).exists() for path in found)


def test_its_pairs_span_what_the_project_supports() -> None:
    pairs = re.search(r"pairs=\((3[^)]+)\)", TEXT)
    pythons = re.search(r'requires-python = "(.+)"', PROJECT)
    torch = re.search(r'"(torch>=.+?)"', PROJECT)
    assert pairs is not None and pythons is not None and torch is not None
    chosen = [pair.split(":") for pair in pairs[1].split()]
    assert {python for python, _ in chosen} == {f"3.{n}" for n in range(20) if f"3.{n}" in SpecifierSet(pythons[1])}
    versions = [version for _, version in chosen]
    assert not Requirement(torch[1]).specifier.contains("2.9") and versions[0] == "2.10.0"
    assert f"torch=={versions[-1]} " in (ROOT / "requirements.txt").read_text(encoding="utf-8")


def test_a_python_that_is_not_here_is_named_and_nothing_passed_is_a_failure() -> None:
    done = run("3.99:2.13.0")
    assert done.returncode == 1
    assert done.stdout.splitlines() == [
        "passed: none",
        "skipped: 3.99:2.13.0 (python3.99 is not on PATH)",
        "failed: none",
    ]


def test_a_wrong_pair_is_refused() -> None:
    done = run("3.11")
    assert (done.returncode, done.stderr) == (2, "3.11: is no PYTHON:TORCH, such as 3.11:2.13.0\n")
