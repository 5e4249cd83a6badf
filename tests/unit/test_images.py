"""The recipes of the images: no image is built, but what they copy exists and what they install is pinned."""

import re
import subprocess
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.test_configs import ROOT

DOCKERFILE = ROOT / "batch_files" / "Dockerfile"
APPTAINER = ROOT / "batch_files" / "apptainer.def"


def docker_lines(word: str) -> list[str]:
    """What follows an instruction, with its continued lines."""
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return [line.partition(" ")[2] for line in re.sub(r"\\\n\s*", "", text).splitlines() if line.startswith(f"{word} ")]


def section(name: str) -> str:
    """A part of the Apptainer recipe, without indentation."""
    found = re.search(rf"^%{name}\n((?: .*\n|\n)*)", APPTAINER.read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None, name
    return re.sub(r"^ +", "", found[1], flags=re.MULTILINE).strip()


def copied() -> set[str]:
    return {source for line in docker_lines("COPY") for source in line.split()[:-1]}


def test_what_is_copied_exists_and_is_the_same_in_both() -> None:
    files = [line.split() for line in section("files").splitlines()]
    assert copied() == {source for source, _ in files} and len(copied()) == len(files)
    assert all(target == f"/opt/sd_training/{source}" for source, target in files)
    assert all((ROOT / source).exists() for source in copied())


def test_the_builder_gets_what_is_copied_and_nothing_else() -> None:
    lines = Path(f"{DOCKERFILE}.dockerignore").read_text(encoding="utf-8").splitlines()
    rules = [line for line in lines if not line.startswith("#")]
    assert rules[0] == "**" and {rule[1:] for rule in rules if rule.startswith("!")} == copied()


def test_the_wheel_can_be_built_from_what_is_copied() -> None:
    """Files that pyproject.toml names."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert {'readme = "README.md"', 'license-files = ["LICENSE"]', 'py-modules = ["train"]'} <= set(text.splitlines())
    assert {"README.md", "LICENSE", "train.py", "pyproject.toml", "configs", "sd_training", "scripts"} <= copied()


def installing() -> list[str]:
    """The lines of the Dockerfile that install."""
    return [line for line in docker_lines("RUN") if "pip install" in line or "apt-get" in line]


def test_both_install_the_same() -> None:
    post = re.sub(r"\\\n", "", section("post"))
    assert len(installing()) == 3 and all(line in post.splitlines() for line in installing())
    assert section("arguments").split() == [line for line in docker_lines("ARG") if not line.startswith("PYTHON")]


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_their_commands_are_shell(shell: str) -> None:
    for text in (*docker_lines("RUN"), section("post"), section("runscript")):
        subprocess.run([shell, "-n"], input=text, text=True, check=True)


def test_the_pinned_requirements_but_those_of_tests_are_installed(tmp_path: Path) -> None:
    """The line of the Dockerfile itself, up to pip."""
    (tmp_path / "requirements.txt").write_bytes((ROOT / "requirements.txt").read_bytes())
    line = next(line for line in installing() if "runtime.txt" in line)
    subprocess.run(["sh", "-c", line.partition("&&")[0]], cwd=tmp_path, check=True)
    lines = [line.partition("#")[0].strip() for line in (tmp_path / "runtime.txt").read_text("utf-8").splitlines()]
    pinned = {own.name.lower(): own for own in map(Requirement, filter(None, lines))}
    assert {"torch", "pytorch-lightning", "deepspeed", "wandb"} <= set(pinned)
    assert pinned.keys().isdisjoint({"pytest", "mypy", "ruff", "moto", "pytest-xdist"})
    assert all(re.fullmatch(r"==[\w.]+", str(own.specifier)) for own in pinned.values())


def test_requirements_are_within_the_ranges_of_the_project() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    listed = re.search(r"^dependencies = \[\n(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    assert listed is not None
    ranges = [Requirement(own) for own in re.findall(r'^ +"([^"]+)"', listed[1], re.MULTILINE)]
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    pins = {
        own.name.lower(): own for own in map(Requirement, filter(None, (x.partition("#")[0].strip() for x in lines)))
    }
    assert len(ranges) > 15
    for own in ranges:
        (version,) = pins[own.name.lower()].specifier
        assert own.specifier.contains(version.version), own


def test_they_run_sd_train_as_a_user_without_rights() -> None:
    assert docker_lines("ENTRYPOINT") == ['["sd-train"]']
    assert docker_lines("USER") == ["trainer"] and section("runscript") == 'exec sd-train "$@"'
    assert 'sd-train = "train:command"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
