"""Turns images with captions into WebDataset shards that this project trains on.

    python scripts/make_webdataset.py photos/ --out shards      # photos/a.jpg, photos/a.txt, maybe photos/a.json
    python scripts/make_webdataset.py table.csv --out shards    # columns: path, caption, others become metadata
    python scripts/make_webdataset.py table.parquet --out shards --image-column picture --caption-column words
    python scripts/make_webdataset.py laion/ --out shards --filter 'width=>=512' --filter 'pwatermark=<=0.5'

The last makes new shards from shards, of the samples that pass the filters of a training (docs/data.md#filters): once
for the strictest filter, instead of skipping the others at every visit.
The input is read as training reads it. Images are copied byte for byte unless `--resize` is given. An empty .txt is the
empty caption; an image without .txt, or with an empty cell in a table, is skipped, and so is one whose .json is broken.
Nested values of a .json file are kept, those of a table or a shard are left out. What cannot be used is skipped,
counted and named in `OUT/skipped.jsonl` (of what already indexing finds, the first hundred of each kind);
`OUT/report.json` has the totals.
"""

import argparse
import io
import json
import os
import random
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from PIL import Image
from tqdm import tqdm
from webdataset import TarWriter

from sd_training.checkpoint.folder import whole_file
from sd_training.cli import check_counts, run_cli
from sd_training.config.data_schema import RemoteConfig, SourceParams, SourceType
from sd_training.config.filters import Filter, parse_filters
from sd_training.config.plan import counted
from sd_training.config.value_types import path_argument
from sd_training.data.index.selection import evaluate
from sd_training.data.index.store import load_index
from sd_training.data.samples.image import FORMATS, decode
from sd_training.data.sources.base import NUMBER, TEXT, DatasetIndex, IndexedReader, Problems, SkippedSample, Source
from sd_training.data.sources.choose import make_source
from sd_training.data.sources.files import TABLE_EXTENSIONS, FolderSource, partner_folders
from sd_training.errors import BadSample, ConfigError, DataError

_EXTENSIONS = {"JPEG": "jpg", "PNG": "png", "WEBP": "webp"}
MAX_PIXELS = 178_956_970
_QUALITY = 95
_CACHE_GIB = 16.0
"""Of unpacked row groups in the folder for temporary files: each of `--workers` reads one at a time."""
_FOUND_LATER = ("caption file has too many bytes", "image size cannot be determined", "metadata is not a JSON object")
"""Problems of samples that are in the index: writing them finds what is wrong."""


def open_input(path: Path, image_column: str | None, caption_column: str | None, scratch: Path) -> tuple[str, Source]:
    """The `dataset.type` that the input looks like, and its source.

    Raises:
        DataError: no such input.
        ConfigError: a table does not have the columns.
    """
    if not path.exists():
        raise DataError(f"{path}: no such file or folder")
    kind: SourceType = "ImageFolder"
    if path.suffix.lower() == ".tar" or (path.is_dir() and any(path.glob("*.tar"))):
        kind = "WebDataset"
    elif path.suffix.lower() == ".parquet" or (path.is_dir() and any(path.glob("*.parquet"))):
        kind = "Parquet"
    elif path.suffix.lower() in TABLE_EXTENSIONS:
        kind = "Table"
    elif not path.is_dir():
        raise DataError(f"{path}: is not a folder, {', '.join(TABLE_EXTENSIONS)}, .parquet or .tar file")
    params = SourceParams(path=str(path), image_column=image_column, caption_column=caption_column)
    return kind, make_source(kind, params, RemoteConfig(cache_dir=str(scratch / "cache"), cache_gib=_CACHE_GIB))


def parse_rules(words: Sequence[str]) -> list[Filter]:
    """Filters of `FIELD=RULE`. Raises ConfigError."""
    rules, problems = parse_filters(dict(word.partition("=")[::2] for word in words))
    if problems:
        raise ConfigError([f"--filter: {problem.removeprefix('dataset.params.filters.')}" for problem in problems])
    return rules


