from pathlib import Path

from sd_training.config.load import load_config
from sd_training.errors import ConfigError

LEAST = ["experiment.log_dir=x", "experiment.name=y", "experiment.num_examples_to_see=64", "dataset.params.path=z"]


def problems(pipeline_dir: Path, *words: str) -> list[str]:
    try:
        load_config([*LEAST, f"model.pretrained={pipeline_dir}", *words])
    except ConfigError as error:
        return error.problems
    return []


def test_the_watch_speaks_before_the_network(pipeline_dir: Path) -> None:
    assert problems(pipeline_dir, "watch.save_s=3000", "watch.collective_timeout_s=3001") == []
    assert problems(pipeline_dir, "watch.save_s=null", "watch.collective_timeout_s=1801") == []
    (problem,) = problems(pipeline_dir, "watch.save_s=3000", "watch.collective_timeout_s=3000")
    assert problem.startswith("watch.collective_timeout_s: 3000 is not above watch.save_s=3000")
