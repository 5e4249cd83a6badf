"""Turns images with captions into WebDataset shards that this project trains on.

    python scripts/make_webdataset.py photos/ --out shards      # photos/a.jpg, photos/a.txt, maybe photos/a.json
    python scripts/make_webdataset.py table.csv --out shards    # columns: path, caption, others become metadata
    python scripts/make_webdataset.py table.parquet --out shards --image-column picture --caption-column words

Images are copied byte for byte unless `--resize` is given. An empty .txt is the empty caption, as in training on the
folder itself; an image without .txt, or with an empty cell in a table, is skipped. What cannot be used is skipped,
counted and named in `OUT/skipped.jsonl`; `OUT/report.json` has the totals.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tqdm import tqdm

from sd_training.cli import run_cli
from sd_training.config.batch_plan import counted
from sd_training.config.local_paths import path_argument
from sd_training.data.loose_samples import Columns, open_source
from sd_training.data.problems import Problems
from sd_training.data.shard_writer import write_shards
from sd_training.errors import ConfigError, DataError


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line. Raises ConfigError for a number out of range."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("input", type=Path, help="folder of images, .csv, .tsv, .parquet, or folder of .parquet files")
    parser.add_argument("--out", type=path_argument, required=True, help="folder of the shards")
    parser.add_argument("--samples-per-shard", type=int, default=1000, help="default 1000")
    parser.add_argument(
        "--workers", type=int, default=min(8, os.cpu_count() or 1), help="threads; same result with any"
    )
    parser.add_argument("--image-column", help="image bytes, or paths relative to the table (default: the usual names)")
    parser.add_argument("--caption-column", help="captions (default: caption, text, txt, prompt, description or title)")
    parser.add_argument("--resize", type=int, metavar="N", help="shrink the short side to N pixels where it is longer")
    parser.add_argument("--shuffle", type=int, metavar="SEED", help="fixed random order (Parquet: by row groups)")
    args = parser.parse_args(argv)
    numbers = {"--samples-per-shard": args.samples_per_shard, "--workers": args.workers, "--resize": args.resize}
    if small := [f"{name}: {n} must be 1 or more" for name, n in numbers.items() if n is not None and n < 1]:
        raise ConfigError(small)
    return args


def prepare(out: Path) -> None:
    """Makes the folder. Raises ConfigError when it cannot be made or has shards, which would be mixed."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out: {out} cannot be made ({error.strerror})") from error
    if any(out.glob("*.tar")):
        raise ConfigError(f"--out: {out} has shards already; choose another folder or remove them")
    for leftover in out.glob("*.tar.partial"):
        leftover.unlink()


def make_shards(args: argparse.Namespace) -> tuple[int, int, Problems]:
    """Writes shards, `skipped.jsonl` and `report.json`; returns samples, shards and what was skipped."""
    source = open_source(args.input, Columns(args.image_column, args.caption_column), args.shuffle)
    prepare(args.out)
    samples, shards, problems = 0, 0, Problems()
    with tqdm(total=source.count, unit="images") as bar, (args.out / "skipped.jsonl").open("w") as skipped:
        for report in write_shards(
            args.out, source.samples, per_shard=args.samples_per_shard, workers=args.workers, resize=args.resize
        ):
            samples, shards = samples + report.written, shards + bool(report.written)
            for problem in report.skipped:
                problems.add(problem)
                skipped.write(json.dumps({"sample": problem.key, "reason": problem.reason}) + "\n")
            bar.update(report.written + len(report.skipped))
    totals = {"samples": samples, "shards": shards, "skipped": problems.total(), "reasons": problems.counts}
    (args.out / "report.json").write_text(json.dumps(totals, indent=2) + "\n", encoding="utf-8")
    return samples, shards, problems


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command."""
    args = parse_arguments(argv)
    try:
        samples, shards, problems = make_shards(args)
    except OSError as error:
        raise ConfigError(f"--out: {args.out} cannot be written ({error})") from error
    skipped = f"; skipped {problems.total():,}: {problems.text()}" if problems.total() else "; none skipped"
    if not samples:
        raise DataError(f"{args.input}: no sample can be used{skipped}. See {args.out / 'skipped.jsonl'}")
    print(f"{counted(samples, 'sample')} in {counted(shards, 'shard')} in {args.out}{skipped}")
    print(f"check them:   python train.py config=YOUR.yaml dataset.params.path={args.out} --dry-run")
    print(f"train:        python train.py config=YOUR.yaml dataset.params.path={args.out}")


if __name__ == "__main__":
    run_cli(main)
