"""Index a data set and say what is in it: the report of `train.py --dry-run`, without a model.

    python scripts/index_dataset.py data/mine 'more/{000..099}.tar'                  shards of images and captions
    python scripts/index_dataset.py --type Parquet data/*.parquet --html report.html
    python scripts/index_dataset.py config=a.yaml dataset.params.path=…              the data of a run

A run does this by itself when it starts; doing it before finds what is wrong with the data without waiting for a GPU.
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sd_training.cli import run_cli
from sd_training.config.batch_plan import BatchPlan
from sd_training.config.load import load_data_config
from sd_training.config.schema import Config
from sd_training.errors import ConfigError
from sd_training.quiet import quiet_libraries


def read_config(arguments: argparse.Namespace) -> Config:
    """The config of paths, or of `config=…` and overrides."""
    overrides = [word for word in arguments.what if "=" in word]
    paths = [word for word in arguments.what if "=" not in word]
    if overrides and paths:
        raise ConfigError(f"{paths[0]}: give paths, or config=… and options such as dataset.params.path=…, not both")
    if not overrides:
        overrides = [f"dataset.params.path={json.dumps(paths)}", f"dataset.type={arguments.type}"]
    if not any(word.startswith(("experiment.num_examples_to_see=", "config=")) for word in overrides):
        overrides.append(f"experiment.num_examples_to_see={arguments.images}")
    return load_data_config(overrides)


def main() -> None:
    """Index, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="+", metavar="PATH or a.b.c=value", help="paths, or config=… and options")
    parser.add_argument("--type", default="WebDataset", help="dataset.type of the paths")
    parser.add_argument("--images", type=int, default=1_000_000, help="length of the run that is projected")
    parser.add_argument("--processes", type=int, default=1, help="training processes of the run that is projected")
    parser.add_argument("--html", type=Path, help="write the report as one HTML page")
    arguments = parser.parse_args()
    config = read_config(arguments)
    quiet_libraries()
    from sd_training.data.datamodule import TrainingData
    from sd_training.data.report_page import report_page
    from sd_training.types import LatentGrid

    batch, accumulation = config.system.batch_size, config.system.gradient_accumulation
    plan = BatchPlan(batch, accumulation, arguments.processes, config.experiment.num_examples_to_see)
    data = TrainingData(
        dataset=config.dataset,
        plan=plan,
        workers=0,
        seed=config.experiment.seed,
        dropout_prob=0.0,
        tokenizer=None,
        grid=LatentGrid(4, 8),
        draw_noise=False,
        run_dir=None,
    )
    print(plan.sentence())
    print(data.report().text())
    if arguments.html is not None:
        arguments.html.write_text(report_page(data.datasets(), data.report(), plan), encoding="utf-8")
        print(f"written: {arguments.html}")


if __name__ == "__main__":
    run_cli(main)
