"""How many cores a process on the CPU takes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sd_training import cli as cpu_threads

ROOT = Path(__file__).resolve().parents[2]
SHOWN = """
import multiprocessing, os, sys
from sd_training.cli import set_passive_wait, prepare_cpu
set_passive_wait()
import torch
from sd_training.data.loader import worker_context

if __name__ == "__main__":
    prepare_cpu(int(sys.argv[1]))
    here = f"{torch.get_num_threads()} {os.environ['OMP_NUM_THREADS']} {os.environ['OMP_WAIT_POLICY']}"
    code = "import os, torch; print(torch.get_num_threads(), os.environ['OMP_WAIT_POLICY'])"
    pool = worker_context().Pool(1)
    print(here, pool.apply(os.getenv, ["OMP_NUM_THREADS"]), flush=True)
    pool.close()  # Pool.terminate would wait forever: a process of this server blocks SIGTERM
    pool.join()
    os.execv(sys.executable, [sys.executable, "-c", code])
"""


def shown(folder: Path, processes: int, **chosen: str) -> "subprocess.CompletedProcess[str]":
    """What a process, its loader processes and a process started from it use."""
    unset = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    (folder / "shown.py").write_text(SHOWN)
    command = [sys.executable, "shown.py", str(processes)]
    environment |= {"PYTHONPATH": str(ROOT), **chosen}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)


def test_a_process_and_those_it_starts_take_their_share(tmp_path: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    share = max(1, (cpu_threads._usable_cores() - 1) // 2)
    done = shown(tmp_path, 2)
    assert done.stdout.split("\n")[:2] == [f"{share} {share} PASSIVE {share}", f"{share} PASSIVE"]
    assert done.stderr.count("threads per process") == 1 and f"threads per process: {share} (" in done.stderr
    assert share <= max(1, cores // 2)


def test_what_the_user_chose_stays(tmp_path: Path) -> None:
    done = shown(tmp_path, 1, OMP_NUM_THREADS="3", OMP_WAIT_POLICY="ACTIVE")
    assert done.stdout.split()[1:4] == ["3", "ACTIVE", "3"]  # torch itself may take fewer
    assert "threads per process" not in done.stderr


@pytest.mark.parametrize(("written", "cores"), [("100000 100000", 1), ("50000 100000", 1), ("nothing", None)])
def test_a_container_has_the_cores_of_its_quota(
    written: str, cores: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpu.max").write_text(written)
    monkeypatch.setattr(cpu_threads, "_QUOTA", tmp_path / "cpu.max")
    assert cpu_threads._usable_cores() == (cores or len(os.sched_getaffinity(0)))
