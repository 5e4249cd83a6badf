"""The shipped batch file on a real SLURM of two nodes: stopped at the time limit twice, requeued, resumed by itself.

SLURM looks at time limits every 30 s, counted from the start of its controller, so this takes a minute and a half. What
was logged is left in `runs/slurm_test/` when SLURM_TEST_LOGS is set.
"""

import os
import re
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from tests.integration.record_ids import read_ids
from tests.integration.test_training import assert_same_tensors
from tests.integration.training import (
    ROOT,
    checkpoint_tensors,
    losses,
    metrics,
    options,
    train_in_processes,
)
from tests.slurm_cluster import Cluster, missing_packages, slurm_cluster

BATCH_FILE = ROOT / "batch_files/multinode-template.sbatch"
STEPS = 24
LIMIT_S = 600
GOES_ON = ("PENDING", "RUNNING", "SIGNALING", "COMPLETING", "REQUEUED")

pytestmark = pytest.mark.skipif(
    bool(missing_packages()), reason=f"a SLURM of its own needs {', '.join(missing_packages())} (make slurm)"
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    root = tmp_path_factory.mktemp("slurm")
    with slurm_cluster(root) as running:
        yield running
    if "SLURM_TEST_LOGS" in os.environ:
        kept = ROOT / "runs/slurm_test"
        kept.mkdir(parents=True, exist_ok=True)
        for path in (*root.glob("*.log"), *root.glob("job/*.log")):
            shutil.copy(path, kept)
        print(f"SLURM's and the job's logs: {kept}")


@pytest.fixture
def job_dir(cluster: Cluster) -> Path:
    """What a user's python is here: the trainer that writes which samples it saw, and in its first two starts waits at
    steps 5 and 12, so that the signal finds a run of any speed in the middle."""
    folder = cluster.root / "job"
    folder.mkdir()
    python = folder / "python"
    python.write_text(
        f"""#!/bin/bash
export PYTHONPATH='{ROOT}' XDG_CACHE_HOME='{folder}/cache' WATCH_DIR='{folder}'
case "${{SLURM_RESTART_COUNT:-0}}" in 0) export WATCH_HOLD=5:all ;; 1) export WATCH_HOLD=12:all ;; esac
exec '{sys.executable}' -u -m tests.integration.watched_train "${{@:3}}"
"""
    )
    python.chmod(0o755)
    return folder


def write_config(path: Path, argv: list[str]) -> None:
    """Overrides as a file: RUN_CONFIG is all that the batch file takes from the environment."""
    tree: dict[str, object] = {}
    for item in argv:
        key, _, value = item.partition("=")
        *groups, name = key.split(".")
        node = tree
        for group in groups:
            node = node.setdefault(group, {})  # type: ignore[assignment]
        node[name] = yaml.safe_load(value)
    path.write_text(yaml.safe_dump(tree))


def wait_until(is_done: Callable[[], bool], log: Path) -> None:
    end_s = time.monotonic() + LIMIT_S
    while not is_done():
        assert time.monotonic() < end_s, log.read_text() if log.exists() else "no log"
        time.sleep(0.5)


@pytest.mark.slow
def test_stopped_twice_and_resumed_by_itself(
    cluster: Cluster, job_dir: Path, pipeline_dir: Path, shards_dir: Path, tmp_path: Path
) -> None:
    changes: dict[str, object] = {"system__batch_size": 4, "experiment__save_every": 100}
    changes |= {"experiment__num_examples_to_see": 8 * STEPS, "trainer__accelerator": "cpu"}
    run_dir = job_dir / "run"
    encoders = os.environ.get("SLURM_ENCODERS", "0")  # of each node; the comparison has none
    argv = options(run_dir, pipeline_dir, shards_dir, **changes, distributed__encoders=encoders)
    write_config(job_dir / "config.yaml", argv)
    # Somebody listens on the port that would be this job's: it must take another one.
    with socket.create_server(("0.0.0.0", 15000 + 17)):
        settings = {"RUN_CONFIG": str(job_dir / "config.yaml"), "RUN_PYTHON": str(job_dir / "python")}
        size = ["--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=1", "--cpus-per-task=2"]
        limits = ["--time=1", "--signal=USR1@20", f"--output={job_dir}/job.log", f"--chdir={job_dir}"]
        words = ["sbatch", "--parsable", "--partition=short", *size, *limits, BATCH_FILE]
        job = cluster.command(*words, **settings, RUN_PROJECT_DIR=str(job_dir)).strip()
        assert job == "1"
        whole = tmp_path / "whole"  # an uninterrupted run of two processes, while SLURM waits for its clock
        train_in_processes(options(whole, pipeline_dir, shards_dir, **changes), 2)
        log = job_dir / "job.log"
        # Where a start takes half a minute, the limit would stop each after its first two steps.
        wait_until(lambda: int(cluster.job(job)["Restarts"]) >= 2, log)
        cluster.command("scontrol", "update", f"JobId={job}", "TimeLimit=10")
        wait_until(lambda: cluster.job(job)["JobState"] not in GOES_ON, log)
    said = log.read_text()
    assert cluster.job(job)["JobState"] == "COMPLETED", said
    print(f"SLURM's and the job's logs: {cluster.root}\n{said}")
    restarts = int(cluster.job(job)["Restarts"])
    assert restarts in (2, 3)  # the third start may have been warned before its limit was raised
    for start in range(restarts + 1):
        assert f"(restart {start}): 2 processes on 2 nodes, meeting at 127.0.0.1:" in said
    assert "127.0.0.1:15017" not in said
    steps = list(map(int, re.findall(r", saved after (\d+) optimizer steps; back into the queue", said)))
    assert len(steps) == restarts and steps == sorted(set(steps))
    assert list(map(int, re.findall(r"resuming after optimizer step (\d+) of ", said))) == steps
    assert [int(row["optimizer_step"]) for row in metrics(run_dir)] == list(range(1, STEPS + 1))
    assert losses(run_dir) == losses(whole)
    seen = read_ids(job_dir)
    assert list(map(len, seen.values())) == [8] * STEPS  # every step once
    assert [position for step in range(STEPS) for position, _ in seen[step]] == list(range(8 * STEPS))
    assert_same_tensors(checkpoint_tensors(run_dir, STEPS), checkpoint_tensors(whole, STEPS))


def submit(cluster: Cluster, folder: Path, python: str) -> tuple[str, Path]:
    """A job of two processes for which this script stands for the trainer; its number and its log."""
    script, log = folder / "python", folder / "job.log"
    script.write_text(python)
    script.chmod(0o755)
    size = ["--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=1", "--cpus-per-task=2"]
    words = ["sbatch", "--parsable", "--partition=short", *size, f"--output={log}", f"--chdir={folder}", BATCH_FILE]
    return cluster.command(*words, RUN_PYTHON=str(script), RUN_PROJECT_DIR=str(folder)).strip(), log


def test_a_cancelled_job_is_not_started_again(cluster: Cluster, tmp_path: Path) -> None:
    """Its processes save and end with status 75 as at a preemption, but a person has ended the job."""
    job, log = submit(
        cluster,
        tmp_path,
        """#!/bin/bash
trap 'echo 75 > "$SD_TRAINING_STATUS_FILE"; echo 5 > "$SD_TRAINING_STEP_FILE"; exit 75' TERM
echo started
while true; do sleep 0.1; done
""",
    )
    wait_until(lambda: log.exists() and log.read_text().count("started") == 2, log)
    cluster.command("scancel", job)
    wait_until(lambda: cluster.job(job)["JobState"] == "CANCELLED", log)
    wait_until((tmp_path / f"slurm-{job}.step").exists, log)
    time.sleep(1)
    assert "back into the queue" not in log.read_text()
    assert (cluster.job(job)["JobState"], cluster.job(job)["Restarts"]) == ("CANCELLED", "0")


def test_a_hang_is_started_again_though_a_process_must_be_killed(cluster: Cluster, tmp_path: Path) -> None:
    """One process finds the hang, the other one ends by nothing but SIGKILL: srun gives 137, not 87."""
    watched = (
        "import time; from pathlib import Path; from sd_training.watchdog import HangWatch\n"
        f"watch = HangWatch({{'step': 0.5}}, Path({str(tmp_path)!r}))\n"
        "with watch.running(): watch.enter('step', 3); time.sleep(60)"
    )
    job, log = submit(
        cluster,
        tmp_path,
        f"""#!/bin/bash
if [ "$SLURM_PROCID" = 0 ]; then PYTHONPATH='{ROOT}' exec '{sys.executable}' -c "{watched}"; fi
trap '' TERM
while true; do sleep 0.1; done
""",
    )
    wait_until(lambda: log.exists() and "back into the queue" in log.read_text(), log)
    wait_until(lambda: int(cluster.job(job)["Restarts"]) >= 1, log)
    cluster.command("scancel", job)
    assert "srun gives status 137, but the run ended with 87, which counts" in log.read_text()
