"""Turns images with captions into WebDataset shards that this project trains on.

    python scripts/make_webdataset.py photos/ --out shards      # photos/a.jpg, photos/a.txt, maybe photos/a.json
    python scripts/make_webdataset.py table.csv --out shards    # columns: path, caption, others become metadata
    python scripts/make_webdataset.py table.parquet --out shards --image-column picture --caption-column words

Images are copied byte for byte unless `--resize` is given. An empty .txt is the empty caption, as in training on the
folder itself; an image without .txt, or with an empty cell in a table, is skipped. What cannot be used is skipped,
counted and named in `OUT/skipped.jsonl`; `OUT/report.json` has the totals.
"""

import argparse
import io
import json
import math
import os
import random
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pyarrow.parquet as pq
from PIL import Image
from pyarrow import ArrowException
from tqdm import tqdm
from webdataset import TarWriter

from sd_training.cli import run_cli
from sd_training.config.paths import path_argument
from sd_training.config.plan import counted
from sd_training.data.problems import BadSample, Problems, SkippedSample
from sd_training.data.samples.image import FORMATS, ImageRules, decode
from sd_training.data.sources.arrow_cells import IMAGE_COLUMNS, PATH_COLUMNS, ColumnOptions, Columns, pick_columns
from sd_training.data.sources.files import images_in
from sd_training.data.sources.reader import join, tidy
from sd_training.data.sources.table import TableRow, read_table
from sd_training.data.storage.locations import folders_below
from sd_training.errors import ConfigError, DataError

_OPTIONS = ColumnOptions("--image-column", "--caption-column")
_EXTENSIONS = {"JPEG": "jpg", "PNG": "png", "WEBP": "webp"}
_MAX_PIXELS = 178_956_970
_QUALITY = 95


@dataclass(frozen=True)
class LooseSample:
    """Where the parts of one sample are."""

    name: str
    """In reports: its path in the folder, or table and line."""
    image: Path | bytes | None = None
    """A file, or the content of one."""
    caption: Path | str | None = None
    """A text file, or the text."""
    metadata: Path | dict[str, Any] | None = None
    """A JSON file, or the other columns."""
    problem: str | None = None
    """Why it cannot be used, when that is known already."""


def open_samples(path: Path, columns: Columns, shuffle_seed: int | None = None) -> tuple[int, Iterator[LooseSample]]:
    """Finds the samples of a folder, CSV, TSV or Parquet file, or a folder of Parquet files.

    Args:
        path: what to read.
        columns: of a table.
        shuffle_seed: None keeps the order of the files' names and rows. Otherwise a fixed random order; Parquet is
            shuffled by row groups and inside each, so that no more than one of them is in memory.

    Returns:
        How many there are, and the samples in a fixed order.

    Raises:
        DataError: missing or unreadable input, or no samples in it.
        ConfigError: a table does not have the columns.
    """
    if not path.exists():
        raise DataError(f"{path}: no such file or folder")
    chance = None if shuffle_seed is None else random.Random(shuffle_seed)
    tables = sorted(path.rglob("*.parquet")) if path.is_dir() else [path] * (path.suffix.lower() == ".parquet")
    if tables:
        count, samples = _parquet(tables, columns, chance)
    elif path.is_dir() or path.suffix.lower() in {".csv", ".tsv"}:
        found = _folder(path) if path.is_dir() else _table(path, columns)
        if chance is not None:
            chance.shuffle(found)
        count, samples = len(found), iter(found)
    else:
        raise DataError(f"{path}: is not a folder, .csv, .tsv or .parquet file")
    if not count:
        raise DataError(f"{path}: has no samples" + (", no image files below it" if path.is_dir() else ""))
    return count, samples


def _folder(root: Path) -> list[LooseSample]:
    """As training reads an image folder; what it would leave out is a sample with a problem."""
    found: list[LooseSample] = []

    def report(folder: str, name: str, reason: str) -> None:
        if not name.lower().endswith(".txt"):  # one without an image, in a folder of captions perhaps
            found.append(LooseSample(os.path.relpath(os.path.join(folder, name), root), problem=reason))

    for folder in folders_below(str(root)):
        for image, caption, metadata in images_in(str(root), folder, partial(report, folder)):
            texts, values = (None if file is None else Path(join(folder, file.name)) for file in (caption, metadata))
            name = os.path.relpath(os.path.join(folder, image.name), root)
            found.append(LooseSample(name, Path(folder, image.name), texts, values))
    return sorted(found, key=lambda sample: sample.name)


