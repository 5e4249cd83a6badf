"""Index a data set and say what is in it: the report of `train.py --dry-run`, without a model.

    python scripts/index_dataset.py data/mine 'more/{000..099}.tar'                  shards of images and captions
    python scripts/index_dataset.py --type Parquet data/*.parquet
    python scripts/index_dataset.py config=a.yaml dataset.params.path=…              the data of a run

A run does this by itself when it starts; doing it before finds what is wrong with the data without waiting for a GPU.
How often a run sees each sample is said of a config, and with `--images`.
"""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sd_training.cli import check_counts, run_cli
from sd_training.config.load import load_config
from sd_training.config.plan import BatchPlan
from sd_training.config.schema import Config
from sd_training.errors import ConfigError
from sd_training.log import quiet_libraries

_NO_RUN = 10**12
"""Stands in for the length of a run where none is asked for: nothing is too short for it."""
_OPTION = re.compile(r"(config|[\w-]+\.[^/=]+)=")
_LENGTH, _TYPE = "experiment.num_examples_to_see", "dataset.type"


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line.

    Raises:
        ConfigError: a value cannot be used; raised before hours of indexing, not after.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="+", metavar="PATH or a.b.c=value", help="paths, or config=… and options")
    parser.add_argument("--type", help="dataset.type of the paths (default WebDataset)")
    parser.add_argument("--images", type=int, help="say also what a run of so many images draws from it")
    parser.add_argument("--processes", type=int, default=1, help="training processes of that run")
    arguments = parser.parse_intermixed_args(argv)
    check_counts(arguments, "processes")
    return arguments


def is_option(word: str) -> bool:
    """Whether an argument is `a.b.c=value`; paths such as `data/lang=en` hold such signs, too."""
    return _OPTION.match(word) is not None and not os.path.exists(word)


def read_config(arguments: argparse.Namespace) -> Config:
    """The config of paths, or of `config=…` and overrides."""
    overrides = [word for word in arguments.what if is_option(word)]
    paths = [word for word in arguments.what if not is_option(word)]
    if overrides and paths:
        raise ConfigError(f"{paths[0]}: give paths, or config=… and options such as dataset.params.path=…, not both")
    if paths:
        overrides = ["dataset.params.path=.", "system.batch_size=1"]
    for flag, key in (("type", _TYPE), ("images", _LENGTH)):
        overrides += _flag(flag, key, getattr(arguments, flag), overrides)
    if not any(word.startswith((f"{_LENGTH}=", "config=")) for word in overrides):
        overrides.append(f"{_LENGTH}={_NO_RUN}")
    config = load_data_config(overrides)
    if paths:
        config.dataset.params.path = paths  # set here, because an override would read `${…}` in a path
    return config


def load_data_config(argv: Sequence[str]) -> Config:
    """As `load_config`, for tools that look at the data only: no model, folder or name need be given."""
    given = {item.partition("=")[0] for item in argv}
    places = {"experiment.log_dir": ".", "experiment.name": "data"}
    words = [*(f"{key}={value}" for key, value in places.items() if key not in given), *argv]
    try:
        return load_config(words)
    except ConfigError:
        if "model.pretrained" in given:
            raise
        # Not at first: beside the parts of a model from scratch it is warned of.
        return load_config(["model.pretrained=nobody/nothing", *words])


def _flag(name: str, key: str, value: object, overrides: Sequence[str]) -> list[str]:
    if value is None:
        return []
    if any(word.startswith(f"{key}=") for word in overrides):
        raise ConfigError(f"--{name}: is {key}, which is given as well; keep one of them")
    return [f"{key}={value}"]


def main(argv: Sequence[str] | None = None) -> None:
    """Index, print, write."""
    arguments = parse_arguments(argv)
    config = read_config(arguments)
    quiet_libraries()
    from sd_training.build.plan import run_length
    from sd_training.data.datamodule import TrainingData
    from sd_training.data.index.report import report_text
    from sd_training.data.samples.sample import DrawSettings
    from sd_training.types import LatentGrid

    batch, accumulation = config.system.batch_size, config.system.gradient_accumulation
    plan = BatchPlan(batch, accumulation, arguments.processes, num_examples=1)
    plan = replace(plan, num_examples=run_length(config, plan.global_batch))
    is_run = plan.num_examples != _NO_RUN
    data = TrainingData(
        dataset=config.dataset,
        plan=plan,
        workers=0,
        tokenizers={},
        draws=DrawSettings(config.experiment.seed, LatentGrid(4, 8), has_noise=False),
        run_dir=None,
    )
    words = [word for word in arguments.what if is_option(word)]
    is_size_known = any(word.startswith(("config=", "dataset.params.resolution=")) for word in words)
    reports = data.report(of_run=is_run, is_size_known=is_size_known)
    if is_run:
        is_assumed = not any(word.startswith(("config=", "system.batch_size=")) for word in words)
        remark = f"; batch_size {batch} is assumed, and config=… gives the run's own" if is_assumed else ""
        print(f"{plan.sentence()}{remark}")
    print(report_text(reports))


if __name__ == "__main__":
    run_cli(main)