def sample_order(index: DatasetIndex, rules: Sequence[Filter], by_block: bool, shuffle_seed: int | None) -> list[int]:
    """The samples that pass, by name and row; with a seed in a fixed random order: Parquet's row groups, and the rows
    in each, so that no more than one of them is unpacked at a time."""
    passes = np.ones(len(index), dtype=bool)
    for rule in rules:
        passes &= evaluate(rule, index.columns, len(index))
    samples = np.flatnonzero(passes).tolist()
    if shuffle_seed is None:
        return list(samples)
    block_of, chance = index.numbers("block"), random.Random(shuffle_seed)
    blocks = [list(rows) for _, rows in groupby(samples, lambda sample: block_of[sample] if by_block else 0)]
    chance.shuffle(blocks)
    for rows in blocks:
        chance.shuffle(rows)
    return [sample for rows in blocks for sample in rows]


def encode_sample(
    source: Source, index: DatasetIndex, reader: IndexedReader, sample: int, resize: int | None
) -> dict[str, Any]:
    """The members of one sample by extension: image, `txt` and `json`.

    The image's bytes are kept as they are. With `resize` an image whose short side is longer is made smaller, upright
    and RGB, in its own format. The metadata get `original_width` and `original_height` [pixels, upright] unless they
    have them.

    Raises:
        BadSample: a part is missing or damaged; the message is the reason.
    """
    if index.numbers("caption_length")[sample] < 0:
        raise BadSample("caption is missing")
    data, caption = reader.image(sample), reader.caption(sample)
    image = Image.fromarray(decode(data, MAX_PIXELS).pixels)
    kind = str(Image.open(io.BytesIO(data), formats=FORMATS).format)
    metadata: dict[str, Any] = {"original_width": image.width, "original_height": image.height}
    for field in sorted(index.fields):
        value: Any = index.text(TEXT + field, sample)
        number: float | None = index.columns[NUMBER + field][sample].as_py()
        if value is None and number is not None:
            value = int(number) if number.is_integer() else number
        if value is not None and value != caption:  # a table's column of captions
            metadata[field] = value
    metadata |= whole_json(source, index, sample)
    if resize is not None and min(image.size) > resize:
        scale, stream = resize / min(image.size), io.BytesIO()
        size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
        image.resize(size, Image.Resampling.LANCZOS).save(stream, format=kind, quality=_QUALITY)
        data = stream.getvalue()
    text = json.dumps(metadata, ensure_ascii=False, allow_nan=False)
    return {_EXTENSIONS[kind]: data, "txt": caption.encode(), "json": text.encode()}


def whole_json(source: Source, index: DatasetIndex, sample: int) -> dict[str, Any]:
    """The JSON file of an image in a folder, with the nested values that the index leaves out; empty without one.

    Raises:
        BadSample: it is not a JSON object.
    """
    if not isinstance(source, FolderSource):
        return {}
    folder, name = index.name(sample)
    places = (folder, *partner_folders(source.paths[0], folder))
    file = next(filter(Path.exists, (Path(place, f"{Path(name).stem}.json") for place in places)), None)
    if file is None:
        return {}
    try:
        text = file.read_text(encoding="utf-8-sig", errors="replace")
        value = json.loads(text, parse_constant=lambda _: None)  # NaN is no JSON
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise BadSample("metadata is not a JSON object")
    return value


