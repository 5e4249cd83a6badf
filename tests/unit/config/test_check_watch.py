from pathlib import Path

import pytest

from sd_training.config.load import load_config
from sd_training.errors import ConfigError

LEAST = ["experiment.log_dir=x", "experiment.name=y", "experiment.num_examples_to_see=64", "dataset.params.path=z"]


def problems(pipeline_dir: Path, *words: str) -> list[str]:
    try:
        load_config([*LEAST, f"model.pretrained={pipeline_dir}", *words])
    except ConfigError as error:
        return error.problems
    return []


def test_a_signal_means_one_thing(pipeline_dir: Path) -> None:
    assert problems(pipeline_dir, "system.stop_signals=[SIGTERM]", "system.save_signals=[SIGUSR1]") == []
    (problem,) = problems(pipeline_dir, "system.save_signals=[SIGUSR1]")
    assert problem.startswith("system.save_signals: SIGUSR1 is one of system.stop_signals")


@pytest.mark.parametrize("name", ["SIGKILL", "SIGINT", "USR1", "10"])
def test_a_name_that_is_none_is_refused(name: str, pipeline_dir: Path) -> None:
    (problem,) = problems(pipeline_dir, f"system.stop_signals=[{name}]")
    assert problem.startswith("system.stop_signals.0: is ") and "SIGUSR1" in problem


def test_the_watch_speaks_before_the_network(pipeline_dir: Path) -> None:
    assert problems(pipeline_dir, "watch.save_s=3000", "watch.collective_timeout_s=3001") == []
    assert problems(pipeline_dir, "watch.save_s=null", "watch.collective_timeout_s=1801") == []
    (problem,) = problems(pipeline_dir, "watch.save_s=3000", "watch.collective_timeout_s=3000")
    assert problem.startswith("watch.collective_timeout_s: 3000 is not above watch.save_s=3000")
