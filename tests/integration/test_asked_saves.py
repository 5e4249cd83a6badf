"""Saves beside those of every so many steps: when a signal or the clock asks, and before a time limit."""

import os
import signal
import time
from pathlib import Path

import pytest

from sd_training.errors import EXIT_STOPPED
from tests.integration.training import AtStep, options, train


def saved_steps(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def test_a_signal_or_the_clock_asks_for_a_save(tmp_path: Path, pipeline_dir: Path, shards_dir: Path) -> None:
    changes = {"experiment__save_every": 100, "checkpoint__keep": 9}
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    argv = options(tmp_path / "run", pipeline_dir, shards_dir, **changes)
    run = train(argv, AtStep(2, lambda: [os.kill(os.getpid(), signal.SIGUSR2) for _ in range(3)]))
    assert run.exit_status == 0 and signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
    assert saved_steps(tmp_path / "run") == ["step=3", "step=8"]

    argv = options(tmp_path / "timed", pipeline_dir, shards_dir, **changes, checkpoint__save_every_minutes=0.025)
    began_s = time.monotonic()
    train(argv, AtStep(3, lambda: time.sleep(1.5)))
    steps, took_s = saved_steps(tmp_path / "timed"), time.monotonic() - began_s
    # One at the end; a slow machine may need further 1.5 s for 8 tiny steps.
    assert "step=4" in steps and len(steps) <= 1 + max(3, took_s / 1.5), steps


@pytest.mark.parametrize("limit", ["max_hours", "SLURM"])
def test_a_run_ends_before_its_time_limit(
    limit: str, tmp_path: Path, pipeline_dir: Path, shards_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes: dict[str, object] = {"experiment__save_every": 100}
    if limit == "SLURM":
        monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 5))
    else:
        changes["experiment__max_hours"] = 5 / 3600
    run = train(options(tmp_path / "run", pipeline_dir, shards_dir, **changes))
    assert run.exit_status == EXIT_STOPPED and saved_steps(tmp_path / "run") == ["step=1"]