def _table(path: Path, columns: Columns) -> list[LooseSample]:
    try:
        with path.open("rb") as file:
            names, rows = read_table(str(path), file)
            image, caption = pick_columns(str(path), names, columns, PATH_COLUMNS + IMAGE_COLUMNS, _OPTIONS)
            return [_from_table(path, row, image, caption) for row in rows]
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error


def _from_table(path: Path, row: TableRow, image: str, caption: str) -> LooseSample:
    name = f"{path.name} line {row.line}"
    if row.problem:
        return LooseSample(name, problem=row.problem)
    cells = dict(row.values)
    place, text = cells.pop(image), cells.pop(caption)
    return _from_row(name, path.parent, place, text, {k: _number(cell) for k, cell in cells.items() if cell != ""})


def _number(cell: str) -> str | int | float:
    """A CSV cell as a number when it is one, so that filters can compare it; "007" stays text."""
    plain = cell.lstrip("-")
    if plain.isascii() and plain.isdigit() and len(cell) - len(plain) <= 1:
        return cell if len(plain) > 1 and plain.startswith("0") else int(cell)
    try:
        return float(cell) if "." in cell and "_" not in cell else cell
    except ValueError:
        return cell


def _from_row(name: str, base: Path, image: Any, caption: Any, metadata: dict[str, Any]) -> LooseSample:
    """A table's row; an image cell is bytes, a path relative to the table, or a struct of both."""
    if isinstance(image, dict):
        image = image.get("bytes") or image.get("path")
    if isinstance(image, str) and "://" in image:
        return LooseSample(name, problem=f"image is a URL: download it first, {image}")
    if not isinstance(image, (str, bytes)) or not image:
        return LooseSample(name, problem="image cell is empty")
    if not isinstance(caption, str):
        return LooseSample(name, problem=f"caption is no text: {type(caption).__name__}")
    return LooseSample(name, image if isinstance(image, bytes) else base / image, caption, metadata)


def _parquet(
    files: Sequence[Path], columns: Columns, chance: random.Random | None
) -> tuple[int, Iterator[LooseSample]]:
    groups: list[tuple[Path, int, str, str]] = []
    count = 0
    try:
        for path in files:
            with pq.ParquetFile(path) as table:
                names = table.schema_arrow.names
                picked = pick_columns(str(path), names, columns, IMAGE_COLUMNS + PATH_COLUMNS, _OPTIONS)
                groups += [(path, group, *picked) for group in range(table.num_row_groups)]
                count += table.metadata.num_rows
    except (OSError, ArrowException) as error:
        raise DataError(f"{path}: is not a readable Parquet file ({error})") from error
    if chance is not None:
        chance.shuffle(groups)

    def samples() -> Iterator[LooseSample]:
        for path, group, image, caption in groups:
            try:
                with pq.ParquetFile(path) as table:
                    rows = table.read_row_group(group)
            except (OSError, ArrowException) as error:
                raise DataError(f"{path}: row group {group} cannot be read ({error})") from error
            order = list(range(rows.num_rows))
            if chance is not None:
                chance.shuffle(order)
            for i in order:
                row = {name: rows.column(name)[i].as_py() for name in rows.column_names}
                text = row.pop(caption)
                yield _from_row(f"{path.name} group {group} row {i}", path.parent, row.pop(image), text, row)

    return count, samples()


def encode_sample(sample: LooseSample, resize: int | None) -> dict[str, Any]:
    """The members of one sample by extension: image, `txt` and `json`.

    The image's bytes are kept as they are. With `resize` an image whose short side is longer is made smaller, upright
    and RGB, in its own format. The metadata get `original_width` and `original_height` [pixels, upright] unless they
    have them.

    Raises:
        BadSample: a part is missing or damaged; the message is the reason.
    """
    if sample.problem is not None or sample.image is None:
        raise BadSample(sample.problem or "image is missing")
    data = sample.image if isinstance(sample.image, bytes) else _read(sample.image, "image")
    caption, metadata = _caption(sample.caption), _metadata(sample.metadata)
    image = Image.fromarray(decode(data, ImageRules(_MAX_PIXELS)).pixels)
    kind = str(Image.open(io.BytesIO(data), formats=FORMATS).format)
    metadata = {"original_width": image.width, "original_height": image.height, **metadata}
    if resize is not None and min(image.size) > resize:
        scale, stream = resize / min(image.size), io.BytesIO()
        size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
        image.resize(size, Image.Resampling.LANCZOS).save(stream, format=kind, quality=_QUALITY)
        data = stream.getvalue()
    text = json.dumps(_plain(metadata), ensure_ascii=False, allow_nan=False)
    return {_EXTENSIONS[kind]: data, "txt": caption.encode(), "json": text.encode()}


