"""Do worse saves rank worse? The quickstart's UNet is trained for 500 steps and saved after every 100; the FID of 500
digits that each save draws, without guidance, must fall from save to save, wherever intervals do not overlap.

    python scripts/quickstart.py --folder build/quickstart
    python -m tests.rank_saves build/quickstart

The features are those of `scripts/score_digits.py`; the quickstart's own last save is the sixth. Exit status 1 when a
pair is in the wrong order, or fewer than ten pairs have intervals apart.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

from scripts import score_digits
from scripts.quickstart import data_overrides, part_overrides, pipeline_dir
from sd_training.cli import run_cli
from sd_training.errors import DataError

ROOT = Path(__file__).resolve().parents[1]
EVERY, LAST, LEAST_PAIRS = 100, 500, 10


def train(folder: Path, home: Path) -> dict[str, Path]:
    """Name of a save → its pipeline, the worst first."""
    words = [sys.executable, "train.py", "config=configs/quickstart_unet.yaml", *data_overrides(folder)]
    words += [*part_overrides(folder), f"experiment.log_dir={home}", "experiment.name=run", "system.batch_size=64"]
    words += [f"experiment.num_examples_to_see={64 * LAST}", f"experiment.save_every={EVERY}"]
    words += ["experiment.save_only_most_recent=false", "sampling.every=0", "logging.batch_every=0"]
    subprocess.run(words, cwd=ROOT, check=True)
    saves = {f"step {step}": home / f"run/pipelines/step_{step}" for step in range(EVERY, LAST + 1, EVERY)}
    return {**saves, "the quickstart's": pipeline_dir(folder)}


def fid(pipeline: Path, home: Path) -> tuple[float, float, float]:
    """Of 500 digits drawn without guidance against all real ones: value, and the ends of its 95 % interval."""
    options = score_digits.parse_arguments(["--pipeline", str(pipeline), "--out", str(home)])
    images, _ = score_digits.draw(score_digits.load_on_device(pipeline), 1.0, options)
    return score_digits.digits_fid(score_digits.grey(images), score_digits.real_pictures()[0])


def main(argv: Sequence[str] | None = None) -> None:
    """Trains, draws, measures, compares all pairs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the quickstart")
    folder = parser.parse_args(argv).folder.absolute()
    with tempfile.TemporaryDirectory() as name:
        found = {save: fid(pipeline, Path(name)) for save, pipeline in train(folder, Path(name)).items()}
    for save, (value, low, high) in found.items():
        print(f"{save:<17} FID {value:6.1f}, 95 % interval {low:.1f} to {high:.1f}")
    pairs = list(combinations(found.values(), 2))
    in_order = sum(worse[0] > better[0] for worse, better in pairs)
    apart = [(worse, better) for worse, better in pairs if worse[1] > better[2] or better[1] > worse[2]]
    right = sum(worse[0] > better[0] for worse, better in apart)
    print(f"{in_order} of {len(pairs)} pairs in order; intervals apart: {right} of {len(apart)}")
    if right < len(apart) or len(apart) < LEAST_PAIRS:
        raise DataError(f"{right} of {len(apart)} pairs with intervals apart are in order, of at least {LEAST_PAIRS}")


if __name__ == "__main__":
    run_cli(main)
