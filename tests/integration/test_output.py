"""What a run prints: its own lines, each with the time, and nothing of a library."""

import importlib.util
import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests import makers
from tests.faults.fork_server import shared_server
from tests.integration.commands import forked
from tests.integration.training import ROOT, options, torchrun

TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d "
OURS = re.compile(
    rf"{TIME}(sd_training 0\.|training \w+ of [\d,]+ parameters$|started in \d|saved step \d|step \d+ of \d|done: |"
    r"distributed\.dist_backend: )"
    r"|  (run folder|runs on|EMA|samples|length) +\S|  options that differ from the last start|    [a-z_.]+: .* -> "
)
"""The start, its block, saves, progress, and the end."""


def lines(text: str) -> list[str]:
    """All lines; none is somebody else's."""
    found = text.splitlines()
    assert [line for line in found if not OURS.match(line)] == []
    return found


def on_a_terminal_without_a_size(*command: str) -> tuple[int, str]:
    """Status and stderr of a command; `openpty` makes terminals of 0 columns and 0 rows, as some launchers do."""
    leader, terminal = os.openpty()
    said = b""
    with subprocess.Popen(command, cwd=ROOT, stderr=terminal) as process, suppress(OSError):
        os.close(terminal)
        while True:
            said += os.read(leader, 65536)  # an error when the process has ended
    os.close(leader)
    return process.returncode, said.decode().replace("\r\n", "\n")


def test_a_run_says_what_it_does_and_nothing_else(pipeline_dir: Path, shards_dir: Path, tmp_path: Path) -> None:
    """One process, its dry run, and two that go on where it ended."""
    changes = {
        "experiment__save_every": 4,
        "logging__progress_bar": True,
        "system__workers": 1,
        "wandb__mode": "disabled",
    }
    argv = options(tmp_path / "run", pipeline_dir, shards_dir, **changes)
    status, one = on_a_terminal_without_a_size(sys.executable, "train.py", *argv, "experiment.num_examples_to_see=32")
    assert status == 0 and "sd_training 0." in lines(one)[0]
    block = dict(re.findall(r"^  (\S.*?)  +(.*)$", one, re.MULTILINE))
    assert block == {
        "run folder": f"{tmp_path / 'run'}, a new run",
        "runs on": "cpu, 1 process, fp32, strategy single",
        "EMA": "with decay 0.9999, is exported",
        "samples": "32",
        "length": "batch_size 8 × accumulation 1 × 1 process = 8 images per optimizer step; 32 images = 4 steps",
    }
    newest = r"loss [\d.]+, [\d.e-]+ s/step, \d+% waiting for data"
    progress = rf"^{TIME}step 4 of 4: 32 images, [\d.]+ images/s, 0:00:00 left, {newest}$"
    assert re.search(progress, one, re.MULTILINE)
    phases = ("imports and configuration", "run folder", "model", "data and processes", "first optimizer step")
    parts = ", ".join(rf"{phase} ([\d.]+)" for phase in phases)
    started = re.search(rf"^{TIME}started in ([\d.]+) s: {parts}$", one, re.MULTILINE)
    assert started, one
    total_s, *each_s = map(float, started.groups())
    assert abs(total_s - sum(each_s)) < 0.05 * 6 + 1e-6  # each is rounded to a tenth
    kept = (tmp_path / "run/train.log").read_text()
    assert kept == one
    assert f", and a page about the run: {tmp_path / 'run/report.html'}\n" in one
    assert "4 of 4 optimizer steps, 32 images" in (tmp_path / "run/report.html").read_text()
    described = forked("train.py", *argv, "--dry-run", cwd=ROOT)
    assert described.returncode == 0 and described.stdout.startswith("this run\n"), described.stderr
    assert len(lines(described.stderr)) == 1
    both = lines(torchrun([*argv, "system.batch_size=4", "trainer.accelerator=cpu"], 2))
    assert [line for line in both if "resum" in line] == [
        f"  run folder  {tmp_path / 'run'}, resuming after optimizer step 4 of 8"
    ]
    assert "  runs on     cpu, 2 processes, fp32, strategy ddp" in both and "    system.batch_size: 8 -> 4" in both
    assert len([line for line in both if "sd_training 0." in line]) == 1  # of the first process only
    assert (tmp_path / "run/train.log").read_text() == kept + "".join(f"{line}\n" for line in both)


def test_the_end_says_how_many_samples_were_not_usable(pipeline_dir: Path, tmp_path: Path) -> None:
    samples = makers.caption_samples(12)
    samples[3]["jpg"], samples[5]["jpg"] = b"not a picture", samples[5]["jpg"][:-300]
    del samples[7]["txt"]
    makers.write_shard(tmp_path / "shards" / "0.tar", samples)
    argv = options(tmp_path / "run", pipeline_dir, tmp_path / "shards", experiment__num_examples_to_see=16)
    ended = forked("train.py", *argv, cwd=ROOT)
    assert ended.returncode == 0, ended.stderr
    assert "samples without a caption are left out, unless dataset.params.captions.text gives one" in ended.stderr
    assert f"warning: {tmp_path / 'run/bad_samples.jsonl'} names 3 samples that could not be used\n" in ended.stderr


SLOW = ("bitsandbytes", "torchao")


def print_slow_modules(_: list[str]) -> None:
    """In a process of the fork server, which has imported all that a run imports."""
    found = {*SLOW, "torch._inductor.compile_fx"} & {*sys.modules}
    print(found, *(importlib.util.find_spec(name) is not None for name in SLOW))


def test_what_diffusers_finds_slow_is_not_imported(tmp_path: Path) -> None:
    """They bring torch's compiler; the 8-bit optimizer and `model.float8` still find them."""
    installed = [importlib.util.find_spec(name) is not None for name in SLOW]
    if not any(installed):
        pytest.skip(f"none of {' and '.join(SLOW)} is installed")
    shared_server().call(f"{__name__}:{print_slow_modules.__name__}", [], tmp_path / "log")
    assert (tmp_path / "log").read_text() == f"set() {' '.join(map(str, installed))}\n"