def _read(path: Path, what: str) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise BadSample(f"{what} is missing: {path.name}") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise BadSample(f"{what} cannot be read: {path.name}, {error}") from error


def _caption(caption: Path | str | None) -> str:
    """As training on the files themselves takes it: an empty text file is the empty caption, an empty cell is none."""
    if caption is None:
        raise BadSample("caption is missing")
    try:
        if isinstance(caption, Path):
            return tidy(_read(caption, "caption").decode("utf-8-sig"))
        caption.encode()  # a lone surrogate from a table would fail later
    except UnicodeError:
        raise BadSample("caption is not UTF-8 text") from None
    if not caption.strip():
        raise BadSample("caption is empty")
    return caption.strip()


def _metadata(metadata: Path | dict[str, Any] | None) -> dict[str, Any]:
    if not isinstance(metadata, Path):
        return metadata or {}
    try:
        value = json.loads(_read(metadata, "metadata"))
    except (ValueError, RecursionError):
        raise BadSample("metadata is not JSON") from None
    if not isinstance(value, dict):
        raise BadSample("metadata is not a JSON object")
    return value


def _plain(value: Any) -> Any:
    """For JSON: bytes are left out, what is not a number becomes null, dates and decimals become text."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items() if not isinstance(v, (bytes, bytearray))}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value if not isinstance(v, (bytes, bytearray))]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (str, int)) else str(value)


@dataclass
class ShardReport:
    """What became of the samples of one shard."""

    shard: str
    written: int = 0
    skipped: list[SkippedSample] = field(default_factory=list)


def write_shard(path: Path, samples: Sequence[tuple[int, LooseSample]], resize: int | None) -> ShardReport:
    """Writes one tar of (number, sample) pairs; keys are the numbers, so they are unique over all shards.

    The file appears under its name when it is complete; a shard without a usable sample is not written. The same
    samples give the same bytes.
    """
    report = ShardReport(path.name)
    partial_file = path.with_name(f"{path.name}.partial")
    with partial_file.open("wb") as stream:
        with TarWriter(stream, mtime=0) as sink:
            for number, sample in samples:
                try:
                    members = encode_sample(sample, resize)
                except BadSample as error:
                    report.skipped.append(SkippedSample(path.name, sample.name, str(error)))
                    continue
                sink.write({"__key__": f"{number:09d}", **members})
                report.written += 1
        stream.flush()
        os.fsync(stream.fileno())
    if report.written:
        os.replace(partial_file, path)
    else:
        partial_file.unlink()
    return report


def write_shards(
    folder: Path, samples: Iterator[LooseSample], *, per_shard: int, workers: int, resize: int | None
) -> Iterator[ShardReport]:
    """Writes `folder/00000.tar`, `00001.tar`, ... of `per_shard` samples each, and reports them in order.

    Which sample goes where does not depend on `workers`. The samples of at most `workers` + 1 shards are in memory.
    """
    numbered = enumerate(samples)
    with ThreadPoolExecutor(workers) as pool:
        running: deque[Future[ShardReport]] = deque()
        for shard, chunk in enumerate(iter(lambda: list(islice(numbered, per_shard)), [])):
            if len(running) >= workers:
                yield running.popleft().result()
            running.append(pool.submit(write_shard, folder / f"{shard:05d}.tar", chunk, resize))
        while running:
            yield running.popleft().result()


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
    count, found = open_samples(args.input, Columns(args.image_column, args.caption_column), args.shuffle)
    prepare(args.out)
    samples, shards, problems = 0, 0, Problems()
    with tqdm(total=count, unit="images") as bar, (args.out / "skipped.jsonl").open("w") as skipped:
        for report in write_shards(
            args.out, found, per_shard=args.samples_per_shard, workers=args.workers, resize=args.resize
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
