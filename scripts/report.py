"""Writes the page of one run, or of several runs over each other, as one HTML file that works without a network.

python scripts/report.py logs/mine                          # logs/mine/report.html
python scripts/report.py logs/a logs/b --out compared.html  # the curves of both in the same charts
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sd_training.cli import run_cli
from sd_training.config.value_types import path_argument
from sd_training.errors import ConfigError
from sd_training.evaluation.report import PAGE, write_report


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", metavar="RUN", nargs="+", type=path_argument, help="run folders, log_dir/name")
    parser.add_argument("--out", type=path_argument, help=f"default RUN/{PAGE}; of several runs ./{PAGE}")
    options = parser.parse_args(argv)
    path = options.out or (options.runs[0] / PAGE if len(options.runs) == 1 else Path(PAGE))
    try:
        write_report(options.runs, path)
    except OSError as error:
        raise ConfigError(f"--out: {path} cannot be written ({error.strerror})") from error
    print(path)


if __name__ == "__main__":
    run_cli(main)