def write_shard(
    path: Path, source: Source, index: DatasetIndex, samples: Sequence[tuple[int, int]], resize: int | None
) -> list[SkippedSample]:
    """Writes one tar of (number, sample) pairs, whose keys are the numbers, and returns what was skipped.

    The file appears under its name when it is complete; a shard without a usable sample is not written. The same
    samples give the same bytes.
    """
    reader, skipped = IndexedReader(index, source), list[SkippedSample]()
    with whole_file(path) as beside, beside.open("wb") as stream, TarWriter(stream, mtime=0) as sink:
        for number, sample in samples:
            try:
                sink.write({"__key__": f"{number:09d}", **encode_sample(source, index, reader, sample, resize)})
            except BadSample as error:
                skipped.append(SkippedSample(*index.name(sample), str(error)))
    if len(skipped) == len(samples):
        path.unlink()
    return skipped


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line. Raises ConfigError for a number out of range."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("input", type=Path, help="folder of images, table, .parquet or .tar, or folder of such files")
    parser.add_argument("--out", type=path_argument, required=True, help="folder of the shards")
    parser.add_argument("--samples-per-shard", type=int, default=1000, help="default 1000")
    parser.add_argument(
        "--workers", type=int, default=min(8, os.cpu_count() or 1), help="threads; same result with any"
    )
    parser.add_argument("--image-column", help="image bytes, or paths relative to the table (default: the usual names)")
    parser.add_argument("--caption-column", help="captions (default: caption, text, txt, prompt, description or title)")
    parser.add_argument("--filter", action="append", default=[], metavar="FIELD=RULE", help="as dataset.params.filters")
    parser.add_argument("--resize", type=int, metavar="N", help="shrink the short side to N pixels where it is longer")
    parser.add_argument("--shuffle", type=int, metavar="SEED", help="fixed random order (Parquet: by row groups)")
    args = parser.parse_args(argv)
    args.rules = parse_rules(args.filter)
    check_counts(args, "samples_per_shard", "workers", "resize")
    return args


def write_shards(args: argparse.Namespace, scratch: Path) -> tuple[dict[str, int], Problems, list[SkippedSample]]:
    """Writes `OUT/00000.tar`, `00001.tar`, …; which sample goes where does not depend on `--workers`.

    Returns:
        How many samples and shards were written, and how many samples do not pass the filters; what is wrong with
        others; and these, by name.
    """
    kind, source = open_input(args.input, args.image_column, args.caption_column, scratch)
    index = load_index(source, scratch / "index", load_index(source, scratch / "index").fields)
    args.out.mkdir(parents=True, exist_ok=True)
    if any(args.out.glob("*.tar")):
        raise ConfigError(f"--out: {args.out} has shards already; choose another folder or remove them")
    for reason in _FOUND_LATER:
        index.problems.counts.pop(reason, None)
        index.problems.examples.pop(reason, None)
    skipped, samples, shards = list(index.problems.named()), 0, 0
    order = list(enumerate(sample_order(index, args.rules, kind == "Parquet", args.shuffle)))
    parts = [order[start : start + args.samples_per_shard] for start in range(0, len(order), args.samples_per_shard)]

    def write(number: int) -> list[SkippedSample]:
        return write_shard(args.out / f"{number:05d}.tar", source, index, parts[number], args.resize)

    with ThreadPoolExecutor(args.workers) as pool:
        done = tqdm(pool.map(write, range(len(parts))), total=len(parts), unit="shards")
        for part, found in zip(parts, done, strict=True):
            skipped += found
            samples, shards = samples + len(part) - len(found), shards + (len(part) > len(found))
            for problem in found:
                index.problems.add(problem)
    counts = {"samples": samples, "shards": shards, "filtered_out": len(index) - len(order)}
    return counts, index.problems, skipped


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command."""
    args = parse_arguments(argv)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            counts, problems, skipped = write_shards(args, Path(scratch))
        lines = [json.dumps({"sample": f"{p.shard}/{p.key}", "reason": p.reason}) + "\n" for p in skipped]
        totals = {**counts, "skipped": problems.total(), "reasons": problems.counts}
        (args.out / "skipped.jsonl").write_text("".join(lines), encoding="utf-8")
        (args.out / "report.json").write_text(json.dumps(totals, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out: {args.out} cannot be written ({error})") from error
    left_out = f"; filtered out: {counts['filtered_out']:,}" if args.rules else ""
    left_out += f"; skipped {problems.total():,}: {problems.text()}" if problems.total() else "; none skipped"
    if not counts["samples"]:
        raise DataError(f"{args.input}: no sample can be used{left_out}. See {args.out / 'skipped.jsonl'}")
    print(f"{counted(counts['samples'], 'sample')} in {counted(counts['shards'], 'shard')} in {args.out}{left_out}")
    print(f"train, or check with --dry-run:  python train.py config=YOUR.yaml dataset.params.path={args.out}")


if __name__ == "__main__":
    run_cli(main)
