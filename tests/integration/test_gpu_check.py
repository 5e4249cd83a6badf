"""Every part of the GPU check runs in small on the CPU; and what goes wrong is a line, not the end."""

import faulthandler
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests import gpu_check
from tests.faults.fork_server import shared_server
from tests.gpu_check import Experiment, conducted, lack
from tests.gpu_experiments import Result, Setting
from tests.integration.commands import ROOT, forked


@pytest.fixture
def setting(tmp_path: Path) -> Setting:
    return Setting("cpu", True, tmp_path, 0.05)


def test_every_part_runs_in_small(tmp_path: Path) -> None:
    out = tmp_path / "lines.jsonl"
    options = [f"out={out}", f"folder={tmp_path / 'work'}", "part=1,2,3", "size=tiny", "device=cpu"]
    done = forked("tests/gpu_check.py", *options, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout == out.read_text()
    about, *lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert about["about"]["torch"] and about["about"]["commit"]
    every = [experiment for part in gpu_check.PARTS.values() for experiment in part]
    assert [line["experiment"] for line in lines] == [experiment.name for experiment in every]
    assert [line["experiment"] for line in lines if "error" in line] == [], lines
    skipped = {line["experiment"] for line in lines if "skipped" in line}
    assert skipped == {experiment.name for experiment in every if experiment.needs}
    results: dict[str, Any] = {line["experiment"]: line["result"] for line in lines if "result" in line}
    assert results["tiny run: bf16"] == results["tiny run: recomputation"] == results["tiny run: resumed"]
    for name, result in results.items():
        if name.startswith("trainer"):
            assert result["steps"] >= 2 and result["images_per_s"] > 0
    assert results["trainer"]["dry_run_gib"] > 0
    assert isinstance(results["attention: CUDNN_ATTENTION"]["sd3 joint"], str)  # the error of a kernel without a CPU


def crash(setting: Setting) -> Result:
    faulthandler.disable()  # pytest's, which would print stacks as if a test had crashed
    os.kill(os.getpid(), signal.SIGSEGV)
    return {}


def hang(setting: Setting) -> Result:
    subprocess.Popen(["sleep", "600"])
    while True:
        time.sleep(1)


def fail(setting: Setting) -> Result:
    raise SystemExit("no\n memory")


def test_what_goes_wrong_is_the_result(setting: Setting) -> None:
    assert conducted(Experiment("a", fail), setting, 60) == {"error": "SystemExit: no memory"}
    assert "ended with status -11" in conducted(Experiment("a", crash), setting, 60)["error"]
    assert conducted(Experiment("a", hang), setting, 0.5) == {"error": "no result within 0 s"}
    assert conducted(Experiment("a", lambda _: {"b": 1}), setting, 60) == {"result": {"b": 1}}


def test_a_spawned_process_serves_as_well(setting: Setting) -> None:
    (experiment,) = (e for e in gpu_check.PARTS["1"] if e.name == "average on the CPU")
    assert conducted(experiment, setting, 600, "spawn")["result"]["gb_per_s_with_1_threads"] > 0


def test_packages_that_are_missing_are_named(setting: Setting) -> None:
    on_gpu = Setting("cuda", True, setting.folder, 0.05)
    assert lack(Experiment("a", fail, needs="no_such_package"), on_gpu) == "needs the package no_such_package"
    assert lack(Experiment("a", fail, needs="cuda"), on_gpu) == "" and lack(Experiment("a", fail), setting) == ""


def tell_and_hang(setting: Setting) -> Result:
    (setting.folder / "child").write_text(str(os.getpid()))
    hang(setting)
    return {}


def parent(words: list[str]) -> None:
    """Conducts an experiment that does not end. Args: a folder."""
    conducted(Experiment("a", tell_and_hang), Setting("cpu", True, Path(words[0]), 1), 600)


def test_a_child_does_not_outlive_its_parent(tmp_path: Path) -> None:
    started = shared_server().start("tests.integration.test_gpu_check:parent", [str(tmp_path)], tmp_path / "log")
    told = tmp_path / "child"
    while not (told.exists() and told.read_text()):
        assert started.poll() is None, (tmp_path / "log").read_text()
        time.sleep(0.05)
    child = int(told.read_text())
    started.send(signal.SIGKILL)
    assert started.wait(60) == -signal.SIGKILL
    for _ in range(600):
        if not Path(f"/proc/{child}").exists() or " Z " in Path(f"/proc/{child}/stat").read_text():
            return
        time.sleep(0.1)
    pytest.fail("the child still runs")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("parts=1", "parts: unknown option; valid options are part, seconds"),
        ("part=4", "part: is '4'; allowed: 1, 2, 3"),
        ("size=huge", "size: is 'huge'; allowed: full, tiny"),
        ("seconds=soon", "seconds: is 'soon'"),
    ],
)
def test_mistakes_are_sentences(word: str, message: str) -> None:
    with pytest.raises(gpu_check.UserError, match=message):
        gpu_check.options_of([word])
